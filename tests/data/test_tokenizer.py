import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from automodel.data.tokenizer import END_OF_TEXT, DocumentEncoder, train_byte_level_bpe

REPOSITORY = Path(__file__).parents[2]
TRAINED = "trained a tokenizer"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    (source / "text.py").write_text("def f(x):\n    return x + 1  # caf\u00e9\n" * 50)
    return train_byte_level_bpe(source, vocab_size=270, cache=False)


def definition(tokenizer):
    return tokenizer.backend_tokenizer.to_str()


def cache_file(cache_root):
    (path,) = (cache_root / "tokenizers").glob("*/*")
    return path


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "a , b .c n't", "\r\n\t\x00\x7f", " \u2003\ufffd\U0001f600e\u0301", END_OF_TEXT]
)
def test_nothing_is_lost_in_awkward_texts(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_token_is_id_zero_and_serves_as_all_three(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (END_OF_TEXT,) * 3
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    assert len(tokenizer) == 270


def test_saved_tokenizer_loads_as_any_other(tokenizer, tmp_path):
    text = "def f(x): return caf\u00e9 \U0001f600\n"
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 0


def test_training_is_deterministic(corpus):
    first, second = (train_byte_level_bpe(corpus, vocab_size=300, cache=False) for _ in range(2))
    assert definition(first) == definition(second)


def test_second_call_reads_the_cache(corpus, cache_root, caplog):
    caplog.set_level("INFO", logger="automodel")
    first = train_byte_level_bpe(corpus, vocab_size=300)
    assert caplog.text.count(TRAINED) == 1
    written = cache_file(cache_root).stat().st_mtime_ns
    second = train_byte_level_bpe(corpus, vocab_size=300)
    assert caplog.text.count(TRAINED) == 1
    assert cache_file(cache_root).stat().st_mtime_ns == written
    assert definition(first) == definition(second)


def test_cache_knows_corpus_and_settings(corpus, caplog):
    caplog.set_level("INFO", logger="automodel")
    train_byte_level_bpe(corpus, vocab_size=300)
    train_byte_level_bpe(corpus, vocab_size=301)
    train_byte_level_bpe(corpus, vocab_size=300, max_bytes=1000)
    (corpus / "b" / "file00.py").write_text("something else")
    train_byte_level_bpe(corpus, vocab_size=300)
    assert caplog.text.count(TRAINED) == 4


def test_without_cache_nothing_is_written(corpus, cache_root):
    train_byte_level_bpe(corpus, vocab_size=300, cache=False)
    assert not cache_root.exists()


def flip_one_character(content):
    record = json.loads(content)
    record["tokenizer"] = record["tokenizer"].replace("value", "valve", 1)
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        lambda _: b"[]",
        lambda _: b"\xff\xfe",
        flip_one_character,
    ],
    ids=["truncated", "empty", "other json", "no text", "one character"],
)
def test_damaged_cache_heals(damage, corpus, cache_root, caplog):
    caplog.set_level("INFO", logger="automodel")
    first = train_byte_level_bpe(corpus, vocab_size=330)
    path = cache_file(cache_root)
    intact = path.read_bytes()
    assert damage(intact) != intact
    path.write_bytes(damage(intact))
    second = train_byte_level_bpe(corpus, vocab_size=330)
    assert definition(first) == definition(second)
    assert path.read_bytes() == intact
    assert caplog.text.count(TRAINED) == 2
    assert [str(path) in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_no_cache_folder_is_one_warning(corpus, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "file"))
    assert len(train_byte_level_bpe(corpus, vocab_size=300)) == 300
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "AUTOMODEL_CACHE" in caplog.text


def test_full_disk_is_one_warning(corpus, cache_root, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert len(train_byte_level_bpe(corpus, vocab_size=300)) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list((cache_root / "tokenizers").glob("*/*")) == []


def test_two_processes_at_once_get_the_same_tokenizer_and_tokens(corpus, cache_root):
    code = (
        "import sys; from automodel.data.tokenizer import train_byte_level_bpe\n"
        "from automodel.data.text import TextFilesDataset\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        "tokenizer = train_byte_level_bpe(sys.argv[1], vocab_size=300)\n"
        "data = TextFilesDataset(tokenizer, source=sys.argv[1], context_length=8, validation_tokens=50)\n"
        "sys.stdout.write(repr((tokenizer.backend_tokenizer.to_str(), [item['labels'].tolist() for item in data])))"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(corpus)],
            cwd=REPOSITORY,
            env={**os.environ, "AUTOMODEL_CACHE": str(cache_root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    results = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert results[0] == results[1] != ""
    assert len(list((cache_root / "tokens").iterdir())) == 1
    assert len(list((cache_root / "tokenizers").glob("*/*"))) == 1


def test_cap_takes_files_that_are_held_out_last(tmp_path):
    from automodel.data.corpus import find_files, hash_order

    for letter in "abcdefgh":
        (tmp_path / f"{letter}.py").write_text(f"{letter * 3} " * 100)
    files = find_files(tmp_path)
    last, before_last = (files[index].name[0] for index in reversed(hash_order(files)[-2:]))
    vocabulary = train_byte_level_bpe(tmp_path, vocab_size=400, max_bytes=600, cache=False).get_vocab()
    learned = {token.strip("\u0120") for token in vocabulary if token.isascii() is False or len(token) == 3}
    assert {letter for letter in "abcdefgh" if letter * 3 in learned} == {last, before_last}


def test_small_corpus_gives_fewer_tokens_and_says_so(tmp_path, caplog):
    (tmp_path / "a.py").write_text("ab")
    assert len(train_byte_level_bpe(tmp_path, vocab_size=1000, cache=False)) < 1000
    assert "1000 were asked for" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 256), ("max_bytes", 0)])
def test_arguments_out_of_range(name, value, corpus):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        train_byte_level_bpe(corpus, **{name: value})


@pytest.mark.parametrize("asked", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 200}])
def test_document_encoder_ignores_what_the_tokenizer_was_last_asked_for(asked, tokenizer):
    text = f"def f(x): {END_OF_TEXT} return"
    before = DocumentEncoder(tokenizer)
    tokenizer([text, "x"], **asked)
    after = DocumentEncoder(tokenizer)
    assert after.digest() == before.digest()
    ids, short = after.encode([text, ""])
    assert ids == before.encode([text])[0]
    assert tokenizer.decode(ids) == text + END_OF_TEXT
    assert ids.count(0) == 1
    assert short == [0]


def test_document_encoder_needs_a_fast_tokenizer_with_an_end():
    with pytest.raises(ValueError, match="fast one of transformers, got str"):
        DocumentEncoder("gpt2")


def test_document_encoder_needs_an_end_of_text_token(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="eos_token"):
        DocumentEncoder(bare)
