"""Getting the data ready on the standard library's sources: tokenizer and token stream, cold and from the cache."""

import pytest

from automodel.data.loader import StatefulDataLoader
from automodel.data.text import TextFilesDataset
from automodel.data.tokenizer import train_byte_level_bpe

CONTEXT_LENGTH = 256


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    """One cache for the whole module, so that the warm rows find what the setup of the first left."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setenv("AUTOMODEL_CACHE", str(root))
        yield root


@pytest.fixture(scope="module")
def tokenizer(cache_root):
    return train_byte_level_bpe()


@pytest.fixture(scope="module")
def dataset(tokenizer):
    return TextFilesDataset(tokenizer, context_length=CONTEXT_LENGTH)


def test_train_tokenizer(benchmark):
    benchmark.extra_info.update(device="cpu", path="cold", vocab_size=4096)
    benchmark.pedantic(train_byte_level_bpe, kwargs={"cache": False}, rounds=1)


def test_load_tokenizer(benchmark, tokenizer):
    benchmark.extra_info.update(device="cpu", path="warm", vocab_size=4096)
    benchmark.pedantic(train_byte_level_bpe, rounds=5)


def test_tokenise_corpus(benchmark, tokenizer):
    benchmark.extra_info.update(device="cpu", path="cold")
    settings = {"context_length": CONTEXT_LENGTH, "cache": False}
    data = benchmark.pedantic(TextFilesDataset, args=(tokenizer,), kwargs=settings, rounds=1)
    benchmark.extra_info["num_tokens"] = data.num_tokens


def test_load_stream(benchmark, tokenizer, dataset):
    benchmark.extra_info.update(device="cpu", path="warm", num_tokens=dataset.num_tokens)
    benchmark.pedantic(TextFilesDataset, args=(tokenizer,), kwargs={"context_length": CONTEXT_LENGTH}, rounds=5)


def test_hand_out_batches(benchmark, dataset):
    loader = StatefulDataLoader(dataset, 8, shuffle=True)
    benchmark.extra_info.update(device="cpu", path="warm", batches=100, tokens=100 * 8 * CONTEXT_LENGTH)
    benchmark.pedantic(lambda: [batch for _, batch in zip(range(100), loader, strict=False)], rounds=5)
