"""The input and the output embedding in a model's safetensors files, read through a memory map slice by slice.

Tensors are found by the names that models commonly give them. Slices are views of mapped files, so that reading takes
no memory of its own, whatever the size of the matrix.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from automodel.models.safetensors_files import StoredTensor, open_safetensors, read_folder, read_header
from automodel.models.tied_weights import INPUT_EMBEDDING_NAMES, OUTPUT_EMBEDDING_NAMES
from automodel_kernels.row_norm import row_squared_norms

__all__ = [
    "EmbeddingFiles",
    "StoredMatrix",
    "UnreadableModelError",
    "find_embeddings",
    "printable",
    "read_rows",
    "read_squared_norms",
]

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SLICE_BYTES = 16 << 20
_OTHER_MODALITY = re.compile(r"vision|visual|image|audio|speech")
_SCALE_SUFFIXES = ("_scale", "_scale_inv", ".absmax", "_absmax")


class UnreadableModelError(ValueError):
    """A model's files are missing, damaged, or hold no embedding that can be examined."""


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """A matrix in a safetensors file.

    Args:
        key: Its name in the file.
        file: The file.
        dtype: A floating-point dtype.
        shape: Rows and columns; the rows lie one after the other.
        offset: Where the first row begins in the file, in bytes.
    """

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, int]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[1] * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class EmbeddingFiles:
    """The embeddings of a model on the disk.

    Args:
        path: The folder or the single file that was asked for.
        files: Every file of the model's weights.
        input: The input embedding [vocab, hidden].
        output: The output embedding [vocab, hidden]; None where the files hold none.
        tied: Whether a model built from these files uses one matrix for both.
        padding_id: The row that config.json's pad_token_id names; None where it names none, or no row of the input
            embedding, such as -1. (A model that is trained says it by its module's padding_idx.)
    """

    path: Path
    files: tuple[Path, ...]
    input: StoredMatrix
    output: StoredMatrix | None
    tied: bool
    padding_id: int | None

    @property
    def folder(self) -> Path | None:
        """The model folder; None for a single file."""
        return self.path if self.path.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What config.json says, None where it says nothing; the id may be no row."""

    tied: bool | None
    padding_id: int | None


def printable(text: str) -> str:
    """Escape line breaks and control characters: names in files may hold what would upset a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def find_embeddings(path: Path) -> EmbeddingFiles:
    """Find the embeddings in a model folder, or in one .safetensors file.

    A folder without an output embedding is tied unless config.json says otherwise; a single file, which may be one of
    several, only where config.json says so.

    Raises:
        UnreadableModelError: a file is missing or damaged, there is no input embedding, or it is no floating-point
            matrix; the file or the tensor is named.
    """
    with _naming_what_is_unreadable():
        if not path.exists():
            raise UnreadableModelError(f"{path} does not exist")
        places = read_folder(path) if path.is_dir() else read_header(path)
        settings = _read_settings((path if path.is_dir() else path.parent) / "config.json")
        input_place = _choose(places, INPUT_EMBEDDING_NAMES, path)
        output_place = _choose(places, OUTPUT_EMBEDDING_NAMES, path, like=input_place)
        if input_place is None and settings.tied:
            # Of tied embeddings a file may hold either.
            input_place, output_place = output_place, None
        if input_place is None:
            raise UnreadableModelError(
                f"{path} holds no input embedding: no name of its {len(places)} tensors ends in one of "
                f"{', '.join(INPUT_EMBEDDING_NAMES)} and .weight"
            )
        matrix = _matrix(input_place, places)
        output = None if output_place is None else _matrix(output_place, places)
        if output is None:
            tied = settings.tied is True or (settings.tied is None and path.is_dir())
        else:
            tied = settings.tied is not False and _is_same(matrix, output)
    return EmbeddingFiles(
        path=path,
        files=tuple(sorted({place.file for place in places.values()})),
        input=matrix,
        output=output,
        tied=tied,
        padding_id=settings.padding_id if settings.padding_id in range(matrix.shape[0]) else None,
    )


def read_squared_norms(matrix: StoredMatrix, *, on_bytes: Callable[[int], None] | None = None) -> torch.Tensor:
    """Read a matrix once and return the squared L2 norm of each row, float64 [rows].

    Args:
        matrix: The matrix.
        on_bytes: Called after each slice with the number of its bytes.

    Raises:
        UnreadableModelError: the file cannot be read.
    """
    norms = torch.empty(matrix.shape[0], dtype=torch.float64)
    for start, rows in _slices(matrix):
        norms[start : start + len(rows)] = row_squared_norms(rows)
        if on_bytes is not None:
            on_bytes(len(rows) * matrix.row_bytes)
    return norms


def read_rows(matrix: StoredMatrix, row_ids: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield some rows in batches of bounded size: their ids, and the rows [batch, columns] in the matrix's dtype.

    Raises:
        UnreadableModelError: the file cannot be read.
    """
    at_once = max(1, _SLICE_BYTES // max(1, matrix.row_bytes))
    with _naming_what_is_unreadable(), open_safetensors(matrix.file) as handle:
        stored = handle.get_slice(matrix.key)
        for start in range(0, len(row_ids), at_once):
            ids = list(row_ids[start : start + at_once])
            yield ids, torch.cat([stored[row_id : row_id + 1] for row_id in ids])


def _slices(matrix: StoredMatrix) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the matrix as views of consecutive rows, each with the number of its first row."""
    at_once = max(1, _SLICE_BYTES // max(1, matrix.row_bytes))
    with _naming_what_is_unreadable(), open_safetensors(matrix.file) as handle, matrix.file.open("rb") as file:
        stored = handle.get_slice(matrix.key)
        for start in range(0, matrix.shape[0], at_once):
            ahead = matrix.offset + (start + at_once) * matrix.row_bytes
            _read_ahead(file.fileno(), ahead, at_once * matrix.row_bytes)
            yield start, stored[start : start + at_once]


def _read_ahead(descriptor: int, offset: int, length: int) -> None:
    """Ask the system to load a stretch of a file: page faults alone read a cold disk in small pieces."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def _is_same(first: StoredMatrix, second: StoredMatrix) -> bool:
    """Whether two matrices are the same bits."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    pairs = zip(_slices(first), _slices(second), strict=True)
    return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for (_, one), (_, two) in pairs)


def _read_settings(file: Path) -> _Settings:
    """Read config.json: what it says itself, and what it says about the text model inside.

    Raises:
        UnreadableModelError: it is no JSON object; the file is named.
    """
    if not file.is_file():
        return _Settings(tied=None, padding_id=None)
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableModelError(f"{file} is no JSON: {error}") from error
    if not isinstance(whole, dict):
        raise UnreadableModelError(f"{file} is no configuration of a model")
    text = whole.get("text_config")
    parts = [text, whole] if isinstance(text, dict) else [whole]
    said = [part["tie_word_embeddings"] for part in parts if isinstance(part.get("tie_word_embeddings"), bool)]
    # The text model's word counts, also where it is that there is no padding.
    padding = next((part["pad_token_id"] for part in parts if "pad_token_id" in part), None)
    return _Settings(tied=any(said) if said else None, padding_id=padding if type(padding) is int else None)


def _choose(
    places: Mapping[str, StoredTensor], names: Sequence[str], path: Path, *, like: StoredTensor | None = None
) -> StoredTensor | None:
    """Return the place of an embedding, never one inside a numbered block or of another modality.

    Best is one with the shape of `like`, then a matrix, then the most usual name, then the shortest path.

    Raises:
        UnreadableModelError: two are equally good.
    """
    found: dict[tuple[bool, bool, int, int], list[StoredTensor]] = {}
    for key, place in places.items():
        *parents, last = key.removesuffix(".weight").split(".")
        if not key.endswith(".weight") or last not in names:
            continue
        if not any(part.isdigit() or _OTHER_MODALITY.search(part) for part in parents):
            differs = like is not None and place.shape != like.shape
            rank = (differs, len(place.shape) != 2, names.index(last), len(parents))
            found.setdefault(rank, []).append(place)
    best = found[min(found)] if found else []
    if len(best) > 1:
        keys = ", ".join(sorted(place.key for place in best))
        raise UnreadableModelError(f"{path}: which one is the embedding is not clear from the names: {keys}")
    return best[0] if best else None


def _matrix(place: StoredTensor, keys: Iterable[str]) -> StoredMatrix:
    """Return the place of a matrix of numbers.

    Raises:
        UnreadableModelError: it is no floating-point matrix, or quantised with scales of its own.
    """
    if len(place.shape) != 2 or 0 in place.shape:
        raise UnreadableModelError(
            f"{place.file}: {place.key} must be a matrix [vocab, hidden], its shape is {list(place.shape)}"
        )
    dtype = _DTYPES.get(place.dtype)
    scales = sorted({f"{place.key}{suffix}" for suffix in _SCALE_SUFFIXES}.intersection(keys))
    if dtype is None or scales:
        why = f"scaled by {scales[0]}" if scales else f"of dtype {place.dtype}"
        raise UnreadableModelError(f"{place.file}: {place.key} is {why}; only plain {', '.join(_DTYPES)} can be read")
    rows, columns = place.shape
    return StoredMatrix(key=place.key, file=place.file, dtype=dtype, shape=(rows, columns), offset=place.offset)


@contextlib.contextmanager
def _naming_what_is_unreadable() -> Iterator[None]:
    """Turn the errors of files that cannot be read into one class."""
    try:
        yield
    except UnreadableModelError:
        raise
    except (OSError, ValueError, SafetensorError, KeyError) as error:
        raise UnreadableModelError(str(error)) from error
