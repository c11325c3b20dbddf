"""The same recipe on 1, 2 and 4 ranks: the same losses and gradient norms, whatever the strategy."""

import json
import resource

import pytest

from parallel_runs import HYBRID, LLAMA, STRATEGIES, read_curve, train, write_recipe

TIED = {**LLAMA, "tie_word_embeddings": True}
MARKED = {"_target_": "parallel_runs.make_marked_llama", "config": LLAMA}
MODELS = {"llama": LLAMA, "hybrid": HYBRID, "tied llama": TIED}


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


@pytest.mark.parametrize("strategy", ["fsdp2 on 2", "ddp on 2"])
def test_a_model_of_bf16_parameters(ranks, tmp_path, strategy):
    world_size, distributed = STRATEGIES[strategy]
    for name, sections in {"alone": {}, "ranks": distributed}.items():
        (tmp_path / name).mkdir()
        write_recipe(tmp_path / name / "recipe.yaml", LLAMA, sections, dtype="bfloat16", parameters="bfloat16")
    train(0, 1, tmp_path / "alone" / "recipe.yaml", tmp_path / "alone" / "run")
    ranks.run(world_size, train, tmp_path / "ranks" / "recipe.yaml", tmp_path / "ranks" / "run")
    alone = tmp_path / "alone" / "run"
    assert_same(tmp_path / "ranks" / "run", (read_curve(alone), validation_loss(alone)), tolerance=1e-2)


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


def test_marked_parameters_do_not_decay_on_several_ranks(ranks, tmp_path):
    decayed = {"_target_": "torch.optim.AdamW", "lr": 1.0e-2, "weight_decay": 10.0}
    curves = []
    for name, world_size in {"alone": 1, "ranks": 2}.items():
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name / "recipe.yaml", LLAMA, {}, optimizer=decayed, model=MARKED)
        ranks.run(world_size, train, recipe, tmp_path / name / "run")
        curves.append(read_curve(tmp_path / name / "run"))
    assert curves[0] == [pytest.approx(step, rel=1e-5) for step in curves[1]]


@pytest.mark.parametrize("strategy", ["fsdp2 on 2", "ddp on 2"])
def test_tied_heads_stay_tied(ranks, tmp_path, alone, strategy):
    world_size, distributed = STRATEGIES[strategy]
    recipe = write_recipe(tmp_path / "recipe.yaml", TIED, distributed)
    ranks.run(world_size, train, recipe, tmp_path / "run")
    assert_same(tmp_path / "run", alone("tied llama", "float32"), tolerance=1e-5)


def train_with_ballast(rank, world_size, recipe, run_dir):
    ballast = b"x" * (400 * 2**20) if rank == 1 else b""
    train(rank, world_size, recipe, run_dir)
    return len(ballast), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def test_metrics_are_of_the_whole_job_and_written_once(ranks, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", LLAMA, {})
    peaks = [peak for _, peak in ranks.run(4, train_with_ballast, recipe, tmp_path / "run")]
    assert max(peaks) == peaks[1] > peaks[0] + 0.3
    for row in map(json.loads, (tmp_path / "run" / "training.jsonl").read_text().splitlines()):
        assert row["num_tokens_per_step"] == 8 * 16
        assert row["tps"] == pytest.approx(4 * row["tps_per_gpu"])
        assert row["tps"] == pytest.approx(row["num_tokens_per_step"] / row["time_step"])
        assert peaks[0] + 0.3 < row["mem"] <= peaks[1]
    assert "FSDP2, sharded over all" in (tmp_path / "run" / "report.html").read_text()
