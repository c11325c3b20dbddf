"""Safetensors files without transformers: what they hold and where, and the index of a model in several files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

__all__ = ["StoredTensor", "open_safetensors", "read_folder", "read_header", "read_index"]

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        file: The file.
        key: Its name in the file.
        dtype: Its dtype as safetensors spells it, such as "BF16".
        shape: Its dimensions; elements lie in row-major order.
        offset: Where its first element begins in the file, in bytes.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file on the CPU.

    Raises:
        ValueError: it is damaged or not complete.
    """
    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or not complete: {error}") from error
    with handle as opened:
        yield opened


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the place of every tensor in a file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or not complete.
    """
    with file.open("rb") as stream, open_safetensors(file):
        # The library has checked the header against the size of the file.
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    return {
        key: StoredTensor(
            file=file,
            key=key,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=start + entry["data_offsets"][0],
        )
        for key, entry in header.items()
    }


def read_index(file: Path) -> dict[str, str]:
    """Return the name of the file that holds each tensor of a model, by the tensor's name.

    Raises:
        ValueError: the file is no index.
    """
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is no index of weights: {type(error).__name__}: {error}") from error


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the place of every tensor of a model in a local folder: its single file, else the files of its index.

    Raises:
        FileNotFoundError: there is neither, or the index names a file that is not there.
        ValueError: a file is damaged or not complete, or lacks a tensor that the index promises.
    """
    if (folder / SINGLE_FILE).exists():
        return read_header(folder / SINGLE_FILE)
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX}")
    weight_map = read_index(index)
    places: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {index} names it")
        places.update(read_header(file))
    for key, name in weight_map.items():
        if key not in places:
            raise ValueError(f"{folder / name} lacks {key}, which {index} says it holds")
    return places
