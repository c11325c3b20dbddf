"""Triton kernels for training language models; each public operator is importable from here.

An operator keeps the field's name, arguments and results, so that it drops into existing code:

    fused_recurrent_gated_delta_rule                              Gated DeltaNet, decoding
    mamba_chunk_scan_combined, selective_state_update             Mamba-2, sequences and decoding
    row_squared_norms, row_norm_summary, repair_rows_             rows of embeddings

What all of them promise:

- *Where.* Tensors on a GPU go to Triton kernels, tensors on a CPU to a vectorised torch path with the same semantics;
  with TRITON_INTERPRET=1 kernels run on CPU tensors. Nothing waits for a GPU.
- *Inputs.* Any strides, without copies. Arguments are checked before anything is launched or changed, and an error
  names the argument and what it got. An operator never changes its inputs unless its name ends in an underscore or its
  documentation says so.
- *Numbers.* Element-wise arithmetic and all sums are in fp32; 16 bits only in memory and as operands of matrix
  products. Results are deterministic: two runs have the same bits.
- *PyTorch.* Operators with gradients are custom operators with fake versions: they trace under
  torch.compile(fullgraph=True), mix data types as autocast does, recompute to the same bits under activation
  checkpointing, and refuse a second derivative.
- *First steps.* What a kernel's configuration and binary depend on is an explicit key (`tuning.autotune`): head sizes,
  data type and flags, never batch, length or single strides. After one call with a key no other call with it compiles
  or tunes. How a configuration is chosen: `tuning.policy`; what a process compiled or tuned: `audit.ColdStartAudit`.

Each operator has a module or a folder of its own: reference, one file per kernel stage from formula to launch, and for
families `op.py` with the public function and the reasons for its cut. `tuning.registry` knows all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_kernels.gdn.recurrent import fused_recurrent_gated_delta_rule
    from automodel_kernels.row_norm import RowNormSummary, row_norm_summary, row_squared_norms
    from automodel_kernels.row_repair import repair_rows_
    from automodel_kernels.ssd.op import mamba_chunk_scan_combined
    from automodel_kernels.ssd.state_update import selective_state_update

__all__ = [
    "RowNormSummary",
    "fused_recurrent_gated_delta_rule",
    "mamba_chunk_scan_combined",
    "repair_rows_",
    "row_norm_summary",
    "row_squared_norms",
    "selective_state_update",
]

_MODULES = {
    "RowNormSummary": "row_norm",
    "fused_recurrent_gated_delta_rule": "gdn.recurrent",
    "mamba_chunk_scan_combined": "ssd.op",
    "repair_rows_": "row_repair",
    "row_norm_summary": "row_norm",
    "row_squared_norms": "row_norm",
    "selective_state_update": "ssd.state_update",
}


def __getattr__(name: str) -> Any:
    """Import an operator when it is first used (PEP 562), since its module imports torch and triton."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"automodel_kernels.{_MODULES[name]}"), name)
