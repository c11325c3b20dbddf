"""The metrics that a checkpoint was saved with, in its losses.json, and the pointer LOWEST_VAL that follows one."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from automodel.checkpoint.directories import (
    LOWEST_VAL,
    is_checkpoint_incomplete,
    point_to,
    read_checkpoint_pointer,
    sync_directory,
)

__all__ = ["LOSSES", "follow_lowest", "read_losses", "replace_losses", "write_losses"]

logger = logging.getLogger(__name__)

LOSSES = "losses.json"


def write_losses(losses: Mapping[str, float], directory: Path) -> None:
    """Write the metrics into a checkpoint that is not complete yet."""
    _write(losses, directory / LOSSES)


def replace_losses(losses: Mapping[str, float], checkpoint: Path) -> None:
    """Write the metrics of a complete checkpoint anew: whenever the process ends, the old ones are there or these.

    Raises:
        OSError: they could not be written; the old ones are untouched.
    """
    file = checkpoint / LOSSES
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        _write(losses, temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(checkpoint)


def read_losses(checkpoint: Path) -> dict[str, float]:
    """Return the metrics that a checkpoint was saved with; none, with a warning, where they cannot be read."""
    file = checkpoint / LOSSES
    try:
        losses = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(losses, dict) or not all(isinstance(value, int | float) for value in losses.values()):
            raise ValueError("it does not hold a number for each metric")
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, so that the metrics of that checkpoint count as unknown: %s", file, error)
        return {}
    return losses


def follow_lowest(checkpoint: Path, losses: Mapping[str, float], *, key: str) -> None:
    """Let LOWEST_VAL beside a checkpoint point to it, unless its target is known to be as good.

    Args:
        checkpoint: A complete checkpoint.
        losses: Its metrics; without a finite one, the pointer stays.
        key: The metric to compare by; the validation loss stands in for one that is absent.

    Raises:
        OSError: the pointer could not be moved.
    """
    value = _metric(losses, key)
    if not math.isfinite(value):
        return
    best = read_checkpoint_pointer(checkpoint.parent, LOWEST_VAL)
    # The target is incomplete when a save over it was interrupted: its metric is gone then.
    is_rival = best is not None and best != checkpoint and not is_checkpoint_incomplete(best)
    if best is None or not is_rival or not _metric(read_losses(best), key) <= value:
        point_to(checkpoint, LOWEST_VAL)


def _metric(losses: Mapping[str, float], key: str) -> float:
    """The metric of that name, else the validation loss; infinity where there is neither."""
    return losses.get(key, losses.get("val_loss", math.inf))


def _write(losses: Mapping[str, float], file: Path) -> None:
    file.write_text(json.dumps(dict(losses), indent=2) + "\n", encoding="utf-8")
