"""Activation checkpointing: blocks recompute in the backward pass what they did not keep in the forward pass.

A block's `forward` is replaced, not the block: names in the state dict stay, and hooks of the block (FSDP2's gathering)
run once around the whole, not again in the recomputation. The order with the other steps is: `checkpoint_blocks`, then
`block_compile.compile_blocks`, then `fully_shard` or DistributedDataParallel.

A model may be copied with `copy.deepcopy` before and after: a copy's blocks recompute themselves, with their own
parameters. What the selective mode keeps is not seen by `torch.autograd.graph.saved_tensors_hooks`, so an estimate that
counts by these hooks gives for it what it gives for the full mode: a lower bound.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["checkpoint_blocks"]

Mode = Literal["full", "selective"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_make_contexts: Callable[..., Contexts] = create_selective_checkpoint_contexts

# The arguments by which a block is handed a cache of keys, values and states, which it changes.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")

# What the selective mode keeps: operators whose time grows faster than the size of their output, so that recomputing
# them costs the most per byte. Linear layers arrive as mm or addmm. Convolutions are not among them: those of language
# models are short and depthwise, and as cheap as element-wise work. The reductions inside attention come as one
# operator for each of PyTorch's attention kernels; a build that lacks one has nothing to keep for it.
_KEPT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


def checkpoint_blocks(blocks: Sequence[tuple[str, nn.Module]], *, mode: Mode) -> None:
    """Let blocks keep less for the backward pass, in place; values and gradients stay the same, dropout included.

    It takes effect in training mode with gradients enabled; otherwise the blocks run as before.

    Args:
        blocks: Names and modules, as `units.find_blocks` returns them.
        mode: "full" keeps a block's inputs and recomputes all else; "selective" keeps the results of matrix products
            and attention too, and recomputes what is cheap.

    Raises:
        ValueError: the mode is unknown, or a block recomputes already.
    """
    context_fn: Callable[[], Contexts] | None
    match mode:
        case "full":
            context_fn = None
        case "selective":
            context_fn = _selective_contexts
        case _:
            raise ValueError(f"mode must be full or selective, got {mode!r}")
    for name, block in blocks:
        if isinstance(block.forward, _CheckpointedForward):
            raise ValueError(f"block {name} recomputes its activations already")
    for _, block in blocks:
        block.forward = _CheckpointedForward(block, context_fn)


class _CheckpointedForward:
    """A block's forward pass under checkpointing.

    An object and not a closure: copying a module copies it with its block, where a closure would go on calling the
    original.
    """

    def __init__(self, block: nn.Module, context_fn: Callable[[], Contexts] | None) -> None:
        self._block = block
        self._forward = block.forward
        self._context_fn = context_fn
        # For those who ask for the signature.
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        for name in _CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self._block).__name__} got a cache ({name}), which it would fill again when it recomputes "
                    "its activations: call the model with use_cache=False"
                )
        if self._context_fn is None:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._context_fn, **kwargs)


def _selective_contexts() -> Contexts:
    return _make_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # By name: not every supported PyTorch has every operator. Operators of higher order have none and are recomputed.
    name = getattr(getattr(operator, "_schema", None), "name", None)
    return CheckpointPolicy.MUST_SAVE if name in _KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
