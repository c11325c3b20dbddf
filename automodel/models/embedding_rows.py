"""Which rows of an embedding are damaged, and how the norms of its rows are spread.

A row is damaged when its L2 norm is not finite or at most `min_norm`. An exactly zero row is none where it is meant to
be zero: the row of the padding token, and rows that no token of the tokenizer has.
"""

import math
import sys
from dataclasses import dataclass

import torch

from automodel.config.sections import refuse

__all__ = [
    "DEFAULT_MAX_ROWS",
    "DEFAULT_MIN_NORM",
    "MOST_RMS_OVER_MEDIAN",
    "NormGap",
    "NormHistogram",
    "NormSummary",
    "RowClasses",
    "check_limits",
    "classify_rows",
    "count_norms",
    "find_gap",
    "fits_dtype",
    "summarize_norms",
]

DEFAULT_MIN_NORM = 1e-6
DEFAULT_MAX_ROWS = 256

MOST_RMS_OVER_MEDIAN = 3.0
"""The RMS norm of healthy rows over their median norm, above which a few large rows decide it."""

_ROUNDING_ROOM = 2**-20
"""The part of the largest number of a dtype that rows stay below, since scaling them may round up."""

_CLEAR_GAP = 100.0
"""How many times the norms above a gap must exceed those below it."""

_BIN_WIDTHS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0)
"""Widths of a histogram's bins in decades."""


@dataclass(frozen=True, kw_only=True)
class RowClasses:
    """Three masks [rows], of which exactly one holds for each row.

    Args:
        healthy: Finite norms above the threshold.
        damaged: Norms that are not finite or too small.
        unused: Exactly zero rows that are meant to be so.
    """

    healthy: torch.Tensor
    damaged: torch.Tensor
    unused: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class NormSummary:
    """Smallest, middle, root mean square and largest of some norms."""

    min: float
    median: float
    rms: float
    max: float


@dataclass(frozen=True, kw_only=True)
class NormGap:
    """An empty stretch between small norms and all others.

    Args:
        below: The largest norm under the gap; 0 where only exactly zero rows lie there.
        above: The smallest norm over it.
        rows_below: How many rows lie under it.
        min_norm: A threshold inside the gap, far from both ends.
    """

    below: float
    above: float
    rows_below: int
    min_norm: float


@dataclass(frozen=True, kw_only=True)
class NormHistogram:
    """Counts of positive finite norms over their decimal logarithm, zeros and non-finite norms apart.

    Args:
        first_edge: log10 of the lower edge of the first bin.
        bin_width: Width of a bin in decades.
        counts: Rows in each bin; the first and the last bin are never empty.
        zero: Exactly zero rows.
        nonfinite: Rows whose norm is NaN or infinite.
    """

    first_edge: float
    bin_width: float
    counts: tuple[int, ...]
    zero: int
    nonfinite: int


def check_limits(*, min_norm: float, max_rows: int, prefix: str = "") -> None:
    """Check a threshold and a bound on the number of repaired rows.

    Args:
        min_norm: The largest norm of a damaged row.
        max_rows: The most rows to repair.
        prefix: What messages put before the names, such as "embedding_row_repair.".

    Raises:
        ValueError: `min_norm` is no positive finite number, or `max_rows` is no positive integer.
    """
    is_number = isinstance(min_norm, int | float) and not isinstance(min_norm, bool)
    # The largest float and not infinity: an integer beyond it cannot be compared with norms.
    if not (is_number and 0 < min_norm <= sys.float_info.max):
        raise refuse(f"{prefix}min_norm", min_norm, "positive and finite")
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        raise refuse(f"{prefix}max_rows", max_rows, "positive")


def classify_rows(
    squared_norms: torch.Tensor,
    *,
    min_norm: float,
    first_row: int = 0,
    padding_id: int | None = None,
    vocab_size: int | None = None,
) -> RowClasses:
    """Tell damaged rows from healthy ones and from those that are meant to be zero.

    Args:
        squared_norms: Squared L2 norms of whole rows, float64 [rows].
        min_norm: The largest norm of a damaged row.
        first_row: The token id of the first row.
        padding_id: The id of the padding token, whose row may be zero.
        vocab_size: Rows from this id on belong to no token and may be zero; None where every row has a token.
    """
    unused = torch.zeros_like(squared_norms, dtype=torch.bool)
    if vocab_size is not None:
        unused[max(0, vocab_size - first_row) :] = True
    if padding_id is not None and 0 <= padding_id - first_row < len(unused):
        unused[padding_id - first_row] = True
    unused &= squared_norms == 0
    healthy = torch.isfinite(squared_norms) & (squared_norms.sqrt() > min_norm)
    return RowClasses(healthy=healthy, damaged=~(healthy | unused), unused=unused)


def fits_dtype(rows: torch.Tensor, *, norms: torch.Tensor, target_norm: float, dtype: torch.dtype) -> torch.Tensor:
    """Tell which rows stay inside the range of a dtype when they are scaled to a norm.

    Args:
        rows: Rows or a part of their columns, floating point [rows, columns]; there may be no columns.
        norms: The L2 norms of the whole rows, finite and positive, float64 [rows].
        target_norm: The norm that they are scaled to.
        dtype: The dtype that they are rounded to.

    Returns:
        bool [rows].
    """
    # A column of zeros: of no columns there is no largest one.
    largest = torch.nn.functional.pad(rows.float(), (0, 1)).abs().amax(dim=1).double()
    return largest * (target_norm / norms) <= torch.finfo(dtype).max * (1 - _ROUNDING_ROOM)


def summarize_norms(norms: torch.Tensor) -> NormSummary | None:
    """Summarize finite norms [rows]; None where there are none."""
    if norms.numel() == 0:
        return None
    norms = norms.double()
    return NormSummary(
        min=float(norms.min()),
        median=float(norms.median()),
        rms=float(norms.square().mean().sqrt()),
        max=float(norms.max()),
    )


def find_gap(norms: torch.Tensor) -> NormGap | None:
    """Find the gap that separates small norms from the bulk: a factor of at least 100 without a row.

    Of several such gaps under the median the one nearest to it counts. Exactly zero rows lie under every gap, and make
    one of their own where there is no other.

    Args:
        norms: Finite norms [rows].
    """
    ordered = norms.double().sort().values
    zeros = int((ordered == 0).sum())
    positive = ordered[zeros:]
    lower = positive[: len(positive) // 2 + 1]
    steps = torch.nonzero(lower[1:] / lower[:-1] >= _CLEAR_GAP).flatten()
    if len(steps):
        place = int(steps[-1])
        below, above = float(lower[place]), float(lower[place + 1])
        return NormGap(
            below=below, above=above, rows_below=zeros + place + 1, min_norm=_threshold_between(below, above)
        )
    if zeros and len(positive):
        above = float(positive[0])
        return NormGap(below=0.0, above=above, rows_below=zeros, min_norm=_threshold_between(0.0, above))
    return None


def count_norms(norms: torch.Tensor, *, max_bins: int = 24) -> NormHistogram:
    """Count norms [rows] in at most `max_bins` bins of equal width on a logarithmic axis."""
    finite = torch.isfinite(norms)
    positive = norms[finite & (norms > 0)].double().log10()
    zero, nonfinite = int((norms == 0).sum()), int((~finite).sum())
    if positive.numel() == 0:
        return NormHistogram(first_edge=0.0, bin_width=1.0, counts=(), zero=zero, nonfinite=nonfinite)
    low, high = float(positive.min()), float(positive.max())
    for bin_width in _BIN_WIDTHS:
        first = math.floor(low / bin_width)
        if math.floor(high / bin_width) - first < max_bins:
            break
    bins = (positive / bin_width).floor().long() - first
    counts = tuple(torch.bincount(bins).tolist())
    return NormHistogram(
        first_edge=first * bin_width, bin_width=bin_width, counts=counts, zero=zero, nonfinite=nonfinite
    )


def _threshold_between(below: float, above: float) -> float:
    """The default threshold where it lies well inside the gap; else the middle of its logarithm, to one digit."""
    if below * 10 <= DEFAULT_MIN_NORM <= above / 10:
        return DEFAULT_MIN_NORM
    middle = math.sqrt(below) * math.sqrt(above) if below > 0 else above / 100
    return float(f"{middle:.0e}")
