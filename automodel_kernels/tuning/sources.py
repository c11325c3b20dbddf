"""Hashes of what a kernel's binaries are made from."""

from __future__ import annotations

import hashlib
import types
from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["add_function", "function_hash"]


def function_hash(function: Any) -> str:
    """A hash of a jit function's source, and of all jit functions and constexpr globals that it uses.

    Unlike Triton's key it does not change when the function moves within its file.
    """
    digest = hashlib.sha256()
    add_function(digest, function)
    return digest.hexdigest()[:16]


def add_function(digest: hashlib._Hash, function: Any) -> None:
    """Adds to a digest what `function_hash` hashes."""
    seen: set[int] = set()

    def add(each: Any) -> None:
        while not hasattr(each, "src") and hasattr(each, "fn"):
            each = each.fn
        if id(each) in seen or not hasattr(each, "src"):
            return
        seen.add(id(each))
        digest.update(f"{each.src}\0{_specialization(each)}\0".encode())
        for name, value in _used_globals(each.fn):
            if isinstance(value, triton.language.constexpr):
                digest.update(f"{name}={value}\0".encode())
            else:
                add(value)

    add(function)


def _specialization(function: Any) -> list[tuple[str, bool, bool]]:
    parameters = getattr(function, "params", [])
    return [(each.name, each.do_not_specialize, each.do_not_specialize_on_alignment) for each in parameters]


def _used_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Jit functions and constexpr values that a function names, also as an attribute of a module."""
    names = function.__code__.co_names
    scopes: list[dict[str, Any]] = [function.__globals__]
    scopes += [vars(each) for name in names if isinstance(each := function.__globals__.get(name), types.ModuleType)]
    for name in sorted(set(names)):
        for scope in scopes:
            value = scope.get(name)
            ours = hasattr(value, "fn") and not str(value.__module__).startswith("triton.")
            if ours or isinstance(value, triton.language.constexpr):
                yield name, value
