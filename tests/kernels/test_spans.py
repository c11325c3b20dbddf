"""Spans of sequences, in rows of equal length and in documents of one row."""

import pytest
import torch
import triton
import triton.language as tl

from automodel_kernels.spans import count_spans, find_span, spans_before

pytestmark = pytest.mark.interpreter


@triton.jit
def spans_kernel(cu_seqlens_ptr, numbers_ptr, found_ptr, num_seqs, seqlen, span, VARLEN: tl.constexpr):
    number = tl.load(numbers_ptr + tl.program_id(0))
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, span, VARLEN)
    found_ptr += tl.program_id(0) * 5
    tl.store(found_ptr, seq)
    tl.store(found_ptr + 1, index)
    tl.store(found_ptr + 2, begin)
    tl.store(found_ptr + 3, end)
    tl.store(found_ptr + 4, spans_before(cu_seqlens_ptr, seqlen, seq, span, VARLEN))


def found_spans(numbers, bounds, *, num_seqs, seqlen, span, varlen):
    numbers, bounds = (torch.tensor(each, dtype=torch.int32) for each in (numbers, bounds))
    found = torch.full((len(numbers), 5), -1, dtype=torch.int32)
    spans_kernel[(len(numbers),)](bounds, numbers, found, num_seqs, seqlen, span, VARLEN=varlen)
    return found.tolist()


def test_rows():
    assert count_spans(num_seqs=2, seqlen=130, span=64, varlen=False) == 6
    assert found_spans(range(6), [0], num_seqs=2, seqlen=130, span=64, varlen=False) == [
        [0, 0, 0, 130, 0],
        [0, 1, 0, 130, 0],
        [0, 2, 0, 130, 0],
        [1, 0, 0, 130, 3],
        [1, 1, 0, 130, 3],
        [1, 2, 0, 130, 3],
    ]


def documents(lengths, span):
    """What should be found, and the bounds."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    expected, before = [], 0
    for seq, length in enumerate(lengths):
        spans = -(-length // span)
        expected += [[seq, index, bounds[seq], bounds[seq + 1], before] for index in range(spans)]
        before += spans
    return expected, bounds


@pytest.mark.parametrize(
    "lengths",
    [[300], [0, 0, 300, 1, 64, 65, 0], [1] * 300, [0] * 130 + [7] + [0] * 140, [64] * 256 + [1]],
    ids=["one", "some empty", "many of one token", "beyond a block of empty ones", "whole blocks"],
)
def test_documents(lengths):
    expected, bounds = documents(lengths, 64)
    sizes = {"num_seqs": len(lengths), "seqlen": bounds[-1], "span": 64, "varlen": True}
    number = count_spans(**sizes)
    # What lies beyond the last span is empty.
    expected += [[len(lengths), None, 0, 0, len(expected)]] * (number - len(expected))
    # The interpreter takes long: the ends, and some between.
    numbers = sorted({*range(3), *range(number // 2, number // 2 + 3), *range(number - 3, number)} & set(range(number)))
    for found, each in zip(found_spans(numbers, bounds, **sizes), [expected[place] for place in numbers], strict=True):
        assert found == [mine if mine is not None else given for mine, given in zip(each, found, strict=True)]
