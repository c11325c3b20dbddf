"""Parts of recipes in the forms that users of the reference system write, and a folder to run them in."""

import json
import re

NEMO = "nemo_automodel"
LLM = "nemo_automodel.components.datasets.llm"

TRAINING = """
step_scheduler:
  global_batch_size: 32
  local_batch_size: 4
  ckpt_every_steps: 200
  val_every_steps: 50
  num_epochs: 1
  max_steps: null
dist_env:
  backend: nccl
  timeout_minutes: 5
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 7
  ranked: true
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 1
  cp_size: 1
  sequence_parallel: false
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
optimizer:
  _target_: torch.optim.AdamW
  lr: 2.0e-5
  betas: [0.9, 0.98]
  eps: 1e-8
  weight_decay: 0
lr_scheduler:
  lr_decay_style: cosine
  lr_warmup_steps: 5
  min_lr: 1.0e-6
"""
MODEL = """
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: BASE
  torch_dtype: bf16
"""
TEXT = """
dataset:
  _target_: automodel.data.text.TextFilesDataset
  context_length: 32
"""
LOADER = """
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: true
"""
HELLASWAG = f"""
dataset:
  _target_: {LLM}.hellaswag.HellaSwag
  path_or_dataset: some/hellaswag
  split: train
"""


class ReferenceFolder:
    """A folder with a model of which there is a configuration only, and with a module of a user's own."""

    def __init__(self, path):
        self.path = path
        base = path / "base"
        base.mkdir()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
        (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **sizes}))
        (path / "my_data.py").write_text("def Numbers(tokenizer, size):\n    return list(range(size))\n")

    def write(self, text):
        """Write a recipe, in which BASE stands for the model's folder, and return its path."""
        file = self.path / "recipe.yaml"
        file.write_text(re.sub(r"\bBASE\b", str(self.path / "base"), text))
        return str(file)
