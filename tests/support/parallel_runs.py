"""Whole training runs on the ranks of a pool, and what they leave behind."""

import io
import json

from automodel.config.loader import load_yaml_config
from automodel.config.overrides import apply_overrides, parse_overrides
from automodel.observe.run_folder import RunFolder
from automodel.recipes.llm import TrainFinetuneRecipeForNextTokenPrediction

__all__ = ["MaskedRows", "read_curve", "train"]


class MaskedRows:
    """Rows of pseudo-random tokens in which very different numbers of labels count."""

    def __init__(self, *, num_rows=64, length=16, vocab_size=64):
        self.num_rows = num_rows
        self.length = length
        self.vocab_size = vocab_size

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        tokens = [(index * 37 + position * position * 11) % self.vocab_size for position in range(self.length + 1)]
        masked = (index * 7) % self.length
        return {"input_ids": tokens[:-1], "labels": [-100] * masked + tokens[1 + masked :]}


def train(rank, world_size, recipe_file, run_dir, overrides=()):
    """Train on one rank; returns the run's status, on every rank."""
    config = load_yaml_config(recipe_file)
    apply_overrides(config, parse_overrides(list(overrides)))
    recipe = TrainFinetuneRecipeForNextTokenPrediction(config, stream=io.StringIO())
    run_dir.mkdir(exist_ok=True)
    with RunFolder(run_dir) if rank == 0 else RunFolder.join(run_dir) as folder:
        try:
            recipe.setup(folder)
            return recipe.run_train_validation_loop().status
        finally:
            recipe.close()


def read_curve(run_dir):
    """The losses and gradient norms of a run, by step."""
    rows = [json.loads(line) for line in (run_dir / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [(row["loss"], row["grad_norm"]) for row in rows]
