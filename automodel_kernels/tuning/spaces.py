"""The configurations that a kernel may take on each target: every list, named once.

A space is a list of `Candidates`; the first that matches a launch's target, data type and flags holds its
configurations, and the first of those is the static choice. A configuration stands in a space only if it fits the
target's shared memory and keeps within the stack that the candidates declare; `automodel_kernels/resources.json`
proves that for every one.
"""

from __future__ import annotations

import torch

from automodel_kernels.hardware import TARGETS
from automodel_kernels.tuning.candidates import Candidates, Config, Space

__all__ = [
    "GDN_CHUNK_BACKWARD",
    "GDN_CHUNK_INVERSE",
    "GDN_GRADIENT_MAPS",
    "GDN_GRADIENT_SCAN",
    "GDN_RECURRENT",
    "GDN_SCAN",
    "GDN_SEGMENT_MAPS",
    "ROW_NORM",
    "ROW_REPAIR",
    "SSD_CHUNK_BACKWARD",
    "SSD_CHUNK_GRADIENTS",
    "SSD_FINISH",
    "SSD_REDUCE",
    "SSD_SCAN",
    "SSD_SEGMENT_STATES",
    "SSD_STATE_PASSING",
    "SSD_STATE_UPDATE",
    "SSD_UNGATE",
]


def _row_norm_candidates(dtypes: tuple[torch.dtype, ...], targets: tuple[str, ...]) -> tuple[Candidates, ...]:
    # Every thread has at least 32 bytes in flight; the tiles differ in how many rows share a program, which is what
    # matters between narrow shards and whole rows.
    wide = (
        Config(meta={"BLOCK_M": 4, "BLOCK_N": 1024}, num_warps=4),
        Config(meta={"BLOCK_M": 1, "BLOCK_N": 4096}, num_warps=4),
        Config(meta={"BLOCK_M": 8, "BLOCK_N": 512}, num_warps=8),
    )
    # One element a load: a smaller tile, or the addresses alone fill the registers.
    narrow = (Config(meta={"BLOCK_M": 4, "BLOCK_N": 512}, num_warps=4),)
    return (
        Candidates(configs=wide, targets=targets, dtypes=dtypes, flags={"ALIGNED": True}),
        Candidates(configs=narrow, targets=targets, dtypes=dtypes, flags={"ALIGNED": False}),
    )


def _targets_with(float8: torch.dtype) -> tuple[str, ...]:
    name = str(float8).removeprefix("torch.")
    return tuple(target.name for target in TARGETS.values() if name in target.float8)


ROW_NORM = Space(
    name="row_norm",
    candidates=(
        *_row_norm_candidates((torch.bfloat16, torch.float32, torch.float16), tuple(TARGETS)),
        *_row_norm_candidates((torch.float8_e4m3fn,), _targets_with(torch.float8_e4m3fn)),
        *_row_norm_candidates((torch.float8_e5m2,), _targets_with(torch.float8_e5m2)),
    ),
)
"""Each data type of 8 bits apart, on the targets that have it."""

ROW_REPAIR = Space(
    name="row_repair",
    candidates=(Candidates(configs=(Config(meta={"BLOCK_N": 1024}, num_warps=4),)),),
)
"""A program copies a piece of one row, 8 elements a thread: with few rows, more programs hide more latency."""

_SSD_FP32 = (torch.float32,)
_SSD_LARGE_STATE = {"BLOCK_N": 256}
_SSD_NVIDIA = tuple(target.name for target in TARGETS.values() if target.backend == "cuda")


def _ssd_tile(tokens: int, dims: int, *, num_warps: int, num_stages: int = 1) -> Config:
    return Config(meta={"BLOCK_T": tokens, "BLOCK_P": dims}, num_warps=num_warps, num_stages=num_stages)


SSD_SEGMENT_STATES = Space(
    name="ssd_segment_states",
    candidates=(
        Candidates(configs=(_ssd_tile(32, 16, num_warps=4),), dtypes=_SSD_FP32, flags=_SSD_LARGE_STATE),
        Candidates(configs=(_ssd_tile(32, 32, num_warps=4),), dtypes=_SSD_FP32),
        Candidates(
            configs=(_ssd_tile(32, 32, num_warps=4, num_stages=2),), flags=_SSD_LARGE_STATE | {"ALIGNED": False}
        ),
        Candidates(configs=(_ssd_tile(64, 32, num_warps=4, num_stages=2),), flags=_SSD_LARGE_STATE),
        # 4 warps spill there at N 64, for no reason that can be seen: they use 72 registers.
        Candidates(configs=(_ssd_tile(64, 64, num_warps=8, num_stages=2),), targets=("sm_100",)),
        Candidates(
            configs=(_ssd_tile(64, 64, num_warps=4, num_stages=2), _ssd_tile(64, 64, num_warps=4, num_stages=3)),
            targets=("sm_80", "sm_90"),
            flags={"ALIGNED": True},
        ),
        Candidates(configs=(_ssd_tile(64, 64, num_warps=4, num_stages=2),)),
    ),
)
"""The state's fp32 tile [P, N] is what takes registers: 64 a thread at 64 x 128; half of that if operands are fp32."""

SSD_STATE_PASSING = Space(
    name="ssd_state_passing",
    candidates=(
        Candidates(
            configs=(
                Config(meta={"BLOCK": 1024, "LOADS_AHEAD": 3}, num_warps=4),
                Config(meta={"BLOCK": 512, "LOADS_AHEAD": 3}, num_warps=2),
            )
        ),
    ),
)
"""Programs are few, each with a chain of loads: 16 bytes a thread and three spans ahead keep enough in flight."""

SSD_SCAN = Space(
    name="ssd_scan",
    candidates=(
        # fp32 operands take twice the registers of 16-bit ones, and without tensor cores each thread holds its own.
        Candidates(
            configs=(_ssd_tile(16, 16, num_warps=8),), targets=_SSD_NVIDIA, dtypes=_SSD_FP32, flags=_SSD_LARGE_STATE
        ),
        Candidates(configs=(_ssd_tile(16, 16, num_warps=8),), targets=_SSD_NVIDIA, dtypes=_SSD_FP32),
        Candidates(
            configs=(_ssd_tile(16, 16, num_warps=4),), targets=("gfx942",), dtypes=_SSD_FP32, flags=_SSD_LARGE_STATE
        ),
        Candidates(configs=(_ssd_tile(16, 32, num_warps=4),), targets=("gfx942",), dtypes=_SSD_FP32),
        Candidates(
            configs=(_ssd_tile(32, 32, num_warps=8), _ssd_tile(16, 32, num_warps=8)),
            targets=_SSD_NVIDIA,
            flags=_SSD_LARGE_STATE | {"ALIGNED": True},
            accepted_stack=256,
        ),
        Candidates(
            configs=(_ssd_tile(16, 32, num_warps=8),), targets=_SSD_NVIDIA, flags=_SSD_LARGE_STATE, accepted_stack=32
        ),
        Candidates(configs=(_ssd_tile(32, 32, num_warps=4),), targets=("gfx942",), flags=_SSD_LARGE_STATE),
        # An address an element fills the registers: smaller tiles.
        Candidates(configs=(_ssd_tile(16, 32, num_warps=4),), targets=("sm_80", "sm_89"), flags={"ALIGNED": False}),
        Candidates(configs=(_ssd_tile(32, 64, num_warps=8),), targets=("sm_90",), flags={"ALIGNED": False}),
        Candidates(configs=(_ssd_tile(16, 64, num_warps=8),), targets=("sm_100",), flags={"ALIGNED": False}),
        Candidates(configs=(_ssd_tile(32, 32, num_warps=4, num_stages=2),), targets=("sm_80", "sm_89")),
        Candidates(
            configs=(
                _ssd_tile(64, 64, num_warps=8, num_stages=2),
                _ssd_tile(64, 32, num_warps=4, num_stages=2),
                _ssd_tile(64, 64, num_warps=8),
            ),
            targets=("sm_90",),
            flags={"PACKED": False},
        ),
        Candidates(
            configs=(_ssd_tile(64, 64, num_warps=8), _ssd_tile(64, 32, num_warps=4, num_stages=2)), targets=("sm_90",)
        ),
        Candidates(
            configs=(_ssd_tile(64, 64, num_warps=8, num_stages=2), _ssd_tile(64, 64, num_warps=8)), targets=("sm_100",)
        ),
        Candidates(configs=(_ssd_tile(64, 64, num_warps=4),), targets=("gfx942",)),
    ),
)
"""All of P in a program reads B and C once a head and forms C.B^T once; half of it leaves room for twice the programs.

The state alone takes 32 registers of a thread at 8 warps and N 128, and what else stays within 255 is found by
compiling: with seq_idx a second stage is one tile too many on sm_90.
"""

SSD_UNGATE = Space(
    name="ssd_ungate",
    candidates=(Candidates(configs=(Config(meta={"BLOCK_M": 32}, num_warps=4),)),),
)
"""Element-wise: 16 bytes of each tensor a thread at head_dim 64 and more."""

SSD_CHUNK_GRADIENTS = Space(
    name="ssd_chunk_gradients",
    candidates=(
        # Without matrix units every thread holds whole rows of both operands: short ones.
        Candidates(
            configs=(Config(meta={"BLOCK_T": 16, "BLOCK_P": 32}, num_warps=8),), dtypes=_SSD_FP32, accepted_stack=8
        ),
        Candidates(configs=(Config(meta={"BLOCK_T": 32, "BLOCK_P": 64}, num_warps=8),), flags={"ALIGNED": False}),
        Candidates(
            configs=(
                Config(meta={"BLOCK_T": 64, "BLOCK_P": 64}, num_warps=8, num_stages=2),
                Config(meta={"BLOCK_T": 64, "BLOCK_P": 64}, num_warps=4, num_stages=2),
            ),
        ),
    ),
)
"""A program reads 256 tokens of dy once; more stages keep more of them on the way."""


def _ssd_backward(*tiles: tuple[int, int, int], num_warps: int = 8, num_stages: int = 1) -> tuple[Config, ...]:
    """Configurations from (BLOCK_K, BLOCK_P, BLOCK_N)."""
    return tuple(
        Config(meta={"BLOCK_K": k, "BLOCK_P": p, "BLOCK_N": n}, num_warps=num_warps, num_stages=num_stages)
        for k, p, n in tiles
    )


def _ssd_backward_of_large_sizes(**flags: int) -> tuple[Candidates, ...]:
    return (
        Candidates(
            configs=_ssd_backward((16, 16, 16), num_warps=16),
            targets=_SSD_NVIDIA,
            dtypes=_SSD_FP32,
            flags=flags,
            accepted_stack=64,
        ),
        Candidates(configs=_ssd_backward((16, 16, 16), num_warps=4), dtypes=_SSD_FP32, flags=flags),
        # Without wide loads every element has an address of its own.
        Candidates(
            configs=_ssd_backward((16, 32, 128)),
            targets=_SSD_NVIDIA,
            flags={**flags, "ALIGNED": False},
            accepted_stack=32,
        ),
        Candidates(configs=_ssd_backward((32, 32, 128)), targets=_SSD_NVIDIA, flags=flags, accepted_stack=32),
        # AMD: 8 warps would have half the registers each.
        Candidates(configs=_ssd_backward((32, 32, 128), num_warps=4), flags=flags),
    )


SSD_CHUNK_BACKWARD = Space(
    name="ssd_chunk_backward",
    candidates=(
        *_ssd_backward_of_large_sizes(WIDE_STATE=256),
        *_ssd_backward_of_large_sizes(HEAD_DIM=128),
        # fp32 has no matrix units: thin slices, or every thread holds whole rows of both operands.
        Candidates(configs=_ssd_backward((16, 16, 16), num_warps=16), targets=_SSD_NVIDIA, dtypes=_SSD_FP32),
        Candidates(configs=_ssd_backward((16, 16, 16), num_warps=4), dtypes=_SSD_FP32),
        Candidates(configs=_ssd_backward((32, 64, 128), num_warps=4), targets=("gfx942",)),
        Candidates(configs=_ssd_backward((16, 64, 128)), flags={"ALIGNED": False}),
        # With a D per channel sm_90 has registers enough only if the state comes in two slices.
        Candidates(
            configs=_ssd_backward((32, 64, 64), num_stages=2), targets=("sm_90",), flags={"D_PER_CHANNEL": True}
        ),
        Candidates(configs=_ssd_backward((32, 64, 128), (32, 64, 64), num_stages=2), targets=("sm_90",)),
        Candidates(configs=_ssd_backward((32, 64, 128), num_stages=2), targets=("sm_80",)),
        Candidates(configs=_ssd_backward((32, 64, 128)), targets=("sm_89", "sm_100")),
    ),
)
"""Registers decide: these are the largest tiles and slices that leave the stack empty where none is accepted."""

SSD_FINISH = Space(name="ssd_finish", candidates=(Candidates(configs=(Config(meta={}, num_warps=4),)),))
"""Nothing to tune: two tokens a thread, each element read once."""

SSD_REDUCE = Space(
    name="ssd_reduce",
    candidates=(Candidates(configs=(Config(meta={"BLOCK": 1024, "BLOCK_ROWS": 64, "BLOCK_COLS": 32}, num_warps=4),)),),
)
"""Sums over few rows take BLOCK elements at a time, those over many rows a tile."""

GDN_CHUNK_INVERSE = Space(
    name="gdn_chunk_inverse",
    candidates=(Candidates(configs=(Config(meta={"BLOCK_K": 64}, num_warps=4),)),),
)
"""Keys are read in blocks of 64, so that only the products and the system of the chunk stay in registers."""


def _gdn_walk(block_v: int, *, num_warps: int = 4, num_stages: int = 1) -> Config:
    return Config(meta={"BLOCK_V": block_v}, num_warps=num_warps, num_stages=num_stages)


_GDN_NVIDIA = tuple(target.name for target in TARGETS.values() if target.backend == "cuda")
_GDN_FP32 = (torch.float32,)

GDN_SCAN = Space(
    name="gdn_scan",
    candidates=(
        # Of fp32 products a thread holds whole rows: 16 warps spill least.
        Candidates(
            configs=(_gdn_walk(16, num_warps=16),),
            targets=_GDN_NVIDIA,
            dtypes=_GDN_FP32,
            flags={"BLOCK_K": 256},
            accepted_stack=1408,
        ),
        Candidates(configs=(_gdn_walk(16, num_warps=16),), targets=_GDN_NVIDIA, dtypes=_GDN_FP32, accepted_stack=576),
        Candidates(
            configs=(_gdn_walk(16),),
            targets=("gfx942",),
            dtypes=_GDN_FP32,
            flags={"BLOCK_K": 256},
            accepted_stack=64,
        ),
        Candidates(configs=(_gdn_walk(16),), targets=("gfx942",)),
        Candidates(
            configs=(_gdn_walk(16, num_warps=8),), targets=_GDN_NVIDIA, flags={"BLOCK_K": 256}, accepted_stack=320
        ),
        Candidates(
            configs=(_gdn_walk(16, num_warps=8),), targets=("sm_90",), flags={"ALIGNED": False}, accepted_stack=256
        ),
        Candidates(configs=(_gdn_walk(64, num_warps=8),), targets=("sm_100",), flags={"ALIGNED": False}),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_80", "sm_89"), flags={"ALIGNED": False}),
        Candidates(configs=(_gdn_walk(16, num_stages=2),), targets=("sm_80",), flags={"VARLEN": True}),
        Candidates(configs=(_gdn_walk(32, num_stages=2), _gdn_walk(16, num_stages=2)), targets=("sm_80",)),
        Candidates(configs=(_gdn_walk(16, num_stages=2),), targets=("sm_89",)),
        # One value that is needed after the walk, where documents, initial states and gates come together.
        Candidates(
            configs=(_gdn_walk(32, num_stages=2),), targets=("sm_90",), flags={"VARLEN": True}, accepted_stack=8
        ),
        Candidates(configs=(_gdn_walk(32, num_stages=2), _gdn_walk(16, num_stages=2)), targets=("sm_90",)),
        Candidates(
            configs=(_gdn_walk(64, num_warps=8, num_stages=2), _gdn_walk(32, num_stages=2)), targets=("sm_100",)
        ),
    ),
)
"""As many columns of the state as leave room for the tiles: q and k are read once for each block of V."""

GDN_GRADIENT_SCAN = Space(
    name="gdn_gradient_scan",
    candidates=(
        # Of fp32 products a thread holds whole rows: 16 warps spill least.
        Candidates(configs=(_gdn_walk(16, num_warps=16),), targets=_GDN_NVIDIA, dtypes=_GDN_FP32, accepted_stack=2048),
        Candidates(configs=(_gdn_walk(16),), targets=("gfx942",)),
        Candidates(
            configs=(_gdn_walk(16, num_warps=8),), targets=_GDN_NVIDIA, flags={"BLOCK_K": 256}, accepted_stack=128
        ),
        Candidates(configs=(_gdn_walk(16, num_stages=2),), targets=("sm_90",), flags={"ALIGNED": False}),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_80",), flags={"ALIGNED": False}),
        # Where the initial state's gradient is wanted, its place is needed after the walk.
        Candidates(configs=(_gdn_walk(32),), targets=("sm_80",), flags={"HAS_INITIAL": True}, accepted_stack=16),
        Candidates(configs=(_gdn_walk(32),), targets=("sm_80",)),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_89",), flags={"ALIGNED": False}, accepted_stack=64),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_89",), flags={"HAS_INITIAL": True}, accepted_stack=16),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_89",)),
        Candidates(
            configs=(_gdn_walk(32, num_stages=2),), targets=("sm_90",), flags={"HAS_INITIAL": True}, accepted_stack=16
        ),
        Candidates(configs=(_gdn_walk(32, num_stages=2), _gdn_walk(16, num_stages=2)), targets=("sm_90",)),
        Candidates(configs=(_gdn_walk(32, num_warps=8, num_stages=2),), targets=("sm_100",)),
    ),
)
"""As GDN_SCAN, in reverse."""

GDN_GRADIENT_MAPS = Space(
    name="gdn_gradient_maps",
    candidates=(
        Candidates(
            configs=(_gdn_walk(16, num_warps=16),),
            targets=_GDN_NVIDIA,
            dtypes=_GDN_FP32,
            flags={"BLOCK_K": 256},
            accepted_stack=1408,
        ),
        Candidates(configs=(_gdn_walk(16, num_warps=16),), targets=_GDN_NVIDIA, dtypes=_GDN_FP32, accepted_stack=256),
        Candidates(configs=(_gdn_walk(16),), targets=("gfx942",)),
        Candidates(
            configs=(_gdn_walk(16, num_warps=8),), targets=_GDN_NVIDIA, flags={"BLOCK_K": 256}, accepted_stack=64
        ),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_80", "sm_89"), flags={"ALIGNED": False}),
        Candidates(configs=(_gdn_walk(32),), targets=("sm_80", "sm_89")),
        Candidates(configs=(_gdn_walk(16, num_stages=2),), targets=("sm_90",), flags={"ALIGNED": False}),
        Candidates(configs=(_gdn_walk(32, num_stages=2),), targets=("sm_90",), accepted_stack=8),
        Candidates(configs=(_gdn_walk(32, num_warps=8, num_stages=2),), targets=("sm_100",)),
    ),
)
"""As GDN_GRADIENT_SCAN, whose walk it is."""

GDN_CHUNK_BACKWARD = Space(
    name="gdn_chunk_backward",
    candidates=(
        Candidates(configs=(_gdn_walk(16, num_warps=16),), targets=_GDN_NVIDIA, dtypes=_GDN_FP32, accepted_stack=3072),
        Candidates(configs=(_gdn_walk(16),), targets=("gfx942",), accepted_stack=1024),
        Candidates(
            configs=(_gdn_walk(16, num_warps=8),), targets=_GDN_NVIDIA, flags={"BLOCK_K": 256}, accepted_stack=1536
        ),
        Candidates(configs=(_gdn_walk(16),), targets=_GDN_NVIDIA, flags={"ALIGNED": False}, accepted_stack=1024),
        Candidates(configs=(_gdn_walk(16),), targets=("sm_80", "sm_89"), accepted_stack=768),
        Candidates(configs=(_gdn_walk(16, num_stages=3),), targets=("sm_90",), accepted_stack=1024),
        Candidates(configs=(_gdn_walk(32),), targets=("sm_100",), accepted_stack=1024),
    ),
)
"""Sums for dq, dk and pairs fill the registers, and what waits for the end of a walk over V lies on the stack. These
keep it out of the walks themselves where tensors are aligned, on sm_90 and sm_100."""

GDN_SEGMENT_MAPS = Space(
    name="gdn_segment_maps",
    candidates=(
        Candidates(
            configs=(_gdn_walk(16, num_warps=16),),
            targets=_GDN_NVIDIA,
            dtypes=_GDN_FP32,
            flags={"BLOCK_K": 256},
            accepted_stack=1408,
        ),
        Candidates(configs=(_gdn_walk(16, num_warps=16),), targets=_GDN_NVIDIA, dtypes=_GDN_FP32, accepted_stack=256),
        Candidates(configs=(_gdn_walk(16),), targets=("gfx942",)),
        Candidates(configs=(_gdn_walk(16, num_warps=8),), targets=_GDN_NVIDIA, flags={"BLOCK_K": 256}),
        Candidates(configs=(_gdn_walk(64, num_stages=2),), targets=("sm_100",), flags={"ALIGNED": True}),
        Candidates(configs=(_gdn_walk(16, num_stages=2),), targets=("sm_89",)),
        Candidates(configs=(_gdn_walk(32, num_stages=2),), targets=("sm_100",), accepted_stack=64),
        Candidates(configs=(_gdn_walk(32, num_stages=2),), targets=("sm_80", "sm_90")),
    ),
)
"""The walk of the scan without outputs, so that more columns fit."""


def _gdn_recurrent_candidates(block_k: int | None, shapes: tuple[tuple[int, int], ...]) -> Candidates:
    configs = tuple(Config(meta={"BLOCK_V": block_v}, num_warps=warps) for block_v, warps in shapes)
    return Candidates(configs=configs, flags={} if block_k is None else {"BLOCK_K": block_k})


GDN_RECURRENT = Space(
    name="gdn_recurrent",
    candidates=(
        _gdn_recurrent_candidates(256, ((8, 2), (16, 4), (32, 8))),
        _gdn_recurrent_candidates(128, ((8, 1), (16, 2), (32, 4))),
        _gdn_recurrent_candidates(None, ((16, 1), (8, 1), (32, 4))),
    ),
)
"""32 registers a thread hold the state; with 64 all targets but one spill. Narrow tiles make more programs, and few
warps sum over the keys with little shared memory or none; wide tiles read longer pieces of memory."""

SSD_STATE_UPDATE = Space(
    name="ssd_state_update",
    candidates=(
        # Larger tiles of so wide a state spill.
        Candidates(
            configs=(Config(meta={"BLOCK_P": 16}, num_warps=4), Config(meta={"BLOCK_P": 8}, num_warps=2)),
            flags={"BLOCK_N": 256},
        ),
        Candidates(
            configs=(
                Config(meta={"BLOCK_P": 16}, num_warps=4),
                Config(meta={"BLOCK_P": 8}, num_warps=2),
                Config(meta={"BLOCK_P": 32}, num_warps=4),
            ),
        ),
    ),
)
"""A tile of the state is read and written once. Small tiles make more programs; large ones move more at a time."""
