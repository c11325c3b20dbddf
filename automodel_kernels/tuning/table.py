"""The tuned winners that ship: data in the folder `autotune_cache`, beside the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_tables"]


def shipped_tables() -> Path:
    """The folder with one sub-folder per device, which holds one JSON file per kernel.

    It lies beside the package `automodel_kernels`, both in a checkout and in an installed wheel.

    Raises:
        FileNotFoundError: the folder is not there; names the path.
    """
    folder = Path(__file__).resolve().parents[2] / "autotune_cache"
    if not folder.is_dir():
        raise FileNotFoundError(f"the shipped tuning tables are missing: {folder} is not a folder")
    return folder
