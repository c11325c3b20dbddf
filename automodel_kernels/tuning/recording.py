"""Finds out which launches a call makes, without compiling or launching any.

    launches = kernel_launches(scan_kernel, record_launches(lambda: op(**inputs_on_the_meta_device)))

So an operator with many kernels states its launches once, by examples, and not argument by argument.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from automodel_kernels.tuning import autotune
from automodel_kernels.tuning.registry import Launch, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from automodel_kernels.tuning.autotune import Tuned

__all__ = ["kernel_launches", "record_launches"]


def record_launches(call: Callable[[], object]) -> list[tuple[Tuned, dict[str, Any]]]:
    """Calls a function whose launches of `@tuned` kernels only note themselves.

    Returns:
        Each launch's kernel and its arguments by name, in order.
    """
    launches: list[tuple[Tuned, dict[str, Any]]] = []
    with _recorder(lambda kernel, arguments: launches.append((kernel, arguments))):
        call()
    return launches


@contextmanager
def _recorder(note: Callable[[Tuned, dict[str, Any]], None]) -> Iterator[None]:
    former, autotune.recorder = autotune.recorder, note
    try:
        yield
    finally:
        autotune.recorder = former


def kernel_launches(kernel: Tuned, recorded: Sequence[tuple[Tuned, dict[str, Any]]]) -> list[Launch]:
    """The launches of a kernel that differ in their binary, in the order in which they came first.

    Their labels name the key's data type and the constexpr arguments: flags that are set, other values with their
    names, and `unaligned` where ALIGNED is not set. Where these do not tell launches apart, the data types that do
    follow.
    """
    alike: dict[str, dict[tuple[str, ...], Launch]] = {}
    for each, arguments in recorded:
        if each is not kernel:
            continue
        launch = Launch(label="", dtype=arguments[kernel.key[0]].dtype, arguments=arguments)
        alike.setdefault(_label(kernel, launch), {}).setdefault(_tensors(launch), launch)
    return [
        Launch(
            label=" ".join([label, *_telling(tensors, list(launches))]),
            dtype=launch.dtype,
            arguments=launch.arguments,
        )
        for label, launches in alike.items()
        for tensors, launch in launches.items()
    ]


def _label(kernel: Tuned, launch: Launch) -> str:
    words = [str(launch.dtype).removeprefix("torch.")]
    for name in kernel.constexprs:
        value = launch.arguments.get(name)
        if value is True and name != "ALIGNED":
            words.append(name.lower().removeprefix("has_"))
        elif value is False and name == "ALIGNED":
            words.append("unaligned")
        elif value is not None and not isinstance(value, bool):
            words.append(f"{name}={value}")
    return " ".join(words)


def _tensors(launch: Launch) -> tuple[str, ...]:
    """Names and data types of the tensors."""
    return tuple(
        f"{name.removesuffix('_ptr')}:{str(each.dtype).removeprefix('torch.')}"
        for name, each in launch.arguments.items()
        if isinstance(each, Pointer)
    )


def _telling(tensors: tuple[str, ...], alike: list[tuple[str, ...]]) -> list[str]:
    """Those tensors that are not the same in all launches alike."""
    return [each for each, *others in zip(tensors, *alike, strict=True) if set(others) != {each}]
