"""One optimizer step over its micro-batches, and one pass over the validation data."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from automodel.training.loss import IGNORE_INDEX
from automodel.training.optim import LearningRateSchedule, clip_grad_norm
from automodel.training.precision import autocast

__all__ = ["Evaluation", "StepResult", "TrainStep", "evaluate"]

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed; `loss` is the mean over label tokens, `grad_norm` the norm before clipping.

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
    """A pass over the validation data; `loss` is the mean over all label tokens."""

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
        max_norm: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Put the parts of a step together.

        Args:
            model: Called with a batch's inputs; its output, or that output's `logits`, is [batch, length, vocab].
            loss_fn: Called as `loss_fn(logits, labels, num_label_tokens=n)`; see `MaskedCrossEntropy`.
            optimizer: Over the model's parameters.
            schedule: Sets the rates of that optimizer.
            max_norm: Gradients are scaled down to this L2 norm; None: never.
            dtype: The dtype of autocast; fp32: none.
            device: Where the model is.
        """
        self._model = model
        self._loss_fn = loss_fn
        self._ignore_index = getattr(loss_fn, "ignore_index", IGNORE_INDEX)
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_norm = max_norm
        self._dtype = dtype
        self._device = device

    def run(self, batches: Sequence[dict[str, Any]], *, step: int, phase: Phase) -> StepResult:
        """Run step number `step` (from 0) over the micro-batches, normalised by the label tokens of all of them.

        Args:
            batches: Mappings with `labels` [batch, length] and the model's inputs.
            step: Decides the learning rate.
            phase: Opens a timed phase: `forward`, `backward` or `optimizer`.
        """
        num_label_tokens = sum(int((batch["labels"] != self._ignore_index).sum()) for batch in batches)
        rate = self._schedule.set_step(step)
        total = torch.zeros((), device=self._device)
        for batch in batches:
            with phase("forward"):
                inputs, labels = _to_device(batch, self._device)
                with autocast(self._dtype, device=self._device):
                    logits = _logits(self._model(**inputs))
                    loss = self._loss_fn(logits, labels, num_label_tokens=num_label_tokens)
                del logits
            with phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with phase("optimizer"):
            norm = clip_grad_norm(self._model.parameters(), self._max_norm)
            value = float(total)
            applied = math.isfinite(value) and math.isfinite(norm)
            if applied:
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=value,
            grad_norm=norm,
            lr=rate,
            num_tokens=sum(batch["labels"].numel() for batch in batches),
            num_label_tokens=num_label_tokens,
            applied=applied,
        )


def evaluate(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[dict[str, Any]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the mean loss over the label tokens of all batches, or None when `should_stop` said so on the way.

    The model is in evaluation mode meanwhile; afterwards each of its modules is in the mode it had before.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    num_label_tokens = 0
    ignore_index = getattr(loss_fn, "ignore_index", IGNORE_INDEX)
    try:
        for batch in batches:
            if should_stop():
                return None
            inputs, labels = _to_device(batch, device)
            with torch.no_grad(), autocast(dtype, device=device):
                total += loss_fn(_logits(model(**inputs)), labels, num_label_tokens=1).double().cpu()
            num_label_tokens += int((batch["labels"] != ignore_index).sum())
    finally:
        for module, was_training in modes:
            module.training = was_training
    return Evaluation(loss=float(total) / max(num_label_tokens, 1), num_label_tokens=num_label_tokens)


def _to_device(batch: dict[str, Any], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch.items() if isinstance(value, Tensor)}
    return tensors, tensors.pop("labels")


def _logits(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
