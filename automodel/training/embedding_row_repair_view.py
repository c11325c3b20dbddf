"""What one rank holds of an embedding matrix [vocab, hidden]: its part, where it lies, and who holds the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from automodel.training.embedding_row_repair_ranks import WeightRanks

__all__ = ["WeightView", "check_coverage", "check_matching_layout", "weight_view"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WeightView:
    """What this rank holds of an embedding matrix, and where in the whole it lies.

    Attributes:
        local: This rank's part [local_vocab, local_hidden], in the weight's own memory.
        global_shape: [vocab, hidden].
        local_shape: [local_vocab, local_hidden].
        global_offset: The first row and column of the part.
        mesh: The ranks that hold a DTensor; None for a plain tensor.
        placements: How each dimension of the mesh divides the matrix.
        group: The ranks that hold copies of a plain tensor.
    """

    local: Tensor
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> WeightRanks:
        """The ranks that hold the matrix together."""
        return WeightRanks.of(self.mesh, self.group)

    def axes_of(self, dimension: int) -> list[int]:
        """The dimensions of the mesh that shard rows (0) or columns (1)."""
        return [axis for axis, placement in enumerate(self.placements) if _sharded_dimension(placement) == dimension]

    @property
    def copy_axes(self) -> list[int]:
        """The dimensions of the mesh along which ranks hold copies."""
        sharded = {*self.axes_of(0), *self.axes_of(1)}
        return [axis for axis in range(self.ranks.num_axes) if axis not in sharded]


def weight_view(weight: Tensor, name: str, *, group: dist.ProcessGroup | None = None) -> WeightView:
    """Look at a plain tensor or DTensor [vocab, hidden]; `name` is for messages.

    Raises:
        ValueError: it is not 2-D, not floating point, quantised, on the meta device, or partial; or this rank is not in
            its mesh.
    """
    if weight.ndim != 2:
        raise ValueError(f"{name} must be 2-D [vocab, hidden], got shape {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {weight.dtype}: quantised weights cannot be repaired")
    if weight.dtype.itemsize == 1:
        raise ValueError(f"{name} is quantised to {weight.dtype}: its scales are elsewhere, so it cannot be repaired")
    if weight.dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))} to be repaired, got {weight.dtype}")
    whole = weight.detach()
    shape = tuple(whole.shape)
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    local_shape, offset = shape, (0,) * len(shape)
    local = whole
    if isinstance(whole, DTensor):
        mesh, placements, group = whole.device_mesh, whole.placements, None
        if mesh.get_coordinate() is None:
            raise ValueError(f"{name} is sharded over a mesh that this rank is not part of: {mesh}")
        for placement in placements:
            if placement.is_partial() or _sharded_dimension(placement) not in (None, 0, 1):
                raise ValueError(f"{name} must be replicated or sharded in rows or columns, got placement {placement}")
        local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        local = whole.to_local()
    if local.is_meta:
        raise ValueError(f"{name} is on the meta device: it has to be loaded before it can be repaired")
    if type(local) is not Tensor:
        raise ValueError(f"{name} is a {type(local).__name__}: quantised and wrapped weights cannot be repaired")
    if tuple(local.shape) != tuple(local_shape):
        raise ValueError(f"{name} has a local shape of {tuple(local.shape)}, but its layout makes it {local_shape}")
    return WeightView(local, shape, tuple(local_shape), tuple(offset), mesh, placements, group)


def check_matching_layout(input_view: WeightView, output_view: WeightView) -> None:
    """Check that each rank holds the same part of two matrices [vocab, hidden].

    Raises:
        ValueError: the shapes, the meshes, the placements, the local parts or their devices differ.
    """
    what = "the input and the output embedding differ in"
    if input_view.global_shape != output_view.global_shape:
        raise ValueError(f"{what} shape: {input_view.global_shape} and {output_view.global_shape}")
    if input_view.mesh != output_view.mesh or input_view.placements != output_view.placements:
        layouts = [f"{view.placements} over {view.mesh}" for view in (input_view, output_view)]
        raise ValueError(f"{what} how they are sharded: {' and '.join(layouts)}")
    for part in ("local_shape", "global_offset"):
        one, other = getattr(input_view, part), getattr(output_view, part)
        if one != other:
            raise ValueError(f"{what} the shard's {part}: {one} and {other}")
    if input_view.local.device != output_view.local.device:
        raise ValueError(f"{what} device: {input_view.local.device} and {output_view.local.device}")


def _sharded_dimension(placement: Placement) -> int | None:
    """The dimension of a matrix that a placement shards, None where it shards none."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def check_coverage(view: WeightView, name: str) -> None:
    """Check that the ranks' parts cover the matrix once, as those of an interleaved layout do not.

    Raises:
        ValueError: they do not; on every rank.
    """
    parts = set(view.ranks.gather((view.global_offset, view.local_shape)))
    columns_of_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (row, column), (num_rows, num_columns) in parts:
        if num_rows and num_columns:
            columns_of_rows.setdefault((row, num_rows), []).append((column, num_columns))
    vocab, hidden = view.global_shape
    if not hidden or not vocab:
        raise ValueError(f"{name} is empty: shape {view.global_shape}")
    whole = all(_tiles(columns, hidden) for columns in columns_of_rows.values())
    if not whole or not _tiles(list(columns_of_rows), vocab):
        raise ValueError(f"{name} has an interleaved layout, which cannot be repaired row by row: {view.placements}")


def _tiles(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether ranges of (start, length) cover 0 to `size` once."""
    end = 0
    for start, length in sorted(ranges):
        if start != end:
            return False
        end += length
    return end == size
