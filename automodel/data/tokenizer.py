"""Train a byte-level BPE tokenizer on a corpus, and encode whole documents with any fast tokenizer."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from automodel.data.cached_files import DamagedFileError, cached_path, load_cached, publish
from automodel.data.corpus import STDLIB, CorpusFile, corpus_digest, find_files, hash_order
from automodel.models.commit import refuse_missing_folder

__all__ = ["END_OF_TEXT", "DocumentEncoder", "FastTokenizer", "load_tokenizer", "train_byte_level_bpe"]

logger = logging.getLogger(__name__)

FastTokenizer: TypeAlias = PreTrainedTokenizerFast
"""The tokenizers that the datasets take: those of transformers that the tokenizers library backs."""

END_OF_TEXT = "<|endoftext|>"
"""The special token, id 0, of the tokenizers trained here: beginning, end and padding in one."""

_FORMAT_VERSION = 1
_SMALLEST_VOCABULARY = 257


def train_byte_level_bpe(
    source: str | os.PathLike[str] = STDLIB,
    *,
    vocab_size: int = 4096,
    pattern: str | None = None,
    max_bytes: int = 8_000_000,
    cache: bool = True,
) -> FastTokenizer:
    """Return a byte-level BPE tokenizer trained on the files of a corpus, from the cache if it is there.

    `source` and `pattern` are those of `corpus.find_files`. The tokenizer loses nothing: `decode(encode(text)) ==
    text` for every string that UTF-8 can encode. Id 0 is `END_OF_TEXT`. At most `max_bytes` bytes of the corpus are
    trained on; the files that a dataset holds out first come last here, so that they stay unseen where others suffice.
    Training is deterministic. With `cache`, the result is kept under the cache root in `tokenizers/<digest>/`.

    Raises:
        ValueError: `vocab_size` is below 257 (one id per byte and the special token), `max_bytes` is not positive,
            or the corpus is missing, unreadable or empty.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size must be at least {_SMALLEST_VOCABULARY}, got {vocab_size}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    files = find_files(source, pattern=pattern)
    path = _cached_tokenizer_path(files, vocab_size=vocab_size, max_bytes=max_bytes) if cache else None
    definition = load_cached(path, _read_definition) if path is not None else None
    if definition is None:
        definition = _train(files, vocab_size=vocab_size, max_bytes=max_bytes)
        if path is not None:
            publish(path, _pack_definition(definition))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(definition),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the tokenizer of a pretrained model; `options` are those of transformers' `AutoTokenizer`.

    Raises:
        OSError: the repository, the folder or a file of it cannot be found.
    """
    refuse_missing_folder(pretrained_model_name_or_path)
    return AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **options)


class DocumentEncoder:
    """Encodes whole documents as plain text, with an independent copy of a tokenizer's backend.

    The copy neither cuts nor pads, adds nothing around a document, and reads the spelling of a special token in it as
    ordinary text.

    Attributes:
        end_of_text: the id of the token that marks the end of a document.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        """Copy the backend.

        Raises:
            ValueError: the tokenizer has no backend of the tokenizers library, or no end-of-text token.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(f"tokenizer must be a fast one of transformers, got {type(tokenizer).__name__}")
        end_of_text = tokenizer.eos_token_id
        if not isinstance(end_of_text, int):
            raise ValueError("tokenizer must have an eos_token, which marks the end of each document; it has none")
        self.end_of_text = end_of_text
        self._backend = Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True

    def digest(self) -> str:
        """Return the SHA-256 (hex) of what determines the encoding, the end-of-text token included."""
        return hashlib.sha256(f"{self.end_of_text}:{self._backend.to_str()}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text followed by the end-of-text token."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self.end_of_text] for encoding in encodings]


def _train(files: Sequence[CorpusFile], *, vocab_size: int, max_bytes: int) -> str:
    """Train on the files and return the tokenizer as a JSON string."""
    started = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(files, max_bytes=max_bytes), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        logger.warning("the corpus yields a vocabulary of %d tokens only, %d were asked for", size, vocab_size)
    logger.info("trained a tokenizer of %d tokens in %.1f s", size, time.perf_counter() - started)
    definition: str = tokenizer.to_str()
    return definition


def _training_texts(files: Sequence[CorpusFile], *, max_bytes: int) -> Iterator[str]:
    """Yield the texts to train on, at most `max_bytes` bytes of them, from the end of the hash order."""
    left = max_bytes
    for index in reversed(hash_order(files)):
        if left <= 0:
            return
        content = files[index].read_bytes()[:left]
        left -= len(content)
        yield content.decode("utf-8", errors="replace")


def _cached_tokenizer_path(files: Sequence[CorpusFile], *, vocab_size: int, max_bytes: int) -> Path | None:
    """Return where the tokenizer of this corpus and these settings is kept, None without a usable cache."""
    identity = {
        "format_version": _FORMAT_VERSION,
        "tokenizers": tokenizers.__version__,
        "corpus": corpus_digest(files),
        "vocab_size": vocab_size,
        "max_bytes": max_bytes,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cached_path("tokenizers", f"{digest}/tokenizer.json")


def _pack_definition(definition: str) -> bytes:
    """Return the bytes of the cache file: a JSON object with the definition and its SHA-256."""
    checksum = hashlib.sha256(definition.encode()).hexdigest()
    record = {"format_version": _FORMAT_VERSION, "sha256": checksum, "tokenizer": definition}
    return json.dumps(record).encode()


def _read_definition(path: Path) -> str:
    """Return the definition in a cache file.

    Raises:
        OSError: the file cannot be read.
        DamagedFileError: the file is not what was written.
    """
    try:
        record = json.loads(path.read_bytes())
        definition, checksum = record["tokenizer"], record["sha256"]
        intact = hashlib.sha256(definition.encode()).hexdigest() == checksum
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"it is no tokenizer record: {error}") from error
    if not intact:
        raise DamagedFileError("its checksum does not match")
    return str(definition)
