"""Optimizer construction, learning-rate schedule and gradient clipping."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel.config.sections import refuse, setting

__all__ = [
    "ClipGradNormConfig",
    "LearningRateSchedule",
    "LrSchedulerConfig",
    "clip_grad_norm",
    "learning_rate_factor",
    "parameter_groups",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClipGradNormConfig:
    """Recipe section `clip_grad_norm`."""

    max_norm: float | None = setting(1.0, "gradients are scaled down to this L2 norm; null: never")

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm > 0:
            raise refuse("clip_grad_norm.max_norm", self.max_norm, "positive or null")


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """Recipe section `lr_scheduler`; the rate climbs linearly to optimizer.lr, then decays to min_lr."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = setting(
        "constant", "shape of the decay after the warm-up"
    )
    lr_warmup_steps: int = setting(0, "steps of linear warm-up")
    lr_decay_steps: int | None = setting(None, "step at which the decay ends; null: the last step of the run")
    min_lr: float = setting(0.0, "learning rate at the end of the decay")

    def __post_init__(self) -> None:
        if self.lr_warmup_steps < 0:
            raise refuse("lr_scheduler.lr_warmup_steps", self.lr_warmup_steps, "zero or positive")
        if self.lr_decay_steps is not None and self.lr_decay_steps < 1:
            raise refuse("lr_scheduler.lr_decay_steps", self.lr_decay_steps, "positive or null")
        if not self.min_lr >= 0:
            raise refuse("lr_scheduler.min_lr", self.min_lr, "zero or positive")


def learning_rate_factor(config: LrSchedulerConfig, step: int, *, total_steps: int) -> float:
    """Where `step` (from 0) stands between the lowest rate (0) and the peak (1).

    Warm-up: (step + 1) / (warm-up steps + 1). Then with u = (step - warm-up) / (decay steps - warm-up), clamped to 1:
    linear 1 - u, cosine (1 + cos(pi u)) / 2, inverse-square-root sqrt(max(warm-up, 1) / max(step, 1)).
    """
    if step < config.lr_warmup_steps:
        return (step + 1) / (config.lr_warmup_steps + 1)
    end = config.lr_decay_steps or total_steps
    progress = min((step - config.lr_warmup_steps) / max(end - config.lr_warmup_steps, 1), 1.0)
    match config.lr_decay_style:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "inverse-square-root":
            return math.sqrt(max(config.lr_warmup_steps, 1) / max(step, config.lr_warmup_steps, 1))


class LearningRateSchedule:
    """Sets the rate of every parameter group from the step's number alone, so that a resumed run needs no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: LrSchedulerConfig, *, total_steps: int) -> None:
        """Take each group's rate as it stands now as its peak."""
        self._optimizer = optimizer
        self._config = config
        self._total_steps = total_steps
        if config.lr_warmup_steps >= total_steps:
            logger.warning(
                "lr_scheduler.lr_warmup_steps is %d, but the run has %d steps: the rate never reaches its peak",
                config.lr_warmup_steps,
                total_steps,
            )
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def set_step(self, step: int) -> float:
        """Set the rates for `step` (from 0) and return that of the first group."""
        factor = learning_rate_factor(self._config, step, total_steps=self._total_steps)
        warming_up = step < self._config.lr_warmup_steps
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            floor = 0.0 if warming_up else min(self._config.min_lr, peak)
            group["lr"] = floor + (peak - floor) * factor
        return float(self._optimizer.param_groups[0]["lr"])


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Vectors and scalars (norm weights, biases, decay rates, time-step biases) do not decay, nor does a parameter that
    its model marks with `_no_weight_decay`; without weight decay there is one group.

    Raises:
        ValueError: no parameter is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    if not weight_decay:
        return [{"params": trainable}]
    decays = [p for p in trainable if p.ndim >= 2 and not getattr(p, "_no_weight_decay", False)]
    kept = {id(parameter) for parameter in decays}
    groups = [
        {"params": decays, "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) not in kept], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> float:
    """Return the gradients' L2 norm, after scaling them down to `max_norm` where they exceed it.

    Sharded gradients (DTensors) count whole: every rank that holds a part calls this and gets the same norm. A norm
    that is not finite leaves the gradients as they are.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = _total_norm([p.grad for p in with_gradient if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = float(norm)
    if max_norm is not None and math.isfinite(value):
        nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return value


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, in float32 at least: torch rounds that of 16-bit gradients to 16 bits."""
    if all(gradient.dtype not in (torch.bfloat16, torch.float16) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
