"""A repair takes little memory beyond the weights, whatever their size."""

import math
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from automodel.training.embedding_row_repair import repair_input_embedding_rows

VOCAB, HIDDEN, MEBIBYTE = 32_768, 4096, 1 << 20
DAMAGED = {row: (0.0, 1e-9, math.nan, math.inf)[row % 4] for row in range(7, VOCAB, VOCAB // 20 + 1)}


class Model(nn.Module):
    """Two embeddings of 256 MiB each; a few different rows, over and over, are made in no time."""

    def __init__(self, vocab):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Module(), nn.Module()
        for seed, module in enumerate((self.embed_tokens, self.lm_head)):
            rows = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
            module.weight = nn.Parameter(rows.repeat(vocab // len(rows), 1), requires_grad=False)


@pytest.fixture
def one_thread():
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def anonymous_bytes():
    """Anonymous memory of this process that is resident now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def growth(call):
    """By how many bytes the anonymous memory grows at most, and what the call returns."""
    before = most = anonymous_bytes()
    done = threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = call()
    finally:
        done.set()
        watcher.join()
    return max(most, anonymous_bytes()) - before, result


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("target", ["rms", "median"])
def test_a_repair_takes_at_most_64_mebibytes(target):
    model = Model(VOCAB)
    assert model.embed_tokens.weight.nbytes == 256 * MEBIBYTE
    for row, value in DAMAGED.items():
        model.embed_tokens.weight[row] = value
    grown, report = growth(lambda: repair_input_embedding_rows(model, target=target))
    assert report.repaired_row_ids == tuple(DAMAGED)
    assert grown <= 64 * MEBIBYTE


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
@pytest.mark.usefixtures("one_thread")
def test_the_measurement_sees_a_copy_of_the_table():
    table = torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16)
    grown, _ = growth(lambda: table.clone().sum())
    assert grown > 192 * MEBIBYTE
