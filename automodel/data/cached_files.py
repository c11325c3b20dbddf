"""Files in the cache that several processes may read and write at once, and that may be damaged or unwritable.

A cached file is complete or absent: it is written under a temporary name in its own folder and moved into place.
Its name is a digest of everything that determines its content, so that writers that race write the same bytes.
No fault of the cache stops the caller; it is told in one warning.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from automodel.caches.roots import CacheRootError, cache_dir

__all__ = ["DamagedFileError", "cached_path", "load_cached", "publish"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DamagedFileError(ValueError):
    """A cached file does not hold what was written to it."""


def cached_path(kind: str, name: str) -> Path | None:
    """Return the path of a file in the cache folder `kind`, or None, with a warning, if the folder cannot be had."""
    try:
        return cache_dir(kind) / name
    except CacheRootError as error:
        logger.warning("%s; going on without this cache", error)
        return None


def load_cached(path: Path, load: Callable[[Path], T]) -> T | None:
    """Return `load(path)`, or None if there is no such file or it is of no use (which a warning tells).

    `load` raises OSError or DamagedFileError for a file that it cannot use.
    """
    try:
        return load(path)
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError) as error:
        logger.warning("the cached file %s is unusable (%s); building it again", path, error)
        return None


def publish(path: Path, content: bytes) -> bool:
    """Put `content` at `path`, whole or not at all, and say whether it is there; a failure is a warning.

    A file that is already there is replaced; processes that have the old one open or mapped keep it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        logger.warning("cannot keep %s in the cache (%s); the next run builds it again", path, error)
        return False
    return True
