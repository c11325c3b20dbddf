"""Repair of near-zero and non-finite rows of the input embedding, before the optimizer is built.

A row that is almost zero trains well until its token occurs: the normalisation after it then divides by almost nothing,
and the gradient explodes. Such a row gets the direction of the token's row in the output embedding, scaled to the norm
that healthy rows have. The weights may be whole or sharded; the table is never gathered, and all exchange stays among
the ranks that hold it.
"""

import logging
import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel.config.sections import refuse, setting
from automodel.models.embedding_rows import (
    DEFAULT_MAX_ROWS,
    DEFAULT_MIN_NORM,
    MOST_RMS_OVER_MEDIAN,
    check_limits,
    classify_rows,
    fits_dtype,
)
from automodel.models.tied_weights import (
    EmbeddingWeight,
    find_input_embedding,
    find_output_embedding,
    shares_memory,
)
from automodel.training.embedding_row_repair_ranks import UnhealthyRepairError, WeightRanks
from automodel.training.embedding_row_repair_view import WeightView as _WeightView
from automodel.training.embedding_row_repair_view import check_coverage
from automodel.training.embedding_row_repair_view import check_matching_layout as _check_matching_layout
from automodel.training.embedding_row_repair_view import weight_view as _weight_view
from automodel_kernels.row_norm import row_squared_norms
from automodel_kernels.row_repair import repair_rows_

__all__ = [
    "EmbeddingRowRepairConfig",
    "EmbeddingRowRepairReport",
    "UnhealthyRepairError",
    "repair_input_embedding_rows",
]

logger = logging.getLogger(__name__)

Target = Literal["rms", "median"]

# What a row is, worse ones higher, so that the maximum over copies of a row is what the ranks agree on.
_HEALTHY, _EXPECTED_ZERO, _NEAR_ZERO, _NON_FINITE = range(4)


@dataclass(frozen=True)
class EmbeddingRowRepairConfig:
    """Recipe section `embedding_row_repair`; a recipe without the section repairs nothing."""

    enabled: bool = setting(True, "repair damaged rows before training")
    min_norm: float = setting(DEFAULT_MIN_NORM, "rows whose L2 norm is not finite, or at or below this, are repaired")
    max_rows: int = setting(DEFAULT_MAX_ROWS, "most rows to repair; a checkpoint with more damaged rows is refused")
    _: KW_ONLY
    target: Target = setting("rms", "norm that repaired rows get: the RMS or the median of healthy rows' norms")

    def __post_init__(self) -> None:
        _check_settings(self.min_norm, self.max_rows, self.target, prefix="embedding_row_repair.")

    def check_pipeline(self, pp_size: int | None) -> None:
        """Check the section against the number of pipeline stages (`distributed.pp_size`); null is one.

        Raises:
            ValueError: the section is enabled and there are several stages.
        """
        if self.enabled and pp_size is not None and pp_size > 1:
            raise ValueError(
                f"embedding_row_repair needs distributed.pp_size 1, got {pp_size}: the first stage holds the input "
                "embedding and the last one the output embedding that its rows are repaired from"
            )

    def apply(
        self, model: nn.Module, *, vocab_size: int | None = None, group: dist.ProcessGroup | None = None
    ) -> "EmbeddingRowRepairReport | None":
        """Repair damaged rows in `model`; see `repair_input_embedding_rows`. None when the section is not enabled."""
        if not self.enabled:
            return None
        return repair_input_embedding_rows(
            model, self.min_norm, self.max_rows, target=self.target, vocab_size=vocab_size, group=group
        )


@dataclass(frozen=True)
class EmbeddingRowRepairReport:
    """What a repair found and did; the same on every rank.

    Attributes:
        input_embedding_name: Full name of the input embedding's weight.
        output_embedding_name: That of the output embedding's; None where there is no separate one.
        repaired_row_ids: The token ids of the rows that were written, ascending.
        min_norm_before: The smallest finite norm before, of rows that are not expected to be zero; infinity where there
            is none.
        target_norm: The norm that repaired rows got; None where there were none.
        num_non_finite_rows: How many of the repaired rows held NaN or infinity.
        num_zero_rows_kept: Rows that are exactly zero as expected: padding, and rows beyond the vocabulary.
    """

    input_embedding_name: str
    output_embedding_name: str | None
    repaired_row_ids: tuple[int, ...]
    min_norm_before: float
    target_norm: float | None
    num_non_finite_rows: int = 0
    num_zero_rows_kept: int = 0


@torch.no_grad()
def repair_input_embedding_rows(
    model: nn.Module,
    min_norm: float = DEFAULT_MIN_NORM,
    max_rows: int = DEFAULT_MAX_ROWS,
    *,
    target: Target = "rms",
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> EmbeddingRowRepairReport:
    """Find damaged rows of the input embedding and replace them, in place.

    A row is damaged when its L2 norm is not finite or at most `min_norm`. It becomes the token's output row, scaled to
    the target norm. The padding row, and rows beyond `vocab_size`, are left alone where they are exactly zero. Every
    rank that holds the weights calls this with equal arguments; each gets the same report or the same error. Nothing is
    written before everything has been checked. A frozen weight is repaired and stays frozen.

    The weight itself says which ranks those are: it must be a DTensor over one mesh on all of them, or a plain tensor
    with one `group`. Where it is plain on one rank and a DTensor on others, or the meshes differ, ranks may wait until
    their process group times out. A rank without an input embedding goes by the mesh of its first sharded parameter.

    Args:
        model: A causal language model, loaded and sharded. Its embeddings are [vocab, hidden]: plain tensors, or
            DTensors that are replicated or sharded in either dimension.
        min_norm: The largest L2 norm of a damaged row; positive.
        max_rows: The most rows to repair.
        target: The norm that repaired rows get: the RMS or the median of the healthy rows' norms.
        vocab_size: The tokens that the tokenizer has; rows from there on may be zero. None: not known.
        group: The ranks that hold copies of a plain tensor; None: this process alone. DTensors have ranks of their own.

    Raises:
        ValueError: an argument is out of range; there is no input embedding, or one that cannot be repaired (not 2-D,
            not floating point, quantised, on the meta device, partial); ranks differ in an argument or an embedding;
            more rows are damaged than `max_rows`; there is no separate output embedding, or one of another shape or
            layout, or whose rows are damaged too; no row is healthy.
        UnhealthyRepairError: the repaired rows would overflow or vanish in the weight's dtype. It is a ValueError and a
            RuntimeError.
        RuntimeError: the rows are not healthy after they were written; or another rank met an error of another class.
    """
    embedding, head, view = _agreed_embeddings(
        model, min_norm=min_norm, max_rows=max_rows, target=target, vocab_size=vocab_size, group=group
    )
    check_coverage(view, embedding.name)
    survey = _survey(view, min_norm, padding_idx=embedding.padding_idx, vocab_size=vocab_size)
    ranks = view.ranks
    with ranks.agreed():
        shares = head is not None and shares_memory(head.weight, embedding.weight)
    # A rank whose shard is empty cannot tell.
    is_tied = any(ranks.gather(shares))
    report = EmbeddingRowRepairReport(
        input_embedding_name=embedding.name,
        output_embedding_name=None if head is None or is_tied else head.name,
        repaired_row_ids=(),
        min_norm_before=survey.min_norm,
        target_norm=None,
        num_non_finite_rows=survey.num_non_finite,
        num_zero_rows_kept=survey.num_expected_zero,
    )
    if survey.num_damaged == 0:
        if ranks.is_main:
            _log_nothing_damaged(report)
        return report
    if survey.num_damaged > max_rows:
        raise ValueError(
            f"{embedding.name} has {survey.num_damaged} damaged rows, more than max_rows={max_rows}: the checkpoint is "
            "broadly damaged, or is not this model's; nothing was changed"
        )
    ids = _gather_unique_ids(_global_ids(view, survey.is_damaged), mesh=view.mesh, group=view.group)
    with ranks.agreed():
        output = _output_view(embedding, head, ids=ids, is_tied=is_tied, group=group)
        _check_matching_layout(view, output)
    target_norm = _target_norm(survey, view, target)
    rows = _local_rows(view, ids)
    replacement = _replacement(view, output, rows, target_norm, min_norm)
    _write(view, rows, replacement, min_norm)
    report = replace(report, repaired_row_ids=ids, target_norm=target_norm)
    if ranks.is_main:
        _log_repaired(report, target)
    return report


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """The condition of the rows: tensors over the local rows, numbers over all."""

    squares: Tensor
    is_damaged: Tensor
    is_healthy: Tensor
    min_norm: float
    num_damaged: int
    num_non_finite: int
    num_expected_zero: int


def _full_row_squared_norms(view: _WeightView) -> Tensor:
    """The squared L2 norms over the full hidden dimension of the rows that this rank holds.

    Returns:
        float64 [local_vocab].
    """
    with view.ranks.agreed():
        squares = row_squared_norms(view.local)
    view.ranks.reduce_(squares, dist.ReduceOp.SUM, axes=view.axes_of(1))
    return squares


def _global_ids(view: _WeightView, local_mask: Tensor) -> list[int]:
    """The token ids of the rows that a boolean mask [local_vocab] selects."""
    ids: list[int] = (local_mask.nonzero().flatten() + view.global_offset[0]).tolist()
    return ids


def _gather_unique_ids(
    local_ids: list[int], *, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None
) -> tuple[int, ...]:
    """The token ids of all ranks of a mesh or group, each once, ascending; without either this process's own."""
    gathered = WeightRanks.of(mesh, group).gather(local_ids)
    return tuple(sorted({one for ids in gathered for one in ids}))


def _global_min(value: Tensor, *, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None) -> float:
    """The smallest of a scalar over all ranks of a mesh or group; without either this process's own."""
    return min(WeightRanks.of(mesh, group).gather(float(value)))


def _healthy_rms_norm(
    row_squared_norms: Tensor,
    healthy_mask: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """The root of the mean squared norm of the healthy rows of all ranks.

    Args:
        row_squared_norms: Squared norms over the full hidden dimension, [local_vocab].
        healthy_mask: Which of them count, boolean [local_vocab].
        mesh: The ranks; rows of which several hold copies count as often, which leaves the mean as it is.
        group: The ranks, where there is no mesh.

    Raises:
        ValueError: no row is healthy.
    """
    healthy = row_squared_norms[healthy_mask]
    parts = WeightRanks.of(mesh, group).gather((float(healthy.double().sum()), healthy.numel()))
    count = sum(number for _, number in parts)
    if count == 0:
        raise ValueError("the input embedding has no healthy rows to take the norm of repaired ones from")
    return math.sqrt(math.fsum(total for total, _ in parts) / count)


def _agreed_embeddings(
    model: nn.Module,
    *,
    min_norm: float,
    max_rows: int,
    target: str,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
) -> tuple[EmbeddingWeight, EmbeddingWeight | None, _WeightView]:
    """Find both embeddings, and check that every rank found the same ones and was asked for the same.

    Returns:
        The input embedding, the output embedding where there is one, and the view of the former.

    Raises:
        ValueError, RuntimeError: as `repair_input_embedding_rows` says; on every rank.
    """
    embedding, failure = None, None
    try:
        embedding = find_input_embedding(model)
    except Exception as error:  # noqa: BLE001 - raised again where the other ranks hear of it
        failure = error
    ranks = _ranks_of_model(model, embedding, group)
    with ranks.agreed():
        if failure is not None:
            raise failure
        _check_settings(min_norm, max_rows, target, vocab_size=vocab_size)
        if embedding is None:
            raise ValueError(f"{type(model).__name__} has no input embedding: no get_input_embeddings, no usual name")
        view = _weight_view(embedding.weight, embedding.name, group=group)
        head = find_output_embedding(model)
    ranks.check_same(
        {
            "min_norm": min_norm,
            "max_rows": max_rows,
            "target": target,
            "vocab_size": vocab_size,
            "the input embedding": embedding.name,
            "the output embedding": None if head is None else head.name,
            f"padding_idx of {embedding.name}": embedding.padding_idx,
            f"the shape of {embedding.name}": view.global_shape,
            f"the dtype of {embedding.name}": str(view.local.dtype),
            f"the layout of {embedding.name}": str(view.placements),
        }
    )
    return embedding, head, view


def _ranks_of_model(
    model: nn.Module, embedding: EmbeddingWeight | None, group: dist.ProcessGroup | None
) -> WeightRanks:
    """The ranks that hold the input embedding; where this rank finds none, those of any sharded parameter."""
    weights = (weight for weight in model.parameters() if isinstance(weight, DTensor))
    weight = embedding.weight if embedding is not None else next(weights, None)
    return WeightRanks.of(weight.device_mesh if isinstance(weight, DTensor) else None, group)


def _check_settings(
    min_norm: float, max_rows: int, target: str, *, vocab_size: int | None = None, prefix: str = ""
) -> None:
    check_limits(min_norm=min_norm, max_rows=max_rows, prefix=prefix)
    if target not in ("rms", "median"):
        raise refuse(f"{prefix}target", target, "'rms' or 'median'")
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
        raise refuse(f"{prefix}vocab_size", vocab_size, "a positive integer or None")


def _survey(view: _WeightView, min_norm: float, *, padding_idx: int | None, vocab_size: int | None) -> _Survey:
    """Find the condition of every row; copies of a row are as damaged as the worst of them."""
    squares = _full_row_squared_norms(view)
    norms = squares.sqrt()
    is_finite = norms.isfinite()
    classes = classify_rows(
        squares, min_norm=min_norm, first_row=view.global_offset[0], padding_id=padding_idx, vocab_size=vocab_size
    )
    condition = torch.full_like(squares, _HEALTHY, dtype=torch.uint8)
    condition[classes.unused] = _EXPECTED_ZERO
    condition[classes.damaged] = _NEAR_ZERO
    condition[~is_finite] = _NON_FINITE
    view.ranks.reduce_(condition, dist.ReduceOp.MAX, axes=view.copy_axes)
    is_damaged = condition >= _NEAR_ZERO
    counts = [int((condition == one).sum()) for one in (_EXPECTED_ZERO, _NEAR_ZERO, _NON_FINITE)]
    # Each shard of rows counts once, however many ranks hold it or a part of its columns.
    gathered = view.ranks.gather((view.global_offset[0], counts))
    of_shard = {offset: numbers for offset, numbers in gathered if any(numbers)}
    num_zero, num_near_zero, num_non_finite = map(sum, zip([0, 0, 0], *of_shard.values(), strict=True))
    measured = norms[is_finite & (condition != _EXPECTED_ZERO)]
    smallest = measured.min() if measured.numel() else norms.new_tensor(math.inf)
    return _Survey(
        squares=squares,
        is_damaged=is_damaged,
        is_healthy=condition == _HEALTHY,
        min_norm=_global_min(smallest, mesh=view.mesh, group=view.group),
        num_damaged=num_near_zero + num_non_finite,
        num_non_finite=num_non_finite,
        num_expected_zero=num_zero,
    )


def _output_view(
    embedding: EmbeddingWeight,
    head: EmbeddingWeight | None,
    *,
    ids: tuple[int, ...],
    is_tied: bool,
    group: dist.ProcessGroup | None,
) -> _WeightView:
    """The view of the output embedding that damaged rows are repaired from.

    Raises:
        ValueError: there is no separate one, or it is no matrix of numbers.
    """
    if head is None:
        raise ValueError(
            f"{embedding.name} has damaged rows, and the model has no output embedding to repair them from: "
            f"ids={list(ids)}"
        )
    if is_tied:
        raise ValueError(
            f"{embedding.name} and {head.name} are tied: they are one tensor, so a damaged input row is the damaged "
            f"output row and cannot be repaired from itself: ids={list(ids)}"
        )
    return _weight_view(head.weight, head.name, group=group)


def _target_norm(survey: _Survey, view: _WeightView, target: Target) -> float:
    """The norm that repaired rows get, the same on every rank."""
    rms = _healthy_rms_norm(survey.squares, survey.is_healthy, mesh=view.mesh, group=view.group)
    healthy = survey.squares[survey.is_healthy].sqrt().cpu()
    norms = torch.cat(view.ranks.gather(healthy, axes=view.axes_of(0)))
    # Where copies differ, those of the first rank decide.
    median = view.ranks.gather(float(norms.median()))[0]
    match target:
        case "median":
            return median
        case "rms":
            if rms > MOST_RMS_OVER_MEDIAN * median and view.ranks.is_main:
                logger.warning(
                    "embedding_row_repair: a few large rows decide the target norm: the RMS of the healthy rows' norms "
                    "is %.6g, their median %.6g; target: median would take the latter",
                    rms,
                    median,
                )
            return rms


def _local_rows(view: _WeightView, ids: tuple[int, ...]) -> Tensor:
    """The indices of those rows that this rank holds, int64 on the weight's device."""
    start, end = view.global_offset[0], view.global_offset[0] + view.local_shape[0]
    rows = [one - start for one in ids if start <= one < end]
    return torch.tensor(rows, dtype=torch.int64, device=view.local.device)


def _squared_norms_of(matrix: Tensor, view: _WeightView) -> Tensor:
    """The full squared norms of rows of which `matrix` holds those columns that `view` holds of its own."""
    return _full_row_squared_norms(replace(view, local=matrix, local_shape=tuple(matrix.shape)))


def _unhealthy_ids(view: _WeightView, rows: Tensor, is_healthy: Tensor) -> list[int]:
    """The token ids of those `rows` that are not healthy on some rank, ascending."""
    local_ids: list[int] = (rows[~is_healthy] + view.global_offset[0]).tolist()
    return list(_gather_unique_ids(local_ids, mesh=view.mesh, group=view.group))


def _replacement(view: _WeightView, output: _WeightView, rows: Tensor, target_norm: float, min_norm: float) -> Tensor:
    """Make this rank's part of the rows that replace damaged ones, [rows, local_hidden] in the weight's dtype.

    Raises:
        ValueError: an output row is damaged as well.
        UnhealthyRepairError: a row overflows or vanishes in the weight's dtype.
    """
    with view.ranks.agreed():
        source = output.local.index_select(0, rows)
    source_squares = _squared_norms_of(source, output)
    if damaged := _unhealthy_ids(view, rows, classify_rows(source_squares, min_norm=min_norm).healthy):
        raise ValueError(f"the output rows of damaged input rows are damaged too; nothing was changed: ids={damaged}")
    dtype, source_norms = view.local.dtype, source_squares.sqrt()
    with view.ranks.agreed():
        fits = fits_dtype(source, norms=source_norms, target_norm=target_norm, dtype=dtype)
    if overflowing := _unhealthy_ids(view, rows, fits):
        raise UnhealthyRepairError(
            f"rows of norm {target_norm:.6g} would overflow {dtype}; nothing was changed: ids={overflowing}"
        )
    with view.ranks.agreed():
        made = torch.zeros_like(source, dtype=dtype)
        repair_rows_(made, source, range(len(rows)), target_norm, source_norms=source_norms)
    squares = _squared_norms_of(made, view)
    if vanished := _unhealthy_ids(view, rows, classify_rows(squares, min_norm=min_norm).healthy):
        raise UnhealthyRepairError(
            f"rows of norm {target_norm:.6g} would vanish in {dtype}; nothing was changed: ids={vanished}"
        )
    return made


def _write(view: _WeightView, rows: Tensor, replacement: Tensor, min_norm: float) -> None:
    """Write the rows into the weight and check them as they are there.

    Raises:
        RuntimeError: one is damaged.
    """
    with view.ranks.agreed():
        view.local.index_copy_(0, rows, replacement)
        written = view.local.index_select(0, rows)
    squares = _squared_norms_of(written, view)
    if damaged := _unhealthy_ids(view, rows, classify_rows(squares, min_norm=min_norm).healthy):
        raise RuntimeError(f"input embedding rows are damaged after they were repaired: ids={damaged}")


def _log_nothing_damaged(report: EmbeddingRowRepairReport) -> None:
    logger.info(
        "embedding_row_repair: no damaged rows in %s; smallest norm %.6g, %d rows zero as expected",
        report.input_embedding_name,
        report.min_norm_before,
        report.num_zero_rows_kept,
    )


def _log_repaired(report: EmbeddingRowRepairReport, target: Target) -> None:
    logger.warning(
        "embedding_row_repair: repaired %d rows of %s from %s: ids=%s; smallest norm before %.6g, %d not finite, "
        "target norm %.6g (%s), %d rows zero as expected",
        len(report.repaired_row_ids),
        report.input_embedding_name,
        report.output_embedding_name,
        list(report.repaired_row_ids),
        report.min_norm_before,
        report.num_non_finite_rows,
        report.target_norm,
        target,
        report.num_zero_rows_kept,
    )
