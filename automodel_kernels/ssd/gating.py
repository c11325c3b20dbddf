"""The gate's part of the backward: what reaches the ungated output, and the gradient of z.

    out = u * silu(z)        dy = dout * silu(z)        dz = dout * u * silu'(z)

x, dout, z and the ungated output u = y + D x are [batch, seqlen, heads, head_dim] of one 16-bit type or fp32; so are dy
and dz. All arithmetic is in fp32. Only a scan with z runs this; all later kernels read dy instead of dout.

Bytes a token: 5 * heads * head_dim * itemsize, each once. Memory alone is the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from automodel_kernels.spans import tile_pointers
from automodel_kernels.tuning import spaces
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.keys import tensors_aligned

__all__ = ["launch_ungate", "ungate_kernel"]

UNSPECIALIZED = (
    "dout_ptr",
    "z_ptr",
    "ungated_ptr",
    "dy_ptr",
    "dz_ptr",
    "num_rows",
    "seqlen",
    "num_heads",
    "stride_dout_batch",
    "stride_dout_token",
    "stride_dout_head",
    "stride_dout_dim",
    "stride_z_batch",
    "stride_z_token",
    "stride_z_head",
    "stride_z_dim",
)


@tuned(space=spaces.SSD_UNGATE, key=("dout_ptr", "HEAD_DIM", "ALIGNED"), outputs=("dy_ptr", "dz_ptr"))
@triton.jit(do_not_specialize=UNSPECIALIZED)
def ungate_kernel(
    dout_ptr,
    z_ptr,
    ungated_ptr,
    dy_ptr,
    dz_ptr,
    num_rows: tl.int64,
    seqlen: tl.int64,
    num_heads: tl.int64,
    stride_dout_batch: tl.int64,
    stride_dout_token: tl.int64,
    stride_dout_head: tl.int64,
    stride_dout_dim: tl.int64,
    stride_z_batch: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_z_dim: tl.int64,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program: a block of rows, one row per token and head."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < num_rows)[:, None]
    head = rows % num_heads
    token = rows // num_heads % seqlen
    batch = rows // num_heads // seqlen
    offs_dout = batch * stride_dout_batch + token * stride_dout_token + head * stride_dout_head
    offs_z = batch * stride_z_batch + token * stride_z_token + head * stride_z_head
    offs_p = tl.arange(0, HEAD_DIM).to(tl.int64)

    dout_ptrs = tile_pointers(dout_ptr, offs_dout, 1, offs_p, stride_dout_dim, ALIGNED)
    z_ptrs = tile_pointers(z_ptr, offs_z, 1, offs_p, stride_z_dim, ALIGNED)
    dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    ungated = tl.load(tile_pointers(ungated_ptr, rows, HEAD_DIM, offs_p, 1, True), mask=mask, other=0.0).to(tl.float32)

    sigmoid = 1.0 / (1.0 + tl.exp(-z))
    dy = dout * z * sigmoid
    dz = dout * ungated * sigmoid * (1.0 + z * (1.0 - sigmoid))
    tl.store(tile_pointers(dy_ptr, rows, HEAD_DIM, offs_p, 1, True), dy.to(dy_ptr.dtype.element_ty), mask=mask)
    tl.store(tile_pointers(dz_ptr, rows, HEAD_DIM, offs_p, 1, True), dz.to(dz_ptr.dtype.element_ty), mask=mask)


def launch_ungate(
    dout: torch.Tensor, *, z: torch.Tensor, out_ungated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy and dz, contiguous; dout and z [batch, seqlen, heads, head_dim] with any strides, out_ungated contiguous."""
    _, seqlen, num_heads, head_dim = dout.shape
    dy = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    dz = torch.empty_like(dy)
    num_rows = dy.numel() // head_dim
    ungate_kernel[lambda meta: (triton.cdiv(num_rows, meta["BLOCK_M"]),)](
        dout,
        z,
        out_ungated,
        dy,
        dz,
        num_rows,
        seqlen,
        num_heads,
        *dout.stride(),
        *z.stride(),
        HEAD_DIM=head_dim,
        ALIGNED=tensors_aligned(dout, z),
    )
    return dy, dz
