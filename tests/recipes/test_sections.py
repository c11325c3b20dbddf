"""build_sections: every section that users know is built, refused or passed over, and a misspelt one is named."""

import logging
import traceback

import pytest

from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.config.overrides import apply_overrides, parse_overrides
from automodel.config.sections import NotAvailableYetError
from automodel.data.collate import default_collater
from automodel.data.loader import StatefulDataLoader
from automodel.recipes.llm import TrainFinetuneRecipeForNextTokenPrediction
from automodel.recipes.sections import build_sections, check_sections
from automodel.training.loss import MaskedCrossEntropy

NEEDED = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
    "dataset": {"_target_": "automodel.data.text.TextFilesDataset", "context_length": 8},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.1},
}


def build(**sections):
    return build_sections(ConfigNode({**NEEDED, **sections}))


def test_three_sections_are_enough():
    built = build()
    assert built.recipe is TrainFinetuneRecipeForNextTokenPrediction
    assert built.rng.seed == 42
    assert not built.deterministic
    assert built.tokenizer is built.dataloader is built.loss_fn is built.validation_dataset is None


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("absent", [True, False])
def test_a_section_that_is_needed(name, absent):
    sections = {**NEEDED, name: None}
    if absent:
        del sections[name]
    with pytest.raises(ValueError, match=f"the recipe needs a section {name}"):
        build_sections(ConfigNode(sections))


NOT_BUILT = {
    "packed_sequence": {"packed_sequence_size": 4096, "split_across_pack": False},
    "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 8},
    "freeze_config": {"freeze_embeddings": True},
    "processor": {"_target_": "transformers.AutoProcessor.from_pretrained"},
    "benchmark": {"warmup_steps": 10, "peak_tflops": 989},
    "compile": {"enabled": True, "mode": "default"},
    "wandb": {"project": "mine"},
    "fp8": {"enabled": True},
    "parallelizer": {"_target_": "nemo_automodel.components.distributed.parallelizer.Parallelizer"},
    "nvtx": True,
    "quantization": {"load_in_4bit": True},
    "prewarm": {"enabled": True},
    "neftune": {"noise_alpha": 5},
    "qat": {"enabled": True},
    "skypilot": {"job_name": "x"},
    "slurm": {"nodes": 2},
    "mfu": {"enabled": True},
    "kernel_cache": {"enabled": True},
    "teacher_model": {"pretrained_model_name_or_path": "x"},
    "kd_ratio": 0.5,
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_section_that_is_not_built_yet_is_refused(name):
    with pytest.raises(NotAvailableYetError, match=f"'{name}' is not available yet"):
        build(**{name: NOT_BUILT[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, None) for name in NOT_BUILT],
        *[(name, {"enabled": False, "max_rows": 8}) for name in ("prewarm", "qat", "mfu")],
        ("packed_sequence", {"packed_sequence_size": 0, "split_across_pack": False, "max_packs": 4}),
        ("packed_sequence", {"packed_sequence_size": None}),
        ("compile", {"enabled": False, "mode": "default", "fullgraph": False, "dynamic": True}),
        ("compile", {"mode": "default"}),
        ("wandb", {"enable": False, "project": "mine"}),
        ("fp8", {"enabled": "false", "recipe_name": "tensorwise"}),
        ("nvtx", False),
        ("kernel_cache", {}),
        ("qat", {"enabled": False, "quantizer": {"_target_": "torchao.quantization.qat.Nothing"}}),
        ("parallelizer", {"enabled": False, "_target_": "nemo_automodel.components.nothing.Nothing"}),
    ],
)
def test_a_section_that_is_switched_off_passes(name, value):
    build(**{name: value})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("distributed", "tp_size", 2),
        ("distributed", "pp_size", 2),
        ("distributed", "cp_size", 4),
        ("distributed", "ep_size", 8),
        ("checkpoint", "model_save_format", "torch_save"),
        ("checkpoint", "is_async", True),
        ("checkpoint", "staging_dir", "/scratch"),
    ],
)
def test_a_key_that_is_not_built_yet_is_refused_when_on(section, key, value):
    with pytest.raises(NotAvailableYetError, match=rf"{section}\.{key}: {value!r} is not available yet"):
        build(**{section: {key: value}})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("distributed", {"strategy": "fsdp2", "tp_size": 1, "pp_size": 1, "cp_size": 1, "ep_size": 1}),
        ("distributed", {"dp_size": None, "tp_size": None, "sequence_parallel": False, "dp_replicate_size": 1}),
        ("distributed", {"strategy": "ddp", "pipeline": {"pp_schedule": "1f1b"}, "moe": {"a": 1}}),
        ("distributed", {"activation_checkpointing": False, "enable_compile": False}),
        ("checkpoint", {"model_save_format": "safetensors", "is_async": False, "staging_dir": None}),
        ("clip_grad_norm", {"max_norm": None}),
        ("dist_env", {"backend": "nccl", "timeout_minutes": 1}),
        ("lr_scheduler", {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "min_lr": 0}),
    ],
)
def test_a_key_that_is_switched_off_passes(section, values):
    built = getattr(build(**{section: values}), section)
    for key, value in values.items():
        if not isinstance(value, dict):
            assert getattr(built, key) == value


@pytest.mark.parametrize("value", [None, False])
def test_an_optional_section_is_none_unless_the_recipe_has_it(value):
    assert build().embedding_row_repair is None
    assert build(embedding_row_repair=value).embedding_row_repair is None
    assert build(embedding_row_repair={}).embedding_row_repair.max_rows == 256
    assert build(embedding_row_repair={"enabled": False}).embedding_row_repair.enabled is False
    with pytest.raises(ValueError, match=r"^embedding_row_repair\.max_rows must be positive, got 0"):
        build(embedding_row_repair={"max_rows": 0})


def test_a_misspelt_section_is_named_with_the_nearest_one():
    with pytest.raises(
        ValueError, match=r"unknown section 'embeding_row_repair' \(did you mean 'embedding_row_repair'"
    ):
        build(embeding_row_repair={"enabled": True})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("step_scheduler", {"max_step": 3}, r"unknown key step_scheduler\.max_step \(did you mean 'max_steps'"),
        ("optimizer", {"_target_": "torch.optim.AdamW", "learning_rate": 3}, r"unknown key optimizer\.learning_rate"),
        ("dataset", {**NEEDED["dataset"], "contextlength": 3}, r"dataset\.contextlength \(did you mean 'context_len"),
        ("distributed", {"mp_policy": {"param_dtpye": "x"}}, r"distributed\.mp_policy\.param_dtpye \(did you mean"),
        ("dataset", {"_target_": NEEDED["dataset"]["_target_"]}, r"dataset\.context_length is required"),
        ("model", {"in_features": 2}, "model needs a _target_"),
        ("rng", {"seed": -1}, r"rng\.seed must be between"),
        ("rng", {"seed": "abc"}, r"rng\.seed must be an integer, got 'abc'"),
        ("deterministic", "sometimes", "deterministic must be true or false"),
    ],
)
def test_a_wrong_key_or_value_is_named(section, values, message):
    with pytest.raises(ValueError, match=message):
        build(**{section: values})


@pytest.mark.parametrize(
    "sections", [{"rng": 5}, {"rng": 5, "seed": 1}, {"model": "gpt2"}, {"distributed": "fsdp2"}, {"loss_fn": 3}]
)
def test_a_section_that_is_no_mapping_is_a_type_error(sections):
    with pytest.raises(TypeError, match="must be a mapping"):
        build(**sections)


def test_a_target_that_does_not_exist_is_an_import_error_that_says_where():
    with pytest.raises(ImportError) as error:
        build(loss_fn={"_target_": "automodel.training.loss.MaskedCrossEntropi"})
    assert any("loss_fn._target_" in note for note in error.value.__notes__)


def test_one_error_tells_every_mistake(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {_target_: torch.nn.Linear, in_features: 2, out_feature: 2}\n"
        "dataset: 5\n"
        "optimizer: {_target_: torch.optim.AdamX}\n"
        "peft: {dim: 8}\n"
        "rng: {sed: 1}\n"
    )
    with pytest.raises(NotAvailableYetError, match="'peft' is not available yet") as caught:
        build_sections(load_yaml_config(file))
    place, *others = caught.value.__notes__
    assert place == f"in {file}:4"
    no_attribute = "torch.optim has no attribute 'AdamX' (did you mean 'Adam'?)"
    assert [other.splitlines()[0] for other in others] == [
        "also: unknown key rng.sed (did you mean 'seed'?)",
        "also: unknown key model.out_feature (did you mean 'out_features'?): Linear does not accept it",
        "also: dataset must be a mapping with a _target_, got 5",
        f"also: target 'torch.optim.AdamX' cannot be resolved: {no_attribute}",
    ]
    assert [f"{file}:{line}" in other for line, other in zip((5, 1, 2, 3), others, strict=True)] == [True] * 4


def test_the_first_error_keeps_its_class():
    with pytest.raises(TypeError, match="dataset must be a mapping"):
        build(dataset=5, loss_fn={"_target_": "am_absent.loss"})
    with pytest.raises(ImportError, match="am_absent"):
        build(loss_fn={"_target_": "am_absent.loss"}, deterministic="x")


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"step_scheduler": {"global_batch_size": "${AM_SECRET}"}}, "AM_SECRET"),
        ({"checkpoint": {"is_async": "${AM_SECRET}"}}, "AM_SECRET"),
        ({"rng": {"seed": "${AM_SECRET}"}}, "AM_SECRET"),
        ({"seed": "${AM_SECRET}"}, "AM_SECRET"),
        ({"seed": "${AM_SECRET}", "rng": {"seed": 5}}, "AM_SECRET"),
        ({"deterministic": "${AM_SECRET}"}, "AM_SECRET"),
        ({"dataset": "${AM_SECRET}"}, "AM_SECRET"),
        ({"dataset": ["${AM_SECRET}"]}, "a list of 1"),
        ({"rng": "${AM_SECRET}"}, "AM_SECRET"),
        ({"recipe": "${AM_SECRET}"}, "AM_SECRET"),
    ],
)
@pytest.mark.parametrize("secret", ["-74189", "sword-fish", "74189.5"])
def test_a_value_of_the_environment_is_never_in_an_error(sections, name, secret, monkeypatch):
    monkeypatch.setenv("AM_SECRET", secret)
    with pytest.raises((ValueError, TypeError, ImportError), match=name) as caught:
        build(**sections)
    assert secret not in "".join(traceback.format_exception(caught.value))


def test_an_override_of_an_unknown_key_is_named_as_one():
    config = ConfigNode(NEEDED)
    apply_overrides(config, parse_overrides(["--optimizer.lrr=1"]))
    with pytest.raises(ValueError, match=r"unknown key optimizer\.lrr \(did you mean 'lr'\?\)") as caught:
        build_sections(config)
    assert caught.value.__notes__ == ["in a command-line override"]


@pytest.mark.parametrize(
    ("section", "target"),
    [
        ("rng", "nemo_automodel.components.training.rng.StatefulRNG"),
        ("step_scheduler", "nemo_automodel.components.training.step_scheduler.StepScheduler"),
        ("checkpoint", "nemo_automodel.components.checkpoint.checkpointing.CheckpointingConfig"),
        ("lr_scheduler", "nemo_automodel.components.optim.scheduler.OptimizerParamScheduler"),
    ],
)
def test_a_section_with_a_schema_may_name_its_own_class_and_no_other(section, target):
    build(**{section: {"_target_": target}})
    with pytest.raises(NotAvailableYetError, match=rf"{section}\._target_: 'my\.own\.Class' is not available yet"):
        build(**{section: {"_target_": "my.own.Class"}})


def test_sections_are_checked_without_the_targets_that_are_not_named():
    config = ConfigNode({"model": {"_target_": "am_absent.model"}, "optimizer": {"_target_": "torch.optim.SGD"}})
    check_sections(config)
    check_sections(config, targets=["optimizer", "dataset"])
    with pytest.raises(ImportError, match="am_absent"):
        check_sections(config, targets=["model"])
    with pytest.raises(ValueError, match="unknown section 'modle'"):
        check_sections(ConfigNode({"modle": {}}))


def test_metadata_and_anchors_are_passed_over_in_one_line(caplog):
    caplog.set_level(logging.INFO)
    build(
        ci={"recipe_owner": "me", "anything": {"_target_": "no.such.thing"}},
        _backend={"_target_": "nemo_automodel.components.models.common.Nothing"},
        _lr=3,
    )
    (line,) = [record.message for record in caplog.records if "passed over" in record.message]
    assert all(name in line for name in ("ci", "_backend", "_lr"))


MANAGER = "nemo_automodel.components.distributed.fsdp2.FSDP2Manager"


def test_the_older_form_of_distributed_is_translated_with_a_warning(caplog):
    built = build(
        distributed={
            "_target_": MANAGER,
            "dp_size": "none",
            "dp_replicate_size": 1,
            "tp_size": 1,
            "cp_size": 1,
            "sequence_parallel": False,
            "mp_policy": {
                "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
                "param_dtype": "torch.bfloat16",
                "output_dtype": "bfloat16",
            },
            "offload_policy": None,
        }
    ).distributed
    assert built.strategy == "fsdp2"
    assert (built.mp_policy.param_dtype, built.mp_policy.output_dtype) == ("bfloat16", "bfloat16")
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "FSDP2Manager is an older form, read as strategy: fsdp2" in record.message


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"_target_": MANAGER, "tp_size": 2}, NotAvailableYetError, r"distributed\.tp_size: 2"),
        ({"_target_": MANAGER, "tp_sise": 1}, ValueError, r"distributed\.tp_sise"),
        ({"_target_": "x.FSDP3Manager"}, ValueError, r"distributed\._target_ must be absent.*strategy: fsdp2"),
    ],
)
def test_the_older_form_of_distributed_is_checked_as_well(values, error, message):
    with pytest.raises(error, match=message):
        build(distributed=values)


def test_seed_is_the_older_form_of_rng_seed():
    assert build(seed=5).rng.seed == 5
    assert build(seed=5, rng={"ranked": True}).rng.ranked
    assert build(seed=5, rng={"seed": 5}).rng.seed == 5
    assert build(seed=None, rng={"seed": 6}).rng.seed == 6
    with pytest.raises(ValueError, match=r"seed is 5 but rng\.seed is 6"):
        build(seed=5, rng={"seed": 6})


BARE = "TrainFinetuneRecipeForNextTokenPrediction"


@pytest.mark.parametrize(
    "recipe",
    [
        BARE,
        f"nemo_automodel.recipes.llm.train_ft.{BARE}",
        {"_target_": f"nemo_automodel.recipes.llm.train_ft.{BARE}"},
        {"_target_": f"automodel.recipes.llm.{BARE}"},
    ],
)
def test_a_recipe_by_name_path_or_mapping(recipe):
    assert build(recipe=recipe).recipe is TrainFinetuneRecipeForNextTokenPrediction


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("BenchmarkingRecipeForNextTokenPrediction", NotAvailableYetError, "is not available yet"),
        ({"_target_": "nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM"}, NotAvailableYetError, "not avail"),
        ("TrainFinetuneRecipeForNextTokenPredicton", ValueError, f"did you mean '{BARE}'"),
        ("my.own.Recipe", ImportError, "my.own.Recipe"),
        (5, ValueError, "recipe must be the name"),
        ("os.getcwd", ValueError, "recipe 'os.getcwd' is no recipe class: it needs the methods setup and run_train"),
        ("builtins.dict", ValueError, "recipe 'builtins.dict' is no recipe class"),
        ({"name": "x"}, ValueError, "recipe must be the name"),
    ],
)
def test_a_recipe_that_is_not_there(recipe, error, message):
    with pytest.raises(error, match=message):
        build(recipe=recipe)


def test_deterministic_is_a_flag_or_a_mapping():
    assert build(deterministic=True).deterministic
    assert build(deterministic={"enabled": True}).deterministic
    assert not build(deterministic={"enabled": False}).deterministic


LOADER = {
    "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
    "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
}


def test_a_recipe_as_users_of_the_reference_system_write_it():
    built = build_sections(
        ConfigNode(
            {
                "recipe": BARE,
                "seed": 1111,
                "step_scheduler": {
                    "global_batch_size": 64,
                    "local_batch_size": 8,
                    "ckpt_every_steps": 1000,
                    "val_every_steps": 10,
                    "num_epochs": 2,
                },
                "dist_env": {"backend": "nccl", "timeout_minutes": 1},
                "rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 1111, "ranked": True},
                "model": {
                    "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
                    "config": {"_target_": "transformers.LlamaConfig", "vocab_size": 64, "hidden_size": 64},
                },
                "checkpoint": {
                    "enabled": True,
                    "checkpoint_dir": "checkpoints/",
                    "model_save_format": "safetensors",
                    "save_consolidated": False,
                },
                "distributed": {"_target_": MANAGER, "dp_size": "none", "tp_size": 1, "cp_size": 1},
                "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
                "dataset": {
                    "_target_": "nemo_automodel.components.datasets.llm.text.TextFilesDataset",
                    "context_length": 16,
                },
                "packed_sequence": {"packed_sequence_size": 0},
                "dataloader": {**LOADER, "shuffle": True},
                "validation_dataset": {"_target_": "automodel.data.text.TextFilesDataset", "context_length": 16},
                "validation_dataloader": LOADER,
                "optimizer": {
                    "_target_": "torch.optim.Adam",
                    "betas": [0.9, 0.999],
                    "eps": 1e-8,
                    "lr": 1.0e-5,
                    "weight_decay": 0,
                },
                "lr_scheduler": {"lr_decay_style": "cosine", "min_lr": 1.0e-6},
                "wandb": None,
                "ci": {"recipe_owner": "someone"},
            }
        )
    )
    assert built.recipe is TrainFinetuneRecipeForNextTokenPrediction
    assert built.rng.ranked
    assert built.dataloader["_target_"] is StatefulDataLoader
    assert built.dataloader["collate_fn"] is default_collater
    assert isinstance(built.loss_fn.instantiate(), MaskedCrossEntropy)
    assert built.model.instantiate().config.hidden_size == 64
