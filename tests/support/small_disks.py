"""Filesystems that fill up soon."""

import subprocess
from contextlib import contextmanager

import pytest

__all__ = ["mounted_tmpfs"]


@contextmanager
def mounted_tmpfs(folder, *, size):
    """A tmpfs of `size`, such as "2m", at a new folder; skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"there is no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
