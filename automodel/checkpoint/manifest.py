"""The manifest of a checkpoint: the file that says what the directory is, of which format, and of which model."""

import json
from pathlib import Path
from typing import Any

from automodel.checkpoint.directories import MANIFEST

__all__ = ["FORMAT_VERSION", "make_manifest", "read_manifest"]

FORMAT_VERSION = 1

_FORMAT = "automodel-checkpoint"
_KEYS: dict[str, type] = {"step": int, "epoch": int, "ranks": int, "model_class": str, "model_signature": str}
# Before there were several ranks, the manifest did not say how many.
_DEFAULTS = {"ranks": 1}


def make_manifest(
    *, step: int, epoch: int, ranks: int, model_class: str, model_signature: str, torch_version: str
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, ready for JSON."""
    return {
        "format": _FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "epoch": epoch,
        "ranks": ranks,
        "model_class": model_class,
        "model_signature": model_signature,
        "torch": torch_version,
    }


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, with the keys of `make_manifest` and their types.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged or incomplete, or of a newer format; the message names the file.
    """
    file = checkpoint / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("version"), int):
        raise ValueError(f"{file} is damaged: it does not describe a checkpoint of automodel with a format version")
    if found["version"] > FORMAT_VERSION:
        raise ValueError(f"{checkpoint} has format version {found['version']}, newer than {FORMAT_VERSION}")
    manifest = {**_DEFAULTS, **found}
    for key, kind in _KEYS.items():
        if key not in manifest:
            raise ValueError(f"{file} is damaged: it has no {key}")
        if not isinstance(manifest[key], kind):
            raise ValueError(f"{file} is damaged: {key} must be of type {kind.__name__}, got {manifest[key]!r}")
    return manifest
