"""Training from a checkpoint with damaged input-embedding rows, on one rank and many."""

import logging

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from automodel.models.auto import NeMoAutoModelForCausalLM
from parallel_runs import LLAMA, STRATEGIES, read_curve, train, write_recipe

DAMAGED = (5, 11)
PARALLEL = ["fsdp2 on 2", "hsdp 2x2", "ddp on 2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pretrained model two of whose input rows are almost zero, and a tokenizer."""
    folder = tmp_path_factory.mktemp("damaged")
    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA.items() if key != "_target_"} | {"model_type": "llama"}
    # A small epsilon, as that is what the gradient of an almost zero row is limited by.
    model = NeMoAutoModelForCausalLM.from_config(config={**config, "rms_norm_eps": 1e-12})
    with torch.no_grad():
        model.get_input_embeddings().weight[list(DAMAGED)] = 1e-9
    model.save_pretrained(folder)
    words = WordLevel({f"word{token}": token for token in range(LLAMA["vocab_size"])}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


def write(file, folder, distributed=None, **sections):
    """Write a recipe that trains the model of a folder; returns the file's path."""
    write_recipe(file, None, distributed or {}, **{"embedding_row_repair": {}, **sections})
    recipe = yaml.safe_load(file.read_text())
    recipe["model"] = {
        "_target_": "automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": str(folder),
    }
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone")
    train(0, 1, write(run / "recipe.yaml", folder), run / "run")
    return read_curve(run / "run")


def test_the_section_repairs_and_its_absence_does_not(folder, tmp_path, alone):
    train(0, 1, write(tmp_path / "recipe.yaml", folder, embedding_row_repair=None), tmp_path / "run")
    (_, damaged_norm), (_, norm) = read_curve(tmp_path / "run")[0], alone[0]
    assert damaged_norm > 100 * norm


@pytest.mark.parametrize("strategy", PARALLEL)
def test_every_strategy_trains_as_one_process_does(ranks, folder, tmp_path, alone, strategy):
    world_size, distributed = STRATEGIES[strategy]
    recipe = write(tmp_path / "recipe.yaml", folder, distributed)
    assert ranks.run(world_size, train, recipe, tmp_path / "run") == ["finished"] * world_size
    for got, expected in zip(read_curve(tmp_path / "run"), alone, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_too_many_rows_abort_on_every_rank(ranks, folder, tmp_path):
    recipe = write(tmp_path / "recipe.yaml", folder, embedding_row_repair={"max_rows": 1})
    with pytest.raises(AssertionError, match="2 damaged rows, more than max_rows=1") as caught:
        ranks.run(2, train, recipe, tmp_path / "run")
    assert sorted(caught.value.failures) == [0, 1]


OPTIMIZER = """
import torch
class RefusingSmallRows(torch.optim.AdamW):
    def __init__(self, params, **options):
        groups = list(params)
        tables = [one for group in groups for one in group["params"] if one.shape == (64, 32)]
        smallest = min(float(table.detach().norm(dim=1).min()) for table in tables)
        if smallest < 1e-6:
            raise ValueError("the optimizer was given damaged rows")
        super().__init__(groups, **options)
"""


def test_the_optimizer_is_built_over_repaired_rows(folder, tmp_path):
    (tmp_path / "optimizers.py").write_text(OPTIMIZER)
    optimizer = {"_target_": f"{tmp_path / 'optimizers.py'}:RefusingSmallRows", "lr": 0.01, "weight_decay": 0.1}
    recipe = write(tmp_path / "recipe.yaml", folder, optimizer=optimizer)
    once = ["--step_scheduler.max_steps", "1"]
    assert train(0, 1, recipe, tmp_path / "run", once) == "finished"
    with pytest.raises(ValueError, match="the optimizer was given damaged rows"):
        train(0, 1, recipe, tmp_path / "other", [*once, "--embedding_row_repair.enabled", "false"])


def test_a_resumed_run_repairs_nothing(folder, tmp_path, caplog):
    recipe = write(tmp_path / "recipe.yaml", folder, checkpoint={"enabled": True})
    said = "embedding_row_repair: "
    with caplog.at_level(logging.INFO, "automodel"):
        train(0, 1, recipe, tmp_path / "run")
    assert said in caplog.text
    caplog.clear()
    # The base checkpoint is as damaged as before, and would now be refused.
    overrides = ["--embedding_row_repair.max_rows", "1", "--step_scheduler.max_steps", "7"]
    with caplog.at_level(logging.INFO, "automodel"):
        assert train(0, 1, recipe, tmp_path / "run", overrides) == "finished"
    # Nor is the restored model, which is healthy, looked at.
    assert said not in caplog.text
    assert len(read_curve(tmp_path / "run")) == 7
