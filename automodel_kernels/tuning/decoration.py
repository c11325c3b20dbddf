"""What `@tuned` asks of a kernel: that nothing but its key decides on its configuration and its binary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel_kernels.tuning.candidates import COMPILER_OPTIONS

if TYPE_CHECKING:
    import inspect
    from collections.abc import Mapping

    from automodel_kernels.tuning.autotune import Tuned

__all__ = ["check_decoration", "is_constexpr"]


def is_constexpr(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of a jit function is constexpr, as Triton decides it."""
    # A text where annotations are postponed, else the class.
    annotation = parameter.annotation
    return "constexpr" in (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", ""))


def check_decoration(kernel: Tuned, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Checks that space, key, outputs and restores of a kernel fit its function.

    Args:
        kernel: with its attributes set.
        parameters: of the function, by name.

    Raises:
        ValueError: they do not fit; names the function, what is wrong and where.
    """
    if not kernel.key:
        raise ValueError(f"{kernel}: key must name an argument at least, got none")
    if not kernel.outputs and not kernel.restores:
        raise ValueError(f"{kernel}: outputs or restores must name what the kernel writes, got none")
    for what in ("key", "outputs", "restores"):
        for name in getattr(kernel, what):
            if name not in parameters:
                raise ValueError(f"{kernel}: {what} must name arguments of the function, got {name!r}")
    for name in (kernel.key[0], *kernel.outputs, *kernel.restores):
        if name in kernel.constexprs:
            raise ValueError(f"{kernel}: {name!r} must be a tensor, and it is constexpr")
    # The interpreter's functions have no params; the check is made wherever the same module is compiled.
    specialised = [
        each.name
        for each in getattr(kernel.fn, "params", ())
        if each.name not in kernel.constexprs and not each.do_not_specialize
    ]
    if specialised:
        raise ValueError(
            f"{kernel}: do_not_specialize must name every argument that is not constexpr, and it lacks "
            f"{', '.join(specialised)}: binaries would depend on what the key does not hold"
        )
    _check_space(kernel)


def _check_space(kernel: Tuned) -> None:
    every = [config for candidates in kernel.space.candidates for config in candidates.configs]
    names = set(every[0].meta) - COMPILER_OPTIONS
    for config in every:
        if set(config.meta) - COMPILER_OPTIONS != names:
            raise ValueError(f"{kernel}: every configuration must set {sorted(names)}, got {config.label!r}")
    if wrong := sorted(names.difference(kernel.constexprs)):
        raise ValueError(f"{kernel}: configurations must set constexpr arguments of the function, got {wrong}")
    if wrong := sorted(names & set(kernel.key)):
        raise ValueError(f"{kernel}: key must not name what configurations set, got {wrong}")
    for candidates in kernel.space.candidates:
        if wrong := sorted(set(candidates.flags) - set(kernel.key[1:])):
            raise ValueError(f"{kernel}: flags of the space must be in the key after its first name, got {wrong}")
