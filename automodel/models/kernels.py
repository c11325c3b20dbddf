"""How the kernels of a model get their configurations."""

from dataclasses import dataclass
from typing import Literal

from automodel.config.sections import setting
from automodel_kernels.tuning.policy import set_default_policy

__all__ = ["KernelsConfig"]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Recipe section `kernels`."""

    backend: str | None = setting(None, "which kernels the model gets", off=(None,))
    tuning: Literal["tune", "static", "error"] | None = setting(
        None,
        "without a tuned configuration: measure one, take the first, or stop; null asks AUTOMODEL_TUNING",
    )
    bit_exact: bool = setting(False, "drop a configuration whose outputs differ in any bit from the first one's")

    def apply(self) -> None:
        """Make it hold for every kernel of this process.

        Raises:
            ValueError: AUTOMODEL_TUNING is set and names no policy.
        """
        set_default_policy(self.tuning, bit_exact=self.bit_exact)
