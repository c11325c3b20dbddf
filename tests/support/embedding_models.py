"""Models on the disk whose input embedding has damaged rows, written without transformers.

folder = write_model(tmp_path / "model")             # 2,048 tokens, 79 damaged rows, 4 files and an index
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["DAMAGED", "INPUT", "OUTPUT", "make_weights", "write_model"]

INPUT = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VOCABULARY, HIDDEN = 2048, 24
DAMAGED = [
    int(row) for row in torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(4))[:79].sort().values
]


def make_weights(dtype: torch.dtype = torch.bfloat16, *, damaged: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Weights with norms near 1; `damaged` are the rows that are multiplied by something.

    By default those of DAMAGED: one NaN, four zero, the others about 3e-6.
    """
    generator = torch.Generator().manual_seed(1)
    if damaged is None:
        factors = [float("nan"), 0.0, 0.0, 0.0, 0.0] + [3e-6] * (len(DAMAGED) - 5)
        damaged = dict(zip(DAMAGED, factors, strict=True))
    weights = {name: torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5 for name in (INPUT, OUTPUT)}
    for row, factor in damaged.items():
        weights[INPUT][row] *= factor
    weights |= {f"model.layers.{layer}.mlp.weight": torch.randn(8, HIDDEN, generator=generator) for layer in (0, 1)}
    return {name: weight.to(dtype) for name, weight in weights.items()}


def write_model(folder: Path, weights: Mapping[str, Any] | None = None, **settings: Any) -> Path:
    """Writes each weight into a file of its own, an index and a config.json; returns the folder."""
    folder.mkdir(parents=True)
    weights = make_weights() if weights is None else weights
    weight_map = {}
    for number, (name, weight) in enumerate(weights.items(), start=1):
        weight_map[name] = f"model-{number:05}-of-{len(weights):05}.safetensors"
        save_file({name: weight}, folder / weight_map[name], metadata={"format": "pt", "number": str(number)})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **settings}))
    return folder
