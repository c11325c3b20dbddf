"""Find the text files of a corpus, name its content by a digest, and hold files out for validation."""

import hashlib
import logging
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["DEFAULT_PATTERN", "STDLIB", "CorpusFile", "corpus_digest", "find_files", "hash_order", "split_files"]

logger = logging.getLogger(__name__)

STDLIB = "stdlib"
"""The source that stands for the standard library of the running Python."""

DEFAULT_PATTERN = "**/*.py"
"""The files taken from a folder when no pattern is given."""

_NOT_LIBRARY_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """One file of a corpus: its path, and its name relative to the corpus with forward slashes."""

    name: str
    path: Path

    def read_bytes(self) -> bytes:
        """Return the file's bytes.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read the corpus file {self.path}: {error.strerror or error}") from error

    def read_text(self) -> str:
        """Return the file decoded as UTF-8, line ends as they are; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: the file cannot be read.
        """
        return self.read_bytes().decode("utf-8", errors="replace")


def find_files(source: str | os.PathLike[str], *, pattern: str | None = None) -> list[CorpusFile]:
    """Return the files of a corpus, sorted by name; nothing is read yet.

    `source` is a folder, a single file, or the string "stdlib" (a folder of that name is written "./stdlib"): the
    running Python's standard library without its tests and without installed packages. `pattern` chooses files of a
    folder by their relative name: `**` stands for any number of folders, `*` and `?` stay within one; None means
    `**/*.py`. A single file needs no pattern and ignores it. Linked folders are followed, but no folder is entered
    twice, so that loops of links end.

    Raises:
        ValueError: the source does not exist, cannot be read, or holds no matching file.
    """
    pattern = DEFAULT_PATTERN if pattern is None else pattern
    is_stdlib = source == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"]) if is_stdlib else Path(source).expanduser()
    if root.is_file():
        return [CorpusFile(name=root.name, path=root)]
    if not root.is_dir():
        raise ValueError(
            f"source must be {STDLIB!r}, a folder or a file, got {os.fspath(source)!r} ({root} is neither)"
        )
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    excluded = _NOT_LIBRARY_CODE if is_stdlib else frozenset()
    files: list[CorpusFile] = []
    for file in _walk(root, excluded):
        if not _matches(file.name.split("/"), parts):
            continue
        if file.path.is_file():
            files.append(file)
        else:
            logger.warning("corpus: passing over %s, which is not a regular file", file.path)
    if not files:
        raise ValueError(f"source {os.fspath(source)!r} holds no file that matches the pattern {pattern!r}")
    return sorted(files, key=lambda file: file.name)


def corpus_digest(files: Sequence[CorpusFile]) -> str:
    """Return the SHA-256 (hex) over the name and content of every file, in order.

    Raises:
        ValueError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        for field in (_name_bytes(file), file.read_bytes()):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def hash_order(files: Sequence[CorpusFile]) -> list[int]:
    """Return the indices of `files` ordered by the SHA-256 of each name: mixed, and the same on every machine."""
    return sorted(range(len(files)), key=lambda index: hashlib.sha256(_name_bytes(files[index])).digest())


def split_files(
    files: Sequence[CorpusFile], *, token_counts: Sequence[int], validation_tokens: int
) -> tuple[list[int], list[int]]:
    """Divide whole files into training and validation; return the indices of each in ascending order.

    Files are taken for validation in `hash_order` until they hold at least `validation_tokens` tokens; the others are
    for training. A file of more than a tenth of `validation_tokens` is taken only when the smaller ones do not
    suffice, so that the split is little larger than asked for and no single file dominates it. `token_counts[i]` is
    the number of tokens of `files[i]`.

    Raises:
        ValueError: `validation_tokens` is not positive, or no file would be left for training.
    """
    if validation_tokens < 1:
        raise ValueError(f"validation_tokens must be positive, got {validation_tokens}")
    held_out: list[int] = []
    tokens = 0
    for index in sorted(hash_order(files), key=lambda index: token_counts[index] > validation_tokens // 10):
        if tokens >= validation_tokens:
            break
        held_out.append(index)
        tokens += token_counts[index]
    if tokens < validation_tokens or len(held_out) == len(files):
        raise ValueError(
            f"the corpus is too small for validation_tokens {validation_tokens}: it has {sum(token_counts)} tokens in "
            f"{len(files)} files, and whole files have to remain for training"
        )
    return sorted(set(range(len(files))).difference(held_out)), sorted(held_out)


def _walk(root: Path, excluded: frozenset[str]) -> list[CorpusFile]:
    """Return everything under `root` that is no folder, leaving out folders with an excluded name."""

    def stop(error: OSError) -> None:
        raise ValueError(f"cannot read the corpus folder {error.filename}: {error.strerror or error}") from error

    found: list[CorpusFile] = []
    entered: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            subfolders.clear()
            continue
        entered.add(real)
        subfolders[:] = sorted(name for name in subfolders if name not in excluded)
        paths = [Path(folder, name) for name in names]
        found += [CorpusFile(name=path.relative_to(root).as_posix(), path=path) for path in paths]
    return found


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Say whether a relative path, cut into its parts, matches a pattern cut the same way."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(names[skip:], pattern[1:]) for skip in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _name_bytes(file: CorpusFile) -> bytes:
    """Return a file's name as bytes, also where the name on disk is not valid UTF-8."""
    return file.name.encode("utf-8", errors="surrogateescape")
