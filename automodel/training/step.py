"""One optimizer step over its micro-batches, and one pass over the validation data."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel.distributed.rank_group import RankGroup
from automodel.distributed.strategy import Strategy
from automodel.training.loss import IGNORE_INDEX
from automodel.training.optim import LearningRateSchedule, clip_grad_norm
from automodel.training.precision import autocast

__all__ = ["Evaluation", "StepResult", "TrainStep", "evaluate"]

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed over all ranks: `loss` is the mean over label tokens, `grad_norm` that before clipping.

    `applied` is False where the loss or the norm is not finite: parameters and optimizer are then as before the step.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_label_tokens: int
    applied: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A pass over the validation data; `loss` is the mean over the label tokens of all ranks."""

    loss: float
    num_label_tokens: int


class TrainStep:
    """Runs optimizer steps: forward and backward per micro-batch, clipping, learning rate, update."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        *,
        strategy: Strategy,
        data_ranks: RankGroup,
        max_norm: float | None,
        device: torch.device,
    ) -> None:
        """Put the parts of a step together.

        Args:
            model: What `strategy.shard` returned. Called with a batch's inputs; its output, or that output's `logits`,
                is [batch, length, vocab].
            loss_fn: Called as `loss_fn(logits, labels, num_label_tokens=n)`; see `MaskedCrossEntropy`.
            optimizer: Over the model's parameters.
            schedule: Sets the rates of that optimizer.
            strategy: How the ranks hold the model.
            data_ranks: The ranks that share each step's samples.
            max_norm: Gradients are scaled down to this L2 norm; None: never.
            device: Where the model computes.
        """
        self._model = model
        self._loss_fn = loss_fn
        self._ignore_index = getattr(loss_fn, "ignore_index", IGNORE_INDEX)
        self._optimizer = optimizer
        self._schedule = schedule
        self._strategy = strategy
        self._data_ranks = data_ranks
        self._max_norm = max_norm
        self._device = device

    def run(self, batches: Sequence[dict[str, Any]], *, step: int, phase: Phase) -> StepResult:
        """Run step number `step` (from 0) over the micro-batches, normalised by the label tokens of all ranks' batches.

        Every data rank calls it with equally many micro-batches.

        Args:
            batches: Mappings with `labels` [batch, length] and the model's inputs.
            step: Decides the learning rate.
            phase: Opens a timed phase: `forward`, `backward` or `optimizer`.
        """
        num_label_tokens, num_tokens = self._count_tokens(batches)
        rate = self._schedule.set_step(step)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(batches, start=1):
            with self._strategy.micro_batch(self._model, is_last=number == len(batches)):
                with phase("forward"):
                    inputs, labels = _to_device(batch, self._device)
                    with autocast(self._strategy.autocast_dtype, device=self._device):
                        logits = _logits(self._model(**inputs))
                        loss = self._loss_fn(logits, labels, num_label_tokens=num_label_tokens)
                    del logits
                with phase("backward"):
                    # Each rank's loss is its part of the mean over all label tokens: gradients have to be summed.
                    scaled = loss * self._strategy.averages_over
                    scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with phase("optimizer"):
            norm = clip_grad_norm(self._model.parameters(), self._max_norm)
            value = self._data_ranks.sum([float(total)])[0]
            applied = math.isfinite(value) and math.isfinite(norm)
            if applied:
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=value,
            grad_norm=norm,
            lr=rate,
            num_tokens=num_tokens,
            num_label_tokens=num_label_tokens,
            applied=applied,
        )

    def _count_tokens(self, batches: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """The label tokens and the tokens of a step, over all ranks."""
        label_tokens = sum(int((batch["labels"] != self._ignore_index).sum()) for batch in batches)
        # A batch without samples is a stand-in for a rank that has none left.
        tokens = sum(batch["labels"].numel() for batch in batches if batch.get("sample_indices") != [])
        num_label_tokens, num_tokens = self._data_ranks.sum([label_tokens, tokens])
        return int(num_label_tokens), int(num_tokens)


def evaluate(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[dict[str, Any]],
    *,
    strategy: Strategy,
    data_ranks: RankGroup,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the mean loss over the label tokens of all ranks' batches, or None when `should_stop` said so on the way.

    Every data rank calls it with equally many batches; `should_stop` must say the same on all of them. The model
    is in evaluation mode meanwhile; afterwards each of its modules is in the mode it had before.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total, num_label_tokens = 0.0, 0
    ignore_index = getattr(loss_fn, "ignore_index", IGNORE_INDEX)
    try:
        for batch in batches:
            if should_stop():
                return None
            inputs, labels = _to_device(batch, device)
            with torch.no_grad(), autocast(strategy.autocast_dtype, device=device):
                total += float(loss_fn(_logits(model(**inputs)), labels, num_label_tokens=1))
            num_label_tokens += int((batch["labels"] != ignore_index).sum())
    finally:
        for module, was_training in modes:
            module.training = was_training
    loss, tokens = data_ranks.sum([total, num_label_tokens])
    return Evaluation(loss=loss / max(tokens, 1.0), num_label_tokens=int(tokens))


def _to_device(batch: dict[str, Any], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}
    return tensors, tensors.pop("labels")


def _logits(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
