"""Whole training runs on the ranks of a pool, and what they leave behind."""

import io
import json

import yaml

from automodel import NeMoAutoModelForCausalLM
from automodel.config.loader import load_yaml_config
from automodel.config.overrides import apply_overrides, parse_overrides
from automodel.observe.run_folder import RunFolder
from automodel.recipes.llm import TrainFinetuneRecipeForNextTokenPrediction

__all__ = ["HYBRID", "LLAMA", "STRATEGIES", "MaskedRows", "make_marked_llama", "read_curve", "train", "write_recipe"]


LLAMA = {
    "_target_": "transformers.LlamaConfig",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
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
STRATEGIES = {
    "fsdp2 on 2": (2, {}),
    "fsdp2 on 4": (4, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "ddp on 2": (2, {"strategy": "ddp"}),
    "ddp on 4": (4, {"strategy": "ddp"}),
}


def make_marked_llama(config):
    """A model whose head its maker exempts from weight decay."""
    model = NeMoAutoModelForCausalLM.from_config(config)
    model.lm_head.weight._no_weight_decay = True
    return model


def write_recipe(file, config, distributed, *, dtype="float32", parameters="float32", **sections):
    """Write a recipe over `MaskedRows` of five steps; `sections` replace its own; returns the file's path."""
    recipe = {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1, "max_steps": 5},
        "model": {
            "_target_": "automodel.NeMoAutoModelForCausalLM.from_config",
            "config": config,
            "torch_dtype": parameters,
        },
        "dataset": {"_target_": "parallel_runs.MaskedRows"},
        "validation_dataset": {"_target_": "parallel_runs.MaskedRows", "num_rows": 9},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-2},
        "distributed": {"mp_policy": {"param_dtype": dtype}, **distributed},
        "checkpoint": {"enabled": False},
        **sections,
    }
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


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
