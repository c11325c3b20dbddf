"""A run that is stopped on some number of ranks and goes on on another one, as if nothing had happened."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel_runs import HYBRID, LLAMA, STRATEGIES, MaskedRows, read_curve, train, write_recipe

STEPS = {"global_batch_size": 12, "local_batch_size": 1, "max_steps": 8, "ckpt_every_steps": 3, "val_every_steps": 4}
# 64 rows make 5 steps of 12 and 4 rows left over: the runs cross the end of an epoch.
FIRST_PART = ["--step_scheduler.max_steps", "3"]


def write(tmp_path, model, distributed):
    sections = {"step_scheduler": STEPS, "checkpoint": {"enabled": True, "save_consolidated": "every"}}
    return write_recipe(tmp_path / "recipe.yaml", model, distributed, **sections)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The curves of whole runs in a single process."""
    curves = {}
    for name, model in {"llama": LLAMA, "hybrid": HYBRID}.items():
        folder = tmp_path_factory.mktemp(f"whole-{name}")
        train(0, 1, write(folder, model, {}), folder / "run")
        curves[name] = read_curve(folder / "run")
    return curves


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory):
    """Runs of four ranks that were stopped after three steps."""
    folders = {}
    for name, model in {"llama": LLAMA, "hybrid": HYBRID}.items():
        folders[name] = tmp_path_factory.mktemp(f"stopped-{name}")
        # The schedule is that of the whole run: an override of max_steps would change it if it decayed.
        ranks.run(4, train, write(folders[name], model, {}), folders[name] / "run", FIRST_PART)
        assert len(read_curve(folders[name] / "run")) == 3
    return folders


def resume(ranks, stopped, tmp_path, model, world_size, distributed):
    run_dir = tmp_path / "run"
    shutil.copytree(stopped / "run", run_dir, symlinks=True)
    recipe = write(tmp_path, model, distributed)
    assert ranks.run(world_size, train, recipe, run_dir) == ["finished"] * world_size
    return read_curve(run_dir)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_hybrid_of_four_ranks_goes_on_on_any_number(ranks, stopped, uninterrupted, tmp_path, world_size):
    curve = resume(ranks, stopped["hybrid"], tmp_path, HYBRID, world_size, {})
    assert curve == [pytest.approx(step, rel=1e-5) for step in uninterrupted["hybrid"]]


@pytest.mark.parametrize("strategy", ["hsdp 2x2", "ddp on 2"])
def test_a_llama_goes_on_with_another_strategy(ranks, stopped, uninterrupted, tmp_path, strategy):
    world_size, distributed = STRATEGIES[strategy]
    curve = resume(ranks, stopped["llama"], tmp_path, LLAMA, world_size, distributed)
    assert curve == [pytest.approx(step, rel=1e-5) for step in uninterrupted["llama"]]


def test_the_copy_for_transformers_computes_the_validation_loss(stopped):
    checkpoint = stopped["hybrid"] / "run" / "checkpoints" / "epoch_0_step_2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model" / "consolidated", dtype=torch.float32)
    total, count = 0.0, 0
    rows = MaskedRows(num_rows=9)
    for row in (rows[index] for index in range(len(rows))):
        labels = torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    recorded = json.loads((checkpoint / "losses.json").read_text())["val_loss"]
    assert total / count == pytest.approx(recorded, rel=1e-5)
