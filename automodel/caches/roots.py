"""Where cached files live on this machine: one root, one subfolder per kind of file."""

import os
import re
from pathlib import Path

__all__ = ["CacheRootError", "cache_dir", "cache_root"]

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CacheRootError(OSError):
    """The cache root cannot be found out, or a folder in it cannot be created."""


def cache_root() -> Path:
    """Return the absolute path of the cache root, which need not exist.

    The first of these wins, read anew at every call: `$AUTOMODEL_CACHE`, `$XDG_CACHE_HOME/automodel`,
    `~/.cache/automodel`. An empty variable counts as unset, as does an `XDG_CACHE_HOME` that is not absolute (so the
    XDG base directory specification wants it).

    Raises:
        CacheRootError: the path begins with `~` and the home folder is unknown.
    """
    own = os.environ.get("AUTOMODEL_CACHE", "")
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if own:
        root = Path(own)
    elif Path(xdg).is_absolute():
        root = Path(xdg) / "automodel"
    else:
        root = Path("~/.cache/automodel")
    try:
        return root.expanduser().absolute()
    except RuntimeError as error:
        raise CacheRootError(f"cannot resolve the cache root {root} ({error}); set AUTOMODEL_CACHE") from error


def cache_dir(name: str) -> Path:
    """Return the subfolder `name` of the cache root; create it, with mode 0700, where it is missing.

    A subfolder that exists is returned as it is, writable or not: a filled read-only cache can still be read.

    Raises:
        ValueError: `name` is not one plain folder name.
        CacheRootError: the folder is missing and cannot be created, or something else stands in its place.
    """
    if not _FOLDER_NAME.fullmatch(name):
        raise ValueError(f"name must be one plain folder name, got {name!r}")
    folder = cache_root() / name
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheRootError(
            f"cannot create the cache folder {folder} ({reason}); set AUTOMODEL_CACHE to a writable folder"
        ) from error
    return folder
