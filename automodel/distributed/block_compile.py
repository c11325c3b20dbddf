"""Compilation of each block by itself: equal blocks share their code, and one that fails is known by its name.

The order is `activation_checkpointing.checkpoint_blocks`, `compile_blocks`, then `fully_shard` or
DistributedDataParallel: the compiler then sees what a block recomputes, and the hooks that gather and free parameters
run around compiled code and not in it. A block's `forward` is replaced, so that names in the state dict stay.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["compile_blocks"]


def compile_blocks(blocks: Sequence[tuple[str, nn.Module]], *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let `torch.compile` compile the forward pass of each block, in place, when it is first called.

    A call that does not compile raises a RuntimeError that names the block. A backend may put off the backward pass
    until it is needed; an error there comes from `backward()` as it is. A copy of a model compiles anew.

    Args:
        blocks: Names and modules, as `units.find_blocks` returns them.
        backend: As `torch.compile` takes it.

    Raises:
        ValueError: a block is compiled already.
    """
    for name, block in blocks:
        if isinstance(block.forward, _CompiledForward):
            raise ValueError(f"block {name} is compiled already")
    for name, block in blocks:
        block.forward = _CompiledForward(name, block.forward, backend)


class _CompiledForward:
    """A block's forward pass, compiled at its first call."""

    def __init__(self, name: str, forward: Callable[..., Any], backend: str | Callable[..., Any]) -> None:
        self._name = name
        self._forward = forward
        self._backend = backend
        self._compiled: Callable[..., Any] | None = None
        # For those who ask for the signature.
        functools.update_wrapper(self, forward)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code holds the original block, which a copy must not call.
        return {**self.__dict__, "_compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not at the top: it takes long to import, and most jobs do not compile.
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            # The compiler takes functions and methods, not objects that can be called.
            is_function = hasattr(self._forward, "__code__")
            self._compiled = torch.compile(
                self._forward if is_function else self._forward.__call__,  # type: ignore[operator]
                backend=self._backend,
            )
        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise RuntimeError(f"block {self._name} did not compile: {error}") from error
