"""What happens where no tuned configuration is known: measure (`tune`), take the static choice, or stop (`error`).

The caller's argument counts first (`tuning_policy`), then the process's default, which a recipe sets, then the
environment variable AUTOMODEL_TUNING; else a GPU tunes. Without a GPU and under the interpreter a time says nothing,
and only the caller's argument counts there; else the choice is static.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from automodel_kernels.hardware import asked_tuning

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Policy", "Settings", "current_settings", "resolve_policy", "set_default_policy", "tuning_policy"]

Policy = Literal["tune", "static", "error"]
"""What to do where no tuned configuration is known."""

POLICIES: tuple[str, ...] = get_args(Policy)


# A tuple, since it is part of what every launch looks up: a dataclass takes ten times as long to hash.
class Settings(NamedTuple):
    """What was asked for, by whom; None where nothing was.

    Attributes:
        argument: the policy that the caller asks for.
        argument_bit_exact: whether the caller wants winners with the static choice's bits only.
        default: the process's policy.
        default_bit_exact: the same for the process.
    """

    argument: Policy | None = None
    argument_bit_exact: bool | None = None
    default: Policy | None = None
    default_bit_exact: bool = False

    @property
    def bit_exact(self) -> bool:
        """Whether a winner must give the bits of the static choice."""
        return self.default_bit_exact if self.argument_bit_exact is None else self.argument_bit_exact


# Of the process, not of a thread: PyTorch runs backward passes in threads of its own.
_settings = Settings()


def current_settings() -> Settings:
    """What is asked for now, in every thread."""
    return _settings


@contextmanager
def tuning_policy(policy: Policy, *, bit_exact: bool | None = None) -> Iterator[None]:
    """Inside, the policy of every launch of this process is the given one, whatever recipe and environment say.

    Args:
        policy: the policy.
        bit_exact: whether a configuration whose outputs differ in any bit from the static choice's is dropped; None
            leaves that as it is.

    Raises:
        ValueError: there is no such policy.
    """
    global _settings
    former = _settings
    gate = former.argument_bit_exact if bit_exact is None else bit_exact
    _settings = former._replace(argument=_checked(policy, name="policy"), argument_bit_exact=gate)
    try:
        yield
    finally:
        _settings = _settings._replace(argument=former.argument, argument_bit_exact=former.argument_bit_exact)


def set_default_policy(policy: Policy | None, *, bit_exact: bool = False) -> None:
    """Sets what holds in this process where no caller asks for another policy; None leaves it to the environment.

    Args:
        policy: the policy.
        bit_exact: see `tuning_policy`.

    Raises:
        ValueError: there is no such policy, or AUTOMODEL_TUNING names none.
    """
    global _settings
    if policy is not None:
        _checked(policy, name="policy")
    _environment_policy()  # a mistake there is reported now, not at the first launch
    _settings = _settings._replace(default=policy, default_bit_exact=bit_exact)


def resolve_policy(settings: Settings, *, measurable: bool) -> Policy:
    """The policy that holds.

    Args:
        settings: what was asked for.
        measurable: whether launches run on a GPU.

    Raises:
        ValueError: AUTOMODEL_TUNING counts, and names no policy.
    """
    if settings.argument is not None:
        return settings.argument
    if not measurable:
        return "static"
    return settings.default or _environment_policy() or "tune"


def _environment_policy() -> Policy | None:
    asked = asked_tuning()
    return None if asked is None else _checked(asked, name="the environment variable AUTOMODEL_TUNING")


def _checked(policy: str, *, name: str) -> Policy:
    match policy:
        case "tune" | "static" | "error":
            return policy
        case _:
            raise ValueError(f"{name} must be one of {', '.join(POLICIES)}, got {policy!r}")
