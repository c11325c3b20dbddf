"""Which checkpoints may go: only complete, canonical ones that are old and that nothing points at."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from automodel.checkpoint.directories import (
    LATEST,
    LOWEST_VAL,
    find_complete_checkpoints,
    is_checkpoint_incomplete,
    list_automodel_checkpoints,
    mark_checkpoint_incomplete,
    read_checkpoint_pointer,
)

__all__ = ["prune_checkpoints"]

logger = logging.getLogger(__name__)


def prune_checkpoints(ckpt_root: Path, *, keep: int, is_ours: Callable[[Path], bool] = lambda _: True) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints, sparing the targets of LATEST and LOWEST_VAL.

    Remains of interrupted saves that are older than the newest complete checkpoint go too. A directory that cannot be
    removed is left, marked as incomplete, with a warning.

    Args:
        ckpt_root: Folder of the checkpoints.
        keep: How many to keep; positive.
        is_ours: Asked about complete checkpoints: whether one belongs to the run. Others are neither counted nor
            removed.

    Returns:
        The directories that were removed.
    """
    complete = [path for path in find_complete_checkpoints(ckpt_root) if is_ours(path)]
    if not complete:
        return []
    pointers = (read_checkpoint_pointer(ckpt_root, name) for name in (LATEST, LOWEST_VAL))
    spared = {path.resolve() for path in (*complete[-keep:], *pointers) if path is not None}
    everything = list_automodel_checkpoints(ckpt_root)
    removed = []
    for path in everything[: everything.index(complete[-1])]:
        if path.resolve() in spared or not (path in complete or is_checkpoint_incomplete(path)):
            continue
        try:
            # Marked first: a removal that is killed midway leaves no directory that looks complete.
            mark_checkpoint_incomplete(path)
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)
        else:
            removed.append(path)
    if removed:
        logger.info("removed %d old checkpoint(s): %s", len(removed), ", ".join(path.name for path in removed))
    return removed
