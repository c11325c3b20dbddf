"""Checkpoint directories and the pointers to them: names, the in-progress marker, LATEST and LOWEST_VAL.

A checkpoint is complete when its directory holds the manifest and no in-progress marker. A save writes the marker first
and removes it last, after everything else has reached the disk; only then does LATEST move.
"""

import logging
import os
import re
from pathlib import Path

__all__ = [
    "LATEST",
    "LOWEST_VAL",
    "MANIFEST",
    "checkpoint_name",
    "clear_checkpoint_incomplete",
    "find_complete_checkpoints",
    "find_latest_checkpoint",
    "is_checkpoint_incomplete",
    "list_automodel_checkpoints",
    "mark_checkpoint_incomplete",
    "point_to",
    "read_checkpoint_pointer",
    "resolve_restore_from_to_checkpoint_dir",
    "sync_directory",
]

logger = logging.getLogger(__name__)

LATEST = "LATEST"
LOWEST_VAL = "LOWEST_VAL"
MANIFEST = "checkpoint.json"

_INCOMPLETE_CHECKPOINT_MARKER = ".incomplete"
_AUTOMODEL_CHECKPOINT_RE = re.compile(r"^epoch_(\d+)_step_(\d+)$")


def checkpoint_name(*, epoch: int, step: int) -> str:
    """The name of a checkpoint's directory; epoch and step count from 0."""
    return f"epoch_{epoch}_step_{step}"


def list_automodel_checkpoints(ckpt_root: Path) -> list[Path]:
    """Return the `epoch_<E>_step_<S>` directories, the oldest first: by step, then by epoch."""
    found = []
    for path in ckpt_root.iterdir() if ckpt_root.is_dir() else ():
        match = _AUTOMODEL_CHECKPOINT_RE.match(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[2]), int(match[1]), path))
    return [path for _, _, path in sorted(found)]


def find_complete_checkpoints(ckpt_root: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first."""
    return [path for path in list_automodel_checkpoints(ckpt_root) if not is_checkpoint_incomplete(path)]


def mark_checkpoint_incomplete(checkpoint_dir: str | Path) -> None:
    """Mark a checkpoint directory as being written, on the disk before this returns."""
    marker = Path(checkpoint_dir) / _INCOMPLETE_CHECKPOINT_MARKER
    marker.touch()
    sync_directory(marker.parent)


def clear_checkpoint_incomplete(checkpoint_dir: str | Path) -> None:
    """Clear the marker of `mark_checkpoint_incomplete`, on the disk before this returns."""
    marker = Path(checkpoint_dir) / _INCOMPLETE_CHECKPOINT_MARKER
    marker.unlink(missing_ok=True)
    sync_directory(marker.parent)


def is_checkpoint_incomplete(checkpoint_dir: str | Path) -> bool:
    """Say whether a directory holds the remains of an interrupted save: the marker is there, or the manifest is not."""
    directory = Path(checkpoint_dir)
    return (directory / _INCOMPLETE_CHECKPOINT_MARKER).exists() or not (directory / MANIFEST).is_file()


def find_latest_checkpoint(checkpoint_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint: LATEST's target, else the highest step; None where there is none."""
    root = Path(checkpoint_dir)
    complete = find_complete_checkpoints(root)
    target = read_checkpoint_pointer(root, LATEST)
    if target is not None and not is_checkpoint_incomplete(target):
        return target
    return complete[-1] if complete else None


def read_checkpoint_pointer(ckpt_root: str | Path, link_name: str) -> Path | None:
    """Return the directory that a pointer names: the symlink, else the text file `<link_name>.txt`; None if neither."""
    root = Path(ckpt_root)
    link, text_file = root / link_name, root / f"{link_name}.txt"
    if link.is_symlink():
        target = root / link.readlink()
    elif text_file.is_file():
        target = root / text_file.read_text(encoding="utf-8", errors="replace").strip()
    else:
        return None
    return target if target.is_dir() and target.resolve() != root.resolve() else None


def point_to(checkpoint: Path, link_name: str) -> None:
    """Let the pointer `link_name` beside a checkpoint name it, in one step: a reader sees the old target or the new.

    A symlink where the filesystem has them, else a text file `<link_name>.txt`; the other form goes away.
    """
    root = checkpoint.parent
    link, text_file = root / link_name, root / f"{link_name}.txt"
    temporary = root / f".{link_name}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(checkpoint.name)
        temporary.replace(link)
        text_file.unlink(missing_ok=True)
    except OSError:
        temporary.unlink(missing_ok=True)
        temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        temporary.replace(text_file)
        # A link that was made before would win over the text.
        link.unlink(missing_ok=True)
    sync_directory(root)


def resolve_restore_from_to_checkpoint_dir(checkpoint_dir: str | Path, restore_from: str) -> Path:
    """Return the checkpoint that `restore_from` names: LATEST, LOWEST_VAL, a name in checkpoint_dir, or a path.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it is another folder; the message lists those that are there.
        RuntimeError: the checkpoint is the remains of an interrupted save.
    """
    root = Path(checkpoint_dir)
    if restore_from == LATEST:
        resolved = find_latest_checkpoint(root)
    elif restore_from == LOWEST_VAL:
        resolved = read_checkpoint_pointer(root, LOWEST_VAL)
    else:
        candidates = [path for path in (root / restore_from, Path(restore_from)) if path.is_dir()]
        resolved = candidates[0] if candidates else None
    if resolved is None:
        raise FileNotFoundError(
            f"checkpoint.restore_from: {restore_from!r} names no checkpoint in {root} ({_complete_ones(root)})"
        )
    if not is_checkpoint_incomplete(resolved):
        return resolved
    if (resolved / _INCOMPLETE_CHECKPOINT_MARKER).exists() or _AUTOMODEL_CHECKPOINT_RE.match(resolved.name):
        raise RuntimeError(f"checkpoint.restore_from: {resolved} was left incomplete by an interrupted save")
    # Where the folder around checkpoints was meant for one of them, these are the ones to choose from.
    folder = next((path for path in (resolved, resolved / "checkpoints") if find_complete_checkpoints(path)), root)
    raise FileNotFoundError(
        f"checkpoint.restore_from: {restore_from!r} is no checkpoint of automodel, but the folder {resolved} "
        f"(in {folder}, {_complete_ones(folder)})"
    )


def _complete_ones(root: Path) -> str:
    there = ", ".join(path.name for path in find_complete_checkpoints(root)) or "none"
    return f"complete ones there: {there}"


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, where the filesystem allows it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        logger.debug("fsync of the directory %s is not supported", directory)
    finally:
        os.close(descriptor)
