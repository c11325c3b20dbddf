"""What the row norms of a stored input embedding say about it: threshold, damaged rows, what could replace them."""

from dataclasses import dataclass
from typing import Literal

import torch

from automodel.checkpoint.embedding_files import EmbeddingFiles, read_rows
from automodel.models.embedding_rows import (
    DEFAULT_MIN_NORM,
    NormGap,
    NormSummary,
    RowClasses,
    check_limits,
    classify_rows,
    find_gap,
    summarize_norms,
)
from automodel_kernels.row_norm import row_squared_norms

__all__ = ["EmbeddingDiagnosis", "diagnose", "read_output_norms"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingDiagnosis:
    """The state of an input embedding.

    Args:
        embeddings: Where it is.
        norms: L2 norm of each row, float64 [vocab].
        classes: Which rows are healthy, damaged or meant to be zero.
        min_norm: The largest norm of a damaged row.
        min_norm_from: Where the threshold comes from: it was given, it lies in the gap, or it is the default.
        gap: What separates small norms from the bulk, if anything does.
        healthy: Summary of the healthy rows; None where there are none.
    """

    embeddings: EmbeddingFiles
    norms: torch.Tensor
    classes: RowClasses
    min_norm: float
    min_norm_from: Literal["given", "gap", "default"]
    gap: NormGap | None
    healthy: NormSummary | None

    @property
    def damaged_ids(self) -> list[int]:
        """Token ids of the damaged rows, ascending."""
        return _ids(self.classes.damaged)

    @property
    def unused_ids(self) -> list[int]:
        """Token ids of the rows that are meant to be zero, ascending."""
        return _ids(self.classes.unused)


def diagnose(
    embeddings: EmbeddingFiles,
    squared_norms: torch.Tensor,
    *,
    min_norm: float | None = None,
    vocab_size: int | None = None,
) -> EmbeddingDiagnosis:
    """Judge the rows of an input embedding by their norms.

    Args:
        embeddings: Where the embedding is.
        squared_norms: What `read_squared_norms` returned for it, float64 [vocab].
        min_norm: The largest norm of a damaged row. None: the threshold inside the gap where there is a clear one,
            else the default of the recipe section embedding_row_repair.
        vocab_size: Exactly zero rows from this id on belong to no token and are not damaged.

    Raises:
        ValueError: `min_norm` is not positive and finite.
    """
    if min_norm is not None:
        check_limits(min_norm=min_norm, max_rows=1)
    padding_id, norms = embeddings.padding_id, squared_norms.sqrt()
    unused = classify_rows(squared_norms, min_norm=0.0, padding_id=padding_id, vocab_size=vocab_size).unused
    gap = find_gap(norms[torch.isfinite(norms) & ~unused])
    origin: Literal["given", "gap", "default"] = "given" if min_norm is not None else "gap" if gap else "default"
    threshold = min_norm if min_norm is not None else gap.min_norm if gap else DEFAULT_MIN_NORM
    classes = classify_rows(squared_norms, min_norm=threshold, padding_id=padding_id, vocab_size=vocab_size)
    return EmbeddingDiagnosis(
        embeddings=embeddings,
        norms=norms,
        classes=classes,
        min_norm=threshold,
        min_norm_from=origin,
        gap=gap,
        healthy=summarize_norms(norms[classes.healthy]),
    )


def read_output_norms(diagnosis: EmbeddingDiagnosis) -> dict[int, float]:
    """Read the norms of the output embedding's rows that would replace the damaged ones.

    Returns:
        The norm by token id; no entry where a separate output embedding, or that row of it, does not exist.

    Raises:
        UnreadableModelError: the file cannot be read.
    """
    output = diagnosis.embeddings.output
    if output is None or diagnosis.embeddings.tied:
        return {}
    wanted = [row_id for row_id in diagnosis.damaged_ids if row_id < output.shape[0]]
    norms: dict[int, float] = {}
    for ids, rows in read_rows(output, wanted):
        norms.update(zip(ids, row_squared_norms(rows).sqrt().tolist(), strict=True))
    return norms


def _ids(mask: torch.Tensor) -> list[int]:
    ids: list[int] = torch.nonzero(mask).flatten().tolist()
    return ids
