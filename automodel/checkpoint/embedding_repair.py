"""A copy of a model on the disk in which the damaged rows of the input embedding are repaired.

Only the file that holds the input embedding is written anew, equal to the old one but for the repaired rows. Other
weights are hard links to the originals where the filesystem allows it. The copy is made under a temporary name beside
its final one and renamed when everything is on the disk.
"""

import contextlib
import dataclasses
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from automodel.caches.folder_lock import FolderLock
from automodel.checkpoint.directories import sync_directory
from automodel.checkpoint.embedding_diagnosis import EmbeddingDiagnosis, read_output_norms
from automodel.checkpoint.embedding_files import EmbeddingFiles, StoredMatrix, printable, read_rows
from automodel.models.embedding_rows import (
    DEFAULT_MAX_ROWS,
    MOST_RMS_OVER_MEDIAN,
    check_limits,
    classify_rows,
    fits_dtype,
)
from automodel_kernels.row_norm import row_squared_norms
from automodel_kernels.row_repair import DTYPES, repair_rows_

__all__ = ["DiskRepairReport", "RepairRefusedError", "check_output_folder", "find_refusal", "repair_on_disk"]

logger = logging.getLogger(__name__)

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"})
_COPY_BYTES = 8 << 20


class RepairRefusedError(ValueError):
    """The damaged rows cannot be repaired, or not safely; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class DiskRepairReport:
    """Summary of a repair on the disk.

    Args:
        folder: The repaired copy.
        repaired_row_ids: Token ids of the rows that were replaced.
        target_norm: The norm that they have now; None where no row was damaged.
        written_file: The file that was written anew; None where no row was damaged.
        linked: Number of files that are hard links to the originals.
        copied: Number of files that were copied.
    """

    folder: Path
    repaired_row_ids: tuple[int, ...]
    target_norm: float | None
    written_file: Path | None
    linked: int
    copied: int


def check_output_folder(embeddings: EmbeddingFiles, folder: Path) -> None:
    """Check where a repaired copy shall go.

    Raises:
        ValueError: the folder is the source, inside it or around it, or it exists and is not empty.
    """
    target, source = folder.resolve(), embeddings.path.resolve()
    if embeddings.folder is not None and (target.is_relative_to(source) or source.is_relative_to(target)):
        raise ValueError(f"--out {folder} must lie outside the source folder {embeddings.path}, which stays as it is")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"--out {folder} exists already")


def repair_on_disk(
    diagnosis: EmbeddingDiagnosis,
    folder: Path,
    *,
    max_rows: int = DEFAULT_MAX_ROWS,
    target: Literal["rms", "median"] = "rms",
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> DiskRepairReport:
    """Write a copy of a model with its damaged rows replaced; without damaged rows, a plain copy.

    A damaged row becomes the output embedding's row of the same token, scaled to the norm that healthy input rows
    have; it is computed in fp32 and rounded once.

    Args:
        diagnosis: The model and its damaged rows.
        folder: The copy; it must not exist, or be empty.
        max_rows: Refuse to replace more rows than this.
        target: Which norm of the healthy rows the new ones get: their root mean square or their median.
        on_total: Called once, when all links are made, with the number of bytes that are left to copy.
        on_bytes: Called with the number of bytes after each piece that was copied.

    Raises:
        ValueError: `max_rows` is not positive, or `folder` cannot be used.
        RepairRefusedError: the rows cannot be repaired; the message says why and names rows.
        UnreadableModelError: a file cannot be read.
        FolderBusyError: another process is making this copy.
        OSError: the copy cannot be written.
        RuntimeError: the rows that were written are not healthy.
    """
    check_limits(min_norm=diagnosis.min_norm, max_rows=max_rows)
    check_output_folder(diagnosis.embeddings, folder)
    target_norm = _plan(diagnosis, max_rows=max_rows, target=target) if diagnosis.damaged_ids else None
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    lock = FolderLock(partial)
    try:
        # A killed run may have left something here.
        _empty(partial)
        report = _fill(diagnosis, partial, target_norm=target_norm, on_total=on_total, on_bytes=on_bytes)
        sync_directory(partial)
        partial.rename(folder)
        sync_directory(folder.parent)
    except BaseException:
        _empty(partial)
        with contextlib.suppress(OSError):
            partial.rmdir()
        raise
    finally:
        lock.close()
    written = None if report.written_file is None else folder / report.written_file.relative_to(partial)
    return dataclasses.replace(report, folder=folder, written_file=written)


def find_refusal(diagnosis: EmbeddingDiagnosis, *, max_rows: int) -> str | None:
    """Say why damaged rows cannot be repaired; None where all is well but, perhaps, their output rows, not yet read."""
    found = diagnosis.embeddings
    matrix, output, count = found.input, found.output, len(diagnosis.damaged_ids)
    what = _damage_text(diagnosis)
    if found.tied:
        return f"{what}, and it is tied to the output embedding: the rows cannot be repaired from themselves"
    if output is None:
        return f"{what}, and {found.path} holds no output embedding to repair them from"
    if output.shape != matrix.shape:
        return f"{what}, but the output embedding {output.key} has shape {list(output.shape)}, not {list(matrix.shape)}"
    for each in (matrix, output):
        if each.dtype not in DTYPES:
            return f"{what}, but {each.key} is {each.dtype}: rows can be repaired in {', '.join(map(str, DTYPES))} only"
    if diagnosis.healthy is None:
        return f"{what}: it has no healthy rows, from which the new norm would be taken"
    if count > max_rows:
        return f"{what}, more than max_rows={max_rows}: the checkpoint may be damaged broadly"
    return None


def _damage_text(diagnosis: EmbeddingDiagnosis) -> str:
    return (
        f"{len(diagnosis.damaged_ids)} rows of {diagnosis.embeddings.input.key} are damaged "
        f"(min_norm {diagnosis.min_norm:g})"
    )


def _plan(diagnosis: EmbeddingDiagnosis, *, max_rows: int, target: Literal["rms", "median"]) -> float:
    """Check that the damaged rows can be repaired; return the norm that they shall have."""
    if refusal := find_refusal(diagnosis, max_rows=max_rows):
        raise RepairRefusedError(refusal)
    ids, output, healthy = diagnosis.damaged_ids, diagnosis.embeddings.output, diagnosis.healthy
    assert output is not None
    assert healthy is not None
    norms = read_output_norms(diagnosis)
    bad = [row_id for row_id in ids if not (math.isfinite(norms[row_id]) and norms[row_id] > diagnosis.min_norm)]
    if bad:
        raise RepairRefusedError(
            f"{_damage_text(diagnosis)}, and the rows of the output embedding {output.key} are damaged too: ids={bad}"
        )
    if target == "rms" and healthy.rms > MOST_RMS_OVER_MEDIAN * healthy.median:
        logger.warning(
            "outliers distort the norm of the repaired rows: the healthy rows' root mean square is %.4g, their median "
            "%.4g; the target median takes the latter",
            healthy.rms,
            healthy.median,
        )
    return healthy.rms if target == "rms" else healthy.median


def _fill(
    diagnosis: EmbeddingDiagnosis,
    folder: Path,
    *,
    target_norm: float | None,
    on_total: Callable[[int], None] | None,
    on_bytes: Callable[[int], None] | None,
) -> DiskRepairReport:
    """Put everything into an empty folder: first the links, after which it is known what must be copied."""
    found = diagnosis.embeddings
    source = found.path if found.folder is not None else found.path.parent
    files = sorted(_walk(source)) if found.folder is not None else [found.path]
    rewritten = found.input.file if target_norm is not None else None
    if rewritten is not None and rewritten not in files:
        raise RepairRefusedError(f"{rewritten}, which holds {found.input.key}, does not lie in {source}")
    copies: list[Path] = []
    for file in files:
        new = folder / file.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        if file == rewritten or file.suffix not in _WEIGHTS or not _link(file, new):
            copies.append(file)
        if rewritten is not None and file.suffix in _WEIGHTS and file not in found.files:
            name = printable(file.name)
            logger.warning("%s is not one of the model's safetensors files: it is kept, but not repaired", name)
    if on_total is not None:
        on_total(sum(file.stat().st_size for file in copies))
    for file in copies:
        new = folder / file.relative_to(source)
        _copy(file, new, on_bytes=on_bytes)
        if file == rewritten:
            _write_rows(diagnosis, dataclasses.replace(found.input, file=new), target_norm=target_norm or 0.0)
        # Last, since the original may be read-only; never of a link, which is the original and may be another user's.
        new.chmod(file.stat().st_mode & 0o777)
    return DiskRepairReport(
        folder=folder,
        repaired_row_ids=tuple(diagnosis.damaged_ids),
        target_norm=target_norm,
        written_file=None if rewritten is None else folder / rewritten.relative_to(source),
        linked=len(files) - len(copies),
        copied=len(copies) - (rewritten is not None),
    )


def _write_rows(diagnosis: EmbeddingDiagnosis, matrix: StoredMatrix, *, target_norm: float) -> None:
    """Overwrite the damaged rows in a copy of the file, batch by batch, and read them again."""
    output = diagnosis.embeddings.output
    assert output is not None
    with matrix.file.open("r+b") as stream:
        for ids, source in read_rows(output, diagnosis.damaged_ids):
            rows = torch.zeros(len(ids), matrix.shape[1], dtype=matrix.dtype)
            bad = _overflowing_of(ids, source, target_norm, matrix.dtype)
            if not bad:
                repair_rows_(rows, source, torch.arange(len(ids)), target_norm)
                bad = _damaged_of(ids, rows, diagnosis.min_norm)
            if bad:
                raise RepairRefusedError(
                    f"rows of norm {target_norm:.6g} would overflow or vanish in {matrix.dtype}, the dtype of "
                    f"{matrix.key}: ids={bad}"
                )
            for row_id, row in zip(ids, rows.view(torch.uint8).numpy(), strict=True):
                stream.seek(matrix.offset + row_id * matrix.row_bytes)
                stream.write(row.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    for ids, rows in read_rows(matrix, diagnosis.damaged_ids):
        if bad := _damaged_of(ids, rows, diagnosis.min_norm):
            raise RuntimeError(f"the rows that were written to {matrix.key} are damaged: ids={bad}")


def _overflowing_of(ids: list[int], source: torch.Tensor, target_norm: float, dtype: torch.dtype) -> list[int]:
    """The ids of source rows that have a value outside the range of a dtype once they are scaled to a norm."""
    norms = row_squared_norms(source).sqrt()
    fits = fits_dtype(source, norms=norms, target_norm=target_norm, dtype=dtype)
    return [row_id for row_id, is_inside in zip(ids, fits.tolist(), strict=True) if not is_inside]


def _damaged_of(ids: list[int], rows: torch.Tensor, min_norm: float) -> list[int]:
    """The ids of damaged rows among some that were just made."""
    damaged = classify_rows(row_squared_norms(rows), min_norm=min_norm).damaged
    return [row_id for row_id, is_damaged in zip(ids, damaged.tolist(), strict=True) if is_damaged]


def _walk(folder: Path) -> Iterator[Path]:
    """The regular files of a model folder and its sub-folders; links count as what they name.

    Hidden sub-folders (.git, .cache) belong to tools and not to the model.
    """
    for path in folder.iterdir():
        if path.is_dir():
            if path.name.startswith("."):
                continue
            if path.is_symlink():
                logger.warning("%s is a link to a folder: it is left out of the copy", printable(str(path)))
                continue
            yield from _walk(path)
        elif path.is_file():
            yield path
        else:
            logger.warning("%s is no regular file: it is left out of the copy", printable(str(path)))


def _link(source: Path, new: Path) -> bool:
    """Make a hard link; says whether the filesystem allows it."""
    try:
        new.hardlink_to(source.resolve())
    except OSError as error:
        logger.debug("%s is copied, not linked: %s", printable(str(source)), error)
        return False
    return True


def _copy(source: Path, new: Path, *, on_bytes: Callable[[int], None] | None) -> None:
    """Copy a file's bytes onto the disk."""
    with source.open("rb") as reader, new.open("xb") as writer:
        while piece := reader.read(_COPY_BYTES):
            writer.write(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        writer.flush()
        os.fsync(writer.fileno())


def _empty(folder: Path) -> None:
    """Remove what is in a folder, if it is there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
