"""The same recipe on 1, 2 and 4 ranks: the same losses and gradient norms, whatever the strategy."""

import json

import pytest
import yaml

from parallel_runs import read_curve, train

LLAMA = {
    "_target_": "transformers.LlamaConfig",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
HYBRID = {
    "_target_": "transformers.NemotronHConfig",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers_block_type": ["mamba", "attention", "mlp"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "mamba_num_heads": 3,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
}
MODELS = {"llama": LLAMA, "hybrid": HYBRID, "tied llama": TIED}
STRATEGIES = {
    "fsdp2 on 2": (2, {}),
    "fsdp2 on 4": (4, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "ddp on 2": (2, {"strategy": "ddp"}),
    "ddp on 4": (4, {"strategy": "ddp"}),
}


def write_recipe(file, model, distributed, *, dtype="float32", **sections):
    recipe = {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1, "max_steps": 5},
        "model": {"_target_": "automodel.NeMoAutoModelForCausalLM.from_config", "config": model},
        "dataset": {"_target_": "parallel_runs.MaskedRows"},
        "validation_dataset": {"_target_": "parallel_runs.MaskedRows", "num_rows": 9},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-2},
        "distributed": {"mp_policy": {"param_dtype": dtype}, **distributed},
        "checkpoint": {"enabled": False},
        **sections,
    }
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The curve and the validation loss of a model and dtype in a single process, each run once."""
    known = {}

    def run(model, dtype):
        if (model, dtype) not in known:
            folder = tmp_path_factory.mktemp("alone")
            train(0, 1, write_recipe(folder / "recipe.yaml", MODELS[model], {}, dtype=dtype), folder / "run")
            known[model, dtype] = read_curve(folder / "run"), validation_loss(folder / "run")
        return known[model, dtype]

    return run


def validation_loss(run_dir):
    return json.loads((run_dir / "validation.jsonl").read_text())["val_loss"]


def assert_same(run_dir, expected, *, tolerance):
    curve, validated = expected
    for step, (got, want) in enumerate(zip(read_curve(run_dir), curve, strict=True)):
        assert got == pytest.approx(want, rel=tolerance), f"step {step}"
    assert validation_loss(run_dir) == pytest.approx(validated, rel=tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_fp32_curves_do_not_depend_on_the_ranks(ranks, tmp_path, alone, model, strategy):
    world_size, distributed = STRATEGIES[strategy]
    recipe = write_recipe(tmp_path / "recipe.yaml", MODELS[model], distributed)
    assert ranks.run(world_size, train, recipe, tmp_path / "run") == ["finished"] * world_size
    assert_same(tmp_path / "run", alone(model, "float32"), tolerance=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2 on 4", "hsdp 2x2", "ddp on 2"])
@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_bf16_curves_do_not_depend_on_the_ranks(ranks, tmp_path, alone, model, strategy):
    world_size, distributed = STRATEGIES[strategy]
    recipe = write_recipe(tmp_path / "recipe.yaml", MODELS[model], distributed, dtype="bfloat16")
    ranks.run(world_size, train, recipe, tmp_path / "run")
    assert_same(tmp_path / "run", alone(model, "bfloat16"), tolerance=1e-2)


OPTIONS = {
    "activations recomputed": {"activation_checkpointing": True},
    "activations recomputed in part": {"activation_checkpointing": "selective"},
    "parameters in host memory": {"offload_policy": True},
    "blocks kept whole": {"reshard_after_forward": False},
    "reduced after every pass": {"defer_fsdp_grad_sync": False},
    "blocks gathered ahead": {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_fsdp2_change_no_value(ranks, tmp_path, alone, options):
    recipe = write_recipe(tmp_path / "recipe.yaml", HYBRID, OPTIONS[options])
    ranks.run(2, train, recipe, tmp_path / "run")
    assert_same(tmp_path / "run", alone("hybrid", "float32"), tolerance=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2 on 2", "ddp on 2"])
def test_tied_heads_stay_tied(ranks, tmp_path, alone, strategy):
    world_size, distributed = STRATEGIES[strategy]
    recipe = write_recipe(tmp_path / "recipe.yaml", TIED, distributed)
    ranks.run(world_size, train, recipe, tmp_path / "run")
    assert_same(tmp_path / "run", alone("tied llama", "float32"), tolerance=1e-5)


def test_metrics_are_of_the_whole_job_and_written_once(ranks, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", LLAMA, {})
    ranks.run(4, train, recipe, tmp_path / "run")
    for row in map(json.loads, (tmp_path / "run" / "training.jsonl").read_text().splitlines()):
        assert row["num_tokens_per_step"] == 8 * 16
        assert row["tps"] == pytest.approx(4 * row["tps_per_gpu"])
        assert row["tps"] == pytest.approx(row["num_tokens_per_step"] / row["time_step"])
    assert "FSDP2, sharded over all" in (tmp_path / "run" / "report.html").read_text()
