"""The decay and beta of the gated delta rule, made of a layer's raw gates, and the gradients back through that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["Gates"]


@dataclass(frozen=True, kw_only=True)
class Gates:
    """How g and beta are made of the arguments of those names.

    Attributes:
        A_log: [value_heads]; if given, the decay is -exp(A_log) * softplus(g + dt_bias).
        dt_bias: [value_heads], or None for zero.
        beta_sigmoid: whether beta is sigmoid(beta).
        double_beta: whether that is doubled.
    """

    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    beta_sigmoid: bool = False
    double_beta: bool = False

    @property
    def most_beta(self) -> float:
        """What the sigmoid of beta is multiplied by."""
        return 2.0 if self.double_beta else 1.0

    def apply(self, g: torch.Tensor, beta: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The log decay in float64, and beta in `dtype`; both [batch, seqlen, value_heads]."""
        decay, strength = g.to(torch.float64), beta.to(dtype)
        if self.A_log is not None:
            decay = -self.A_log.to(torch.float64).exp() * functional.softplus(self._shifted(g))
        if self.beta_sigmoid:
            strength = strength.sigmoid() * self.most_beta
        return decay, strength

    def gradients(
        self, g: torch.Tensor, beta: torch.Tensor, ddecay: torch.Tensor, dstrength: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of g, beta, A_log and dt_bias from those of what `apply` returns."""
        dA_log = ddt_bias = None
        if self.A_log is not None:
            shifted, rate = self._shifted(g), -self.A_log.to(torch.float64).exp()
            dA_log = (ddecay * rate * functional.softplus(shifted)).sum((0, 1)).to(self.A_log.dtype)
            ddecay = ddecay * rate * shifted.sigmoid()
            if self.dt_bias is not None:
                ddt_bias = ddecay.sum((0, 1)).to(self.dt_bias.dtype)
        if self.beta_sigmoid:
            sigmoid = beta.to(dstrength.dtype).sigmoid()
            dstrength = dstrength * sigmoid * (1 - sigmoid) * self.most_beta
        return ddecay.to(g.dtype), dstrength.to(beta.dtype), dA_log, ddt_bias

    def _shifted(self, g: torch.Tensor) -> torch.Tensor:
        wide = g.to(torch.float64)
        return wide if self.dt_bias is None else wide + self.dt_bias.to(torch.float64)
