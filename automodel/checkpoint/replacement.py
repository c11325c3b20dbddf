"""A save over a complete checkpoint: the new one grows beside the old one, and takes its place when it is whole.

For a checkpoint `X` there are two hidden neighbours, so that nothing lists or resumes them:

- `.X.new`: the replacement, marked as incomplete until all of it is on the disk;
- `.X.old`: the replaced one, between the moment it makes room and its removal.

A process may be killed between any two operations; `settle_replacements` finishes or undoes what it left.
"""

import logging
import re
import shutil
from pathlib import Path

from automodel.checkpoint.directories import is_checkpoint_incomplete, sync_directory

__all__ = ["drop_replaced", "put_in_place", "replacement_of", "settle_replacements"]

logger = logging.getLogger(__name__)

_NEIGHBOUR = re.compile(r"^\.(epoch_\d+_step_\d+)\.(new|old)$")


def replacement_of(checkpoint: Path) -> Path:
    """The directory in which the replacement of a checkpoint is written."""
    return checkpoint.with_name(f".{checkpoint.name}.new")


def put_in_place(checkpoint: Path) -> None:
    """Let the complete replacement of a checkpoint take its place; the old one waits for `drop_replaced`.

    Raises:
        OSError: a directory could not be renamed.
    """
    if checkpoint.exists():
        replaced = _replaced(checkpoint)
        if replaced.exists():
            shutil.rmtree(replaced)
        checkpoint.rename(replaced)
    replacement_of(checkpoint).rename(checkpoint)
    sync_directory(checkpoint.parent)


def drop_replaced(checkpoint: Path) -> None:
    """Remove what a replacement took the place of, if there is any; what cannot be removed is left with a warning."""
    replaced = _replaced(checkpoint)
    if not replaced.exists():
        return
    try:
        shutil.rmtree(replaced)
    except OSError as error:
        logger.warning("the replaced checkpoint %s could not be removed: %s", replaced, error)


def settle_replacements(ckpt_root: Path) -> None:
    """Finish the replacements that are complete, and remove what else is left of interrupted ones.

    Raises:
        OSError: a directory could not be renamed or removed.
    """
    matches = [_NEIGHBOUR.match(path.name) for path in ckpt_root.iterdir()] if ckpt_root.is_dir() else []
    for name in sorted({match[1] for match in matches if match is not None}):
        checkpoint = ckpt_root / name
        replacement, replaced = replacement_of(checkpoint), _replaced(checkpoint)
        if replacement.is_dir() and not is_checkpoint_incomplete(replacement):
            logger.info("%s is replaced by the save that was interrupted when it was complete", checkpoint)
            put_in_place(checkpoint)
        elif replacement.is_dir():
            shutil.rmtree(replacement)
        if replaced.is_dir() and not checkpoint.exists():
            replaced.rename(checkpoint)
        drop_replaced(checkpoint)


def _replaced(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.old")
