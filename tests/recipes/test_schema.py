"""The table of sections: everything that users know is in it, and each part of it says something."""

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from automodel.recipes.planned_sections import PLANNED_SECTIONS
from automodel.recipes.reference_keys import REFERENCE_KEYS, REFERENCE_TARGETS
from automodel.recipes.schema import (
    KNOWN_SECTIONS,
    METADATA_SECTIONS,
    RECIPE_CLASSES,
    SETTINGS_SECTIONS,
    TARGET_SECTIONS,
    VALUE_SECTIONS,
    describe_section,
    find_section,
    is_metadata,
)
from automodel.recipes.sections import RecipeSections

SECTIONS_OF_THE_REFERENCE_SYSTEM = """
    recipe step_scheduler model distributed optimizer dataset dataloader dist_env loss_fn ci checkpoint rng
    validation_dataset validation_dataloader packed_sequence peft lr_scheduler seed freeze_config processor benchmark
    compile wandb clip_grad_norm fp8 parallelizer tokenizer nvtx quantization prewarm embedding_row_repair neftune qat
    skypilot teacher_model kd_ratio kd_loss_fn offload_teacher_model mfu kernels kernel_cache deterministic
"""

KEYS_OF_THE_REFERENCE_SYSTEM = {
    "step_scheduler": "global_batch_size local_batch_size ckpt_every_steps val_every_steps max_steps num_epochs "
    "gc_every_steps log_remote_every_steps save_checkpoint_every_epoch",
    "dist_env": "backend timeout_minutes init_method",
    "rng": "seed ranked",
    "clip_grad_norm": "max_norm",
    "distributed": "strategy dp_size dp_replicate_size tp_size pp_size cp_size ep_size sequence_parallel "
    "activation_checkpointing pipeline moe multimodal defer_fsdp_grad_sync enable_async_tensor_parallel "
    "enable_fsdp2_prefetch enable_compile patch_is_packed_sequence mp_policy reshard_after_forward tp_plan "
    "offload_policy",
    "checkpoint": "enabled checkpoint_dir model_save_format save_consolidated is_async max_recent_checkpoints "
    "best_metric_key restore_from staging_dir dequantize_base_checkpoint v4_compatible diffusers_compatible "
    "single_rank_consolidation skip_task_head_prefixes_for_base_model",
    "lr_scheduler": "lr_decay_style lr_warmup_steps min_lr",
    "compile": "enabled mode fullgraph dynamic backend",
    "packed_sequence": "packed_sequence_size split_across_pack max_packs packing_strategy",
    "peft": "dim alpha target_modules match_all_linear exclude_modules dropout use_triton",
    "freeze_config": "freeze_vision_tower freeze_language_model freeze_audio_tower freeze_embeddings "
    "freeze_video_embedder freeze_modules unfreeze_modules",
    "wandb": "enable project entity name dir tags group mode",
    "benchmark": "warmup_steps peak_tflops nsys_start nsys_end nsys_ranks num_nodes json_output_path",
    "prewarm": "cublas_backward fla_gdn_autotune mamba_ssd_autotune comm_groups pipeline_stage_compile",
}


def test_every_section_that_users_know_is_known():
    assert set(SECTIONS_OF_THE_REFERENCE_SYSTEM.split()) <= KNOWN_SECTIONS


def test_a_section_stands_in_one_table():
    tables = (SETTINGS_SECTIONS, TARGET_SECTIONS, VALUE_SECTIONS, METADATA_SECTIONS, PLANNED_SECTIONS)
    assert sum(map(len, tables)) == len(KNOWN_SECTIONS)
    assert set(REFERENCE_KEYS) | set(REFERENCE_TARGETS) <= set(SETTINGS_SECTIONS)


@pytest.mark.parametrize("name", KEYS_OF_THE_REFERENCE_SYSTEM)
def test_every_key_that_users_know_is_known(name):
    described = describe_section(name, with_arguments=False)
    known = {setting.key for setting in (*described.settings, *described.passed_over)}
    assert set(KEYS_OF_THE_REFERENCE_SYSTEM[name].split()) <= known


def test_the_sections_that_are_built_are_those_of_the_table():
    built = {field.name for field in dataclasses.fields(RecipeSections)}
    assert built == {*SETTINGS_SECTIONS, *TARGET_SECTIONS, "recipe", "deterministic"}


@pytest.mark.parametrize("name", sorted(KNOWN_SECTIONS))
def test_every_section_and_key_has_a_line_of_help(name):
    described = describe_section(name, with_arguments=False)
    assert described.name == name
    lines = [described.help, *(setting.help for setting in (*described.settings, *described.passed_over))]
    assert all(0 < len(line) <= 100 and "\n" not in line for line in lines)
    assert all(line[0].islower() or not line[0].isalpha() or line.split()[0].isupper() for line in lines[1:] if line)
    json.dumps(dataclasses.asdict(described), default=str)


@pytest.mark.parametrize("name", SETTINGS_SECTIONS)
def test_a_key_that_is_passed_over_is_none_of_ours(name):
    described = describe_section(name, with_arguments=False)
    ours = {setting.key for setting in described.settings}
    assert not ours.intersection(setting.key for setting in described.passed_over)


@pytest.mark.parametrize("name", TARGET_SECTIONS)
def test_the_targets_that_are_shipped_are_described_with_their_arguments(name):
    section = TARGET_SECTIONS[name]
    described = describe_section(name, with_arguments=True)
    assert [target.target for target in described.targets] == list(section.targets)
    for target in described.targets:
        assert target.help
        assert target.arguments
        assert not {argument.key for argument in target.arguments}.intersection(section.provided)


def test_an_argument_is_described_by_its_signature_and_docstring():
    (target,) = describe_section("loss_fn", with_arguments=True).targets
    ignore_index, _ = target.arguments
    assert (ignore_index.key, ignore_index.type, ignore_index.default) == ("ignore_index", "integer", -100)
    assert ignore_index.help == "The label of positions that do not count"
    model = describe_section("model", with_arguments=True).targets[0]
    helps = {argument.key: argument.help for argument in model.arguments}
    assert helps["revision"] == helps["code_revision"] != ""
    assert next(a for a in model.arguments if a.key == "pretrained_model_name_or_path").required
    (dataset,) = describe_section("dataset", with_arguments=True).targets
    assert next(a for a in dataset.arguments if a.key == "context_length").required


def test_a_recipe_class_that_is_built_is_one():
    from automodel.config.loader import resolve_target

    built = [target for target in RECIPE_CLASSES.values() if target is not None]
    assert built
    assert all(inspect.isclass(resolve_target(target)) for target in built)


def test_a_section_that_is_not_there_is_named_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"unknown section 'optimiser' \(did you mean 'optimizer'\?\)"):
        find_section("optimiser")
    with pytest.raises(ValueError, match="unknown section 5"):
        find_section(5)
    assert find_section("validation_dataset_other").name == "validation_dataset_other"


def test_anchors_and_metadata_hold_no_settings():
    assert is_metadata("_anchors")
    assert is_metadata("ci")
    assert not is_metadata("model")
    assert not is_metadata(5)


def test_the_table_itself_imports_nothing_heavy():
    code = (
        "import sys; from automodel.recipes.schema import describe_section;"
        "describe_section('step_scheduler', with_arguments=False); describe_section('model', with_arguments=False);"
        "import automodel.recipes.sections; print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "value", "on"),
    [
        ("peft", {}, True),
        ("peft", None, False),
        ("peft", False, False),
        ("peft", "lora", True),
        ("wandb", {"project": "x"}, True),
        ("wandb", {"project": "x", "enable": False}, False),
        ("compile", {"mode": "default"}, False),
        ("compile", {"enabled": True}, True),
        ("packed_sequence", {}, False),
        ("packed_sequence", {"packed_sequence_size": 0}, False),
        ("packed_sequence", {"packed_sequence_size": 8}, True),
        ("quantization", {"load_in_4bit": False}, False),
        ("quantization", {"load_in_4bit": False, "load_in_8bit": True}, True),
        ("quantization", {"bnb_4bit_quant_type": "nf4"}, True),
        ("freeze_config", {}, True),
        ("freeze_config", {"freeze_embeddings": False}, True),
        ("freeze_config", {"freeze_vision_tower": False}, False),
        ("freeze_config", {"freeze_modules": []}, False),
        ("freeze_config", {"freeze_modules": [{"glob": "*"}]}, True),
        ("prewarm", {"comm_groups": False}, False),
        ("prewarm", {"comm_groups": True}, True),
        ("nvtx", True, True),
        ("kd_ratio", 0.0, True),
    ],
)
def test_what_switches_a_planned_section_on(name, value, on):
    assert PLANNED_SECTIONS[name].asks_for_something(value) is on
