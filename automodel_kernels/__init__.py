"""Triton kernels for training language models; each public operator is importable from here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_kernels.row_norm import RowNormSummary, row_norm_summary, row_squared_norms
    from automodel_kernels.row_repair import repair_rows_

__all__ = ["RowNormSummary", "repair_rows_", "row_norm_summary", "row_squared_norms"]

_MODULES = {
    "RowNormSummary": "row_norm",
    "repair_rows_": "row_repair",
    "row_norm_summary": "row_norm",
    "row_squared_norms": "row_norm",
}


def __getattr__(name: str) -> Any:
    """Import an operator when it is first used (PEP 562), since its module imports torch and triton."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"automodel_kernels.{_MODULES[name]}"), name)
