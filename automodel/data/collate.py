"""Put samples of token ids together to one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

__all__ = ["IGNORE_INDEX", "default_collater"]

IGNORE_INDEX = -100
"""The label that no loss counts."""


def default_collater(samples: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Stack samples to tensors [batch, ...], padding token sequences of unequal length on the right.

    A sample maps names to tensors or (nested) lists of numbers; lists of ints become int64. Only `input_ids`, `labels`
    and `attention_mask`, all [length] within a sample, may differ in length between samples: they are padded with
    `pad_token_id`, `IGNORE_INDEX` and 0. A batch that was padded has an int64 `attention_mask` [batch, length] also
    where the samples had none: 1 for tokens, 0 for padding.

    Raises:
        ValueError: there are no samples, their keys differ, the lengths within one disagree, or another entry differs
            in shape.
    """
    if not samples:
        raise ValueError("samples must hold at least one sample, got none")
    padding = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "attention_mask": 0}
    columns = _columns(samples)
    per_token = [columns[name] for name in padding if name in columns and columns[name][0].dim() == 1]
    lengths = [{len(values[index]) for values in per_token} for index in range(len(samples))]
    for index, found in enumerate(lengths):
        if len(found) > 1:
            raise ValueError(f"sample {index} has input_ids, labels or attention_mask of different lengths: {found}")
    batch: dict[str, torch.Tensor] = {}
    for name, values in columns.items():
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) == 1:
            batch[name] = torch.stack(values)
        elif name in padding and all(value.dim() == 1 for value in values):
            batch[name] = pad_sequence(values, batch_first=True, padding_value=padding[name])
        else:
            raise ValueError(f"{name} differs in shape between samples and cannot be padded: {sorted(shapes)}")
    sizes = {len(value) for value in columns.get("input_ids", []) if value.dim() == 1}
    if len(sizes) > 1 and "attention_mask" not in batch:
        ones = [torch.ones(len(value), dtype=torch.int64) for value in columns["input_ids"]]
        batch["attention_mask"] = pad_sequence(ones, batch_first=True)
    return batch


def _columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """Return, for each key, the tensors of all samples.

    Raises:
        ValueError: the samples do not all have the same keys, or a value is no tensor and no list of numbers.
    """
    names = list(samples[0])
    for index, sample in enumerate(samples):
        if set(sample) != set(names):
            raise ValueError(f"sample {index} has the keys {sorted(sample)}, sample 0 has {sorted(names)}")
    columns: dict[str, list[torch.Tensor]] = {}
    for name in names:
        try:
            columns[name] = [_as_tensor(sample[name]) for sample in samples]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} cannot be made a tensor: {error}") from error
    return columns


def _as_tensor(value: object) -> torch.Tensor:
    """Return a value as a tensor; an empty list is one of int64, as lists of ids are."""
    if isinstance(value, list | tuple) and not value:
        return torch.empty(0, dtype=torch.int64)
    return torch.as_tensor(value)
