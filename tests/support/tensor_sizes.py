"""How large the tensors are that an operation makes on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LargestTensor"]


class LargestTensor(TorchDispatchMode):
    """Inside it, remembers the largest tensor with memory of its own that PyTorch made.

    Attributes:
        nbytes: of that tensor's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = {each.untyped_storage().data_ptr() for each in self._tensors((args, kwargs))}
        result = function(*args, **kwargs)
        for each in self._tensors(result):
            storage = each.untyped_storage()
            if storage.data_ptr() not in known:
                self.nbytes = max(self.nbytes, storage.nbytes())
        return result

    @staticmethod
    def _tensors(values: Any) -> list[torch.Tensor]:
        return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
