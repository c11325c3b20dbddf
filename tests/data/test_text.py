import pickle
import resource

import pytest
import torch
from torch.utils.data import DataLoader

from automodel.data.corpus import find_files, split_files
from automodel.data.text import TextFilesDataset
from automodel.data.tokenizer import train_byte_level_bpe

TOKENISED = "tokenised"


@pytest.fixture
def tokenizer(corpus):
    return train_byte_level_bpe(corpus, vocab_size=300, cache=False)


def documents(corpus, tokenizer):
    """The tokens of each file with the end-of-text token, made by the tokenizer's plain interface."""
    return {file.name: [*tokenizer.encode(file.read_text()), tokenizer.eos_token_id] for file in find_files(corpus)}


def expected_split(corpus, tokenizer, *, validation_tokens):
    tokens = documents(corpus, tokenizer)
    files = find_files(corpus)
    counts = [len(tokens[file.name]) for file in files]
    parts = split_files(files, token_counts=counts, validation_tokens=validation_tokens)
    return [[(files[i].name, tokens[files[i].name]) for i in part] for part in parts]


def make(corpus, tokenizer, **settings):
    return TextFilesDataset(tokenizer, source=corpus, **{"context_length": 7, "validation_tokens": 500, **settings})


def cache_file(cache_root):
    (path,) = (cache_root / "tokens").iterdir()
    return path


@pytest.mark.parametrize("context_length", [1, 7, 64, 500])
@pytest.mark.parametrize(("split", "part"), [("train", 0), ("validation", 1)])
@pytest.mark.parametrize("cache", [True, False])
def test_items_are_the_stream_and_labels_are_the_next_tokens(context_length, split, part, cache, corpus, tokenizer):
    data = make(corpus, tokenizer, split=split, context_length=context_length, cache=cache)
    chosen = expected_split(corpus, tokenizer, validation_tokens=500)[part]
    stream = [token for _, tokens in chosen for token in tokens]
    owners = [name for name, tokens in chosen for _ in tokens]
    assert data.num_tokens == len(stream)
    assert len(data) == (len(stream) - 1) // context_length
    for index in range(len(data)):
        item = data[index]
        start, stop = index * context_length, (index + 1) * context_length
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["input_ids"].tolist() == stream[start:stop]
        assert item["labels"].tolist() == stream[start + 1 : stop + 1]
        assert data.sources(index) == tuple(dict.fromkeys(owners[start : stop + 1]))


def test_every_token_is_predicted_once_but_the_first_and_the_tail(corpus, tokenizer):
    data = make(corpus, tokenizer)
    stream = [token for _, tokens in expected_split(corpus, tokenizer, validation_tokens=500)[0] for token in tokens]
    labels = [label for index in range(len(data)) for label in data[index]["labels"].tolist()]
    assert labels == stream[1 : 1 + 7 * len(data)]
    assert len(stream) - 1 - len(labels) < 7


def test_splits_share_no_file_and_leave_none_out(corpus, tokenizer):
    names = [
        {name for index in range(len(data)) for name in data.sources(index)}
        for data in (make(corpus, tokenizer, split=split, context_length=1) for split in ("train", "validation"))
    ]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {file.name for file in find_files(corpus)}
    assert make(corpus, tokenizer, split="validation").num_tokens >= 500


def test_index_from_the_end_and_beyond(corpus, tokenizer):
    data = make(corpus, tokenizer)
    assert data[-1]["labels"].tolist() == data[len(data) - 1]["labels"].tolist()
    for index in (len(data), -len(data) - 1):
        with pytest.raises(IndexError, match=str(index)):
            data[index]
    assert sum(1 for _ in data) == len(data)


def test_items_do_not_share_memory_with_each_other_or_the_stream(corpus, tokenizer):
    data = make(corpus, tokenizer)
    before = data[0]["input_ids"].tolist()
    item = data[0]
    item["labels"].fill_(-100)
    assert item["input_ids"].tolist() == before
    item["input_ids"].fill_(-1)
    assert data[0]["input_ids"].tolist() == before


def test_spelling_of_the_special_token_in_a_file_ends_no_document(corpus, tokenizer):
    (corpus / "a" / "file03.py").write_text("x = '<|endoftext|>'\n" * 40)
    data = make(corpus, tokenizer, context_length=1, validation_tokens=1)
    tokens = [data[index]["labels"].item() for index in range(len(data))]
    assert tokens.count(0) == len({name for index in range(len(data)) for name in data.sources(index)})


def test_both_splits_and_every_length_share_one_tokenising(corpus, tokenizer, cache_root, caplog):
    caplog.set_level("INFO", logger="automodel")
    first = make(corpus, tokenizer)
    written = cache_file(cache_root).stat().st_mtime_ns
    again = make(corpus, tokenizer)
    make(corpus, tokenizer, split="validation")
    make(corpus, tokenizer, context_length=30, validation_tokens=700)
    assert caplog.text.count(TOKENISED) == 1
    assert cache_file(cache_root).stat().st_mtime_ns == written
    assert [first[i]["labels"].tolist() for i in range(len(first))] == [
        again[i]["labels"].tolist() for i in range(len(again))
    ]


def test_cache_knows_corpus_and_tokenizer(corpus, tokenizer, caplog):
    caplog.set_level("INFO", logger="automodel")
    make(corpus, tokenizer)
    make(corpus, train_byte_level_bpe(corpus, vocab_size=301, cache=False))
    (corpus / "a" / "file03.py").write_text("changed")
    make(corpus, tokenizer)
    assert caplog.text.count(TOKENISED) == 3


def flip_last_byte(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        lambda content: b"\xff" * len(content),
        lambda content: content.replace(b"token_stream", b"other_stream"),
        flip_last_byte,
    ],
    ids=["truncated", "empty", "overwritten", "foreign", "one bit"],
)
def test_damaged_cache_heals(damage, corpus, tokenizer, cache_root, caplog):
    caplog.set_level("INFO", logger="automodel")
    before = make(corpus, tokenizer, cache=False)
    make(corpus, tokenizer)
    path = cache_file(cache_root)
    intact = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(intact))
    caplog.clear()
    healed = make(corpus, tokenizer)
    assert path.read_bytes() == intact
    assert [str(path) in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]
    assert [healed[i]["labels"].tolist() for i in range(len(healed))] == [
        before[i]["labels"].tolist() for i in range(len(before))
    ]


def test_no_cache_folder_is_one_warning(corpus, tokenizer, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "file"))
    assert len(make(corpus, tokenizer)) > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_full_disk_is_one_warning(corpus, tokenizer, cache_root, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert len(make(corpus, tokenizer)) > 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list((cache_root / "tokens").iterdir()) == []


def test_items_reach_worker_processes_and_other_processes(corpus, tokenizer):
    data = make(corpus, tokenizer)
    labels = [data[index]["labels"].tolist() for index in range(len(data))]
    assert [item["labels"].tolist() for item in DataLoader(data, batch_size=None, num_workers=1)] == labels
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[index]["labels"].tolist() for index in range(len(copy))] == labels


def test_sample_prompt_is_kept(corpus, tokenizer):
    assert make(corpus, tokenizer).sample_prompt is None
    assert make(corpus, tokenizer, sample_prompt="def ").sample_prompt == "def "


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 0}, "context_length must be a positive integer, got 0"),
        ({"validation_tokens": 0}, "validation_tokens must be a positive integer, got 0"),
        ({"split": "test"}, "split must be 'train' or 'validation', got 'test'"),
        ({"validation_tokens": 10**9}, "validation_tokens 1000000000"),
        ({"context_length": 10**6}, "context_length 1000000 is too long for the train split"),
        ({"split": "validation", "context_length": 10**6}, "too long for the validation split"),
        ({"pattern": "*.txt"}, r"pattern '\*.txt'"),
    ],
)
def test_mistakes_are_named(settings, message, corpus, tokenizer):
    with pytest.raises(ValueError, match=message):
        make(corpus, tokenizer, **settings)


def test_mistakes_are_found_before_the_corpus_is_read(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="context_length"):
        TextFilesDataset(tokenizer, source=tmp_path / "nowhere", context_length=-1)


def test_one_item_needs_one_token_more_than_its_length(corpus, tokenizer):
    tokens = make(corpus, tokenizer).num_tokens
    assert len(make(corpus, tokenizer, context_length=tokens - 1)) == 1
    with pytest.raises(ValueError, match=f"one item takes {tokens + 1}"):
        make(corpus, tokenizer, context_length=tokens)
