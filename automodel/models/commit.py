"""Which commit of a Hub repository a load reads.

A branch name such as "main" is a file in the shared cache that any other job may rewrite between two reads. A load
therefore asks for the commit once, with the Hub's ordinary freshness check, and names that commit from then on.
"""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

__all__ = ["carried_commit", "hub_options", "is_commit", "refuse_missing_folder", "select_commit"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_options(**options: Any) -> dict[str, Any]:
    """The download options that are set: revision, cache_dir, subfolder, token, local_files_only and so on."""
    return {name: value for name, value in options.items() if value is not None}


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which never moves, and not the name of a branch or a tag."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def carried_commit(config: PreTrainedConfig, name_or_path: str | PathLike[str]) -> str | None:
    """The commit that a configuration was read at, if it came from the repository `name_or_path`; otherwise None."""
    if config.name_or_path != str(name_or_path):
        return None
    commit: str | None = getattr(config, "_commit_hash", None)
    return commit


def refuse_missing_folder(name_or_path: str | PathLike[str]) -> None:
    """Check a name that can only be a path, since it begins with `.`, `/` or `~` or has more than one `/`.

    Raises:
        FileNotFoundError: nothing is there; the Hub would answer that the name is malformed.
    """
    name = str(name_or_path)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).exists():
        raise FileNotFoundError(f"there is no model folder {name!r} (looked for from {Path.cwd()})")


def select_commit(
    name_or_path: str | PathLike[str], *, filename: str = "config.json", hub_options: Mapping[str, Any]
) -> str | None:
    """Find the commit that a revision of a repository stands for now.

    Args:
        name_or_path: A Hub repository, or a local folder or file.
        filename: The file that the load begins with; it is downloaded where needed.
        hub_options: The download options: revision, cache_dir, subfolder, token, local_files_only, force_download,
            proxies.

    Returns:
        The full commit hash; None for a local path and for a repository without that file.

    Raises:
        OSError: the repository or the revision cannot be found, online or in the cache; or there is no such folder.
    """
    name = str(name_or_path)
    subfolder = hub_options.get("subfolder") or ""
    if Path(name).exists() or (Path(subfolder) / name).is_file():
        return None
    refuse_missing_folder(name)
    options = {key: value for key, value in hub_options.items() if key != "force_download"}
    try:
        return _ask(name, filename, **{**options, "subfolder": subfolder or None})
    except Exception:  # noqa: BLE001
        # transformers words every error better, and after some of them it still finds the file in the cache.
        return extract_commit_hash(cached_file(name, filename, **hub_options), None)


def _ask(name: str, filename: str, *, revision: str | None = None, **options: Any) -> str:
    """Ask for the commit of a file, leave that file in the cache, and note there what the branch stands for."""
    commit: str = hf_hub_download(name, filename, revision=revision, dry_run=True, **options).commit_hash
    if not is_commit(revision) and not options.get("local_files_only"):
        # A download by branch asks for the commit and then for the content of the branch, which may have moved in
        # between. So the content comes by commit first, and the branch is only looked up again for the note.
        hf_hub_download(name, filename, revision=commit, **options)
        hf_hub_download(name, filename, revision=revision, **options)
    return commit
