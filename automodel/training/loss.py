"""Losses of next-token prediction, normalised by the label tokens of the whole optimizer step."""

import torch
from torch import Tensor, nn

__all__ = ["IGNORE_INDEX", "MaskedCrossEntropy", "NonFiniteLossError"]

IGNORE_INDEX = -100
"""The label of positions that do not count; the value is PyTorch's and transformers' own."""


class NonFiniteLossError(RuntimeError):
    """A loss or gradient norm that is NaN or infinite; the message names the step, the data and the way back."""


class MaskedCrossEntropy(nn.Module):
    """Cross-entropy over the positions whose label is not `ignore_index`.

    Labels are already shifted: `labels[:, t]` is the token that follows `input_ids[:, t]`.
    """

    def __init__(self, *, ignore_index: int = IGNORE_INDEX, fp32_upcast: bool = True) -> None:
        """Configure the loss.

        Args:
            ignore_index: The label of positions that do not count.
            fp32_upcast: Compute in fp32, whatever the dtype of the logits.
        """
        super().__init__()
        self.ignore_index = ignore_index
        self.fp32_upcast = fp32_upcast

    def forward(self, logits: Tensor, labels: Tensor, *, num_label_tokens: int | None = None) -> Tensor:
        """Return the sum of token losses divided by `num_label_tokens`, or their mean where that is None.

        Args:
            logits: [batch, length, vocab], any floating dtype.
            labels: [batch, length], int64.
            num_label_tokens: Label tokens of the whole step; with it the micro-batches of a step add up to its mean.

        Returns:
            A scalar, fp32 with `fp32_upcast`. A batch without label tokens gives 0.
        """
        flat = logits.flatten(0, -2)
        total = nn.functional.cross_entropy(
            flat.float() if self.fp32_upcast else flat,
            labels.flatten(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        if num_label_tokens is None:
            num_label_tokens = int(torch.count_nonzero(labels != self.ignore_index))
        return total / max(num_label_tokens, 1)
