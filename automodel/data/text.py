"""Next-token prediction on plain text files: one token stream per split, cut to the context length."""

import hashlib
import json
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.utils.data import Dataset

from automodel.data.cached_files import DamagedFileError, cached_path, load_cached, publish
from automodel.data.corpus import STDLIB, CorpusFile, corpus_digest, find_files, split_files
from automodel.data.tokenizer import DocumentEncoder, FastTokenizer

__all__ = ["TextFilesDataset"]

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_BATCH_CHARACTERS = 4_000_000
_RECORD = "token_stream"


@dataclass(frozen=True, kw_only=True)
class _TokenStream:
    """The tokens of all files of a corpus, one file after the other.

    tokens: int32 [num_tokens]. offsets: int64 [num_files + 1]; file i is tokens[offsets[i]:offsets[i + 1]].
    """

    tokens: torch.Tensor
    offsets: torch.Tensor


class TextFilesDataset(Dataset[dict[str, torch.Tensor]]):
    """The files of one split as a stream of tokens, cut into items of `context_length` next-token predictions.

    Each file is followed by the tokenizer's end-of-text token; files follow each other in the order of their names.
    Item i holds `input_ids` = stream[i*L : i*L + L] and `labels` = stream[i*L + 1 : i*L + L + 1], int64 [L] each:
    labels are already shifted, `labels[t]` is the token that comes after `input_ids[t]`, and every token but the
    first is predicted once. A tail that does not fill an item is dropped.

    Whole files are held out for validation, until they have `validation_tokens` tokens; which ones depends on their
    names alone. Both splits share one tokenised stream, which `cache` keeps under the cache root in `tokens/` and
    which is then mapped into memory rather than read.

    Attributes:
        num_tokens: tokens in this split, before the tail is dropped.
        context_length: tokens per item.
        sample_prompt: the text that sample completions of a model begin with, None for no wish.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        *,
        source: str | os.PathLike[str] = STDLIB,
        split: Literal["train", "validation"] = "train",
        context_length: int,
        pattern: str | None = None,
        validation_tokens: int = 100_000,
        sample_prompt: str | None = None,
        cache: bool = True,
    ) -> None:
        """Find, tokenise (or take from the cache) and split the corpus.

        `source` and `pattern` are those of `corpus.find_files`.

        Raises:
            ValueError: an argument is out of range, the tokenizer has no end-of-text token or is no fast one, the
                corpus is missing, unreadable or empty, or a split would be smaller than one item.
        """
        self.check_arguments(
            split=split,
            context_length=context_length,
            validation_tokens=validation_tokens,
            sample_prompt=sample_prompt,
        )
        self.context_length = context_length
        self.sample_prompt = sample_prompt
        files = find_files(source, pattern=pattern)
        stream = _load_stream(files, DocumentEncoder(tokenizer), cache=cache)
        counts: list[int] = stream.offsets.diff().tolist()
        training, held_out = split_files(files, token_counts=counts, validation_tokens=validation_tokens)
        chosen = training if split == "train" else held_out
        self._tokens = stream.tokens
        self._names = [files[index].name for index in chosen]
        self._starts = [int(stream.offsets[index]) for index in chosen]
        # Position in the split's stream at which each chosen file begins; the last entry is where the last one ends.
        self._positions: list[int] = list(accumulate((counts[index] for index in chosen), initial=0))
        self.num_tokens = self._positions[-1]
        if len(self) < 1:
            raise ValueError(
                f"context_length {context_length} is too long for the {split} split of {os.fspath(source)!r}, which "
                f"has {self.num_tokens} tokens: one item takes {context_length + 1}"
            )
        logger.info("%s split: %d tokens in %d of %d files", split, self.num_tokens, len(chosen), len(files))

    @staticmethod
    def check_arguments(
        *,
        source: str | os.PathLike[str] | None = None,
        split: str = "train",
        context_length: int,
        pattern: str | None = None,
        validation_tokens: int = 100_000,
        sample_prompt: str | None = None,
        cache: bool = True,
    ) -> None:
        """Check arguments of the constructor without tokenising anything; a `source` that is given is looked for.

        Raises:
            ValueError: an argument is out of range, or the corpus is missing, unreadable or empty.
        """
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
        for name, value in (("context_length", context_length), ("validation_tokens", validation_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if sample_prompt is not None and (not isinstance(sample_prompt, str) or not sample_prompt):
            raise ValueError(f"sample_prompt must be a text that is not empty, got {sample_prompt!r}")
        if source is not None:
            find_files(source, pattern=pattern)

    def __len__(self) -> int:
        """Return the number of items."""
        return (self.num_tokens - 1) // self.context_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return item `index` as `input_ids` and `labels`, int64 [context_length] each, not sharing memory.

        Raises:
            IndexError: there is no such item.
        """
        start, stop = self._span(index)
        pieces: list[torch.Tensor] = []
        for file in self._files_of(start, stop):
            begin = max(start, self._positions[file])
            end = min(stop, self._positions[file + 1])
            shift = self._starts[file] - self._positions[file]
            pieces.append(self._tokens[begin + shift : end + shift])
        tokens = torch.cat(pieces).to(torch.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:].clone()}

    def sources(self, index: int) -> tuple[str, ...]:
        """Return the names of the files that the tokens of item `index`, labels included, come from.

        Raises:
            IndexError: there is no such item.
        """
        return tuple(self._names[file] for file in self._files_of(*self._span(index)))

    def _span(self, index: int) -> tuple[int, int]:
        """Return the positions in the split's stream at which an item starts and stops."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no item {index} in a dataset of {len(self)}")
        start = index % len(self) * self.context_length
        return start, start + self.context_length + 1

    def _files_of(self, start: int, stop: int) -> range:
        """Return which of the split's files hold the positions from `start` up to `stop`."""
        return range(bisect_right(self._positions, start) - 1, bisect_right(self._positions, stop - 1))


def _load_stream(files: Sequence[CorpusFile], encoder: DocumentEncoder, *, cache: bool) -> _TokenStream:
    """Return the token stream of the files, from the cache if it is there; otherwise keep it there.

    Raises:
        ValueError: a file cannot be read.
    """
    if not cache:
        return _tokenise(files, encoder)
    identity = {"format_version": _FORMAT_VERSION, "corpus": corpus_digest(files), "tokenizer": encoder.digest()}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = cached_path("tokens", f"{digest}.safetensors")
    stream = load_cached(path, _map_stream) if path is not None else None
    if stream is None:
        stream = _tokenise(files, encoder)
        if path is not None and publish(path, _pack_stream(stream)):
            stream = load_cached(path, _map_stream) or stream
    return stream


def _tokenise(files: Sequence[CorpusFile], encoder: DocumentEncoder) -> _TokenStream:
    """Encode every file, each with the end-of-text token after it."""
    started = time.perf_counter()
    pieces = [torch.tensor(ids, dtype=torch.int32) for texts in _text_batches(files) for ids in encoder.encode(texts)]
    offsets = list(accumulate((len(piece) for piece in pieces), initial=0))
    seconds = time.perf_counter() - started
    logger.info("tokenised %d files into %d tokens in %.1f s", len(files), offsets[-1], seconds)
    return _TokenStream(tokens=torch.cat(pieces), offsets=torch.tensor(offsets, dtype=torch.int64))


def _text_batches(files: Sequence[CorpusFile]) -> Iterator[list[str]]:
    """Yield the texts of the files in order, several at a time, so that memory stays bounded."""
    texts: list[str] = []
    size = 0
    for file in files:
        texts.append(file.read_text())
        size += len(texts[-1])
        if size >= _BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _checksum(stream: _TokenStream) -> str:
    """Return the SHA-256 (hex) of the stream's tensors."""
    digest = hashlib.sha256(stream.offsets.numpy().data)
    digest.update(stream.tokens.numpy().data)
    return digest.hexdigest()


def _pack_stream(stream: _TokenStream) -> bytes:
    """Return the stream as the bytes of a safetensors file that also holds its checksum."""
    # One entry: safetensors writes several in an order that changes from call to call.
    record = json.dumps({"format_version": _FORMAT_VERSION, "sha256": _checksum(stream)})
    return save({"tokens": stream.tokens, "offsets": stream.offsets}, metadata={_RECORD: record})


def _map_stream(path: Path) -> _TokenStream:
    """Map a cached stream into memory.

    Raises:
        OSError: the file cannot be read.
        DamagedFileError: the file is not what was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            checksum = json.loads(file.metadata()[_RECORD])["sha256"]
            stream = _TokenStream(tokens=file.get_tensor("tokens"), offsets=file.get_tensor("offsets"))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"it is no token stream: {error}") from error
    if checksum != _checksum(stream):
        raise DamagedFileError("its checksum does not match")
    return stream
