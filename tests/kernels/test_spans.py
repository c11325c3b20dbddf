"""Spans of sequences, in rows of equal length and in documents of one row."""

import pytest
import torch
import triton
import triton.language as tl

from automodel_kernels.spans import count_spans, find_span, spans_before

pytestmark = pytest.mark.interpreter


@triton.jit
def spans_kernel(cu_seqlens_ptr, found_ptr, num_seqs, seqlen, span, VARLEN: tl.constexpr):
    number = tl.program_id(0)
    seq, index, begin, end = find_span(cu_seqlens_ptr, num_seqs, seqlen, number, span, VARLEN)
    found_ptr += number * 5
    tl.store(found_ptr, seq)
    tl.store(found_ptr + 1, index)
    tl.store(found_ptr + 2, begin)
    tl.store(found_ptr + 3, end)
    tl.store(found_ptr + 4, spans_before(cu_seqlens_ptr, seqlen, seq, span, VARLEN))


def found_spans(bounds, *, num_seqs, seqlen, span, varlen):
    number = count_spans(num_seqs=num_seqs, seqlen=seqlen, span=span, varlen=varlen)
    found = torch.full((number, 5), -1, dtype=torch.int32)
    spans_kernel[(number,)](torch.tensor(bounds, dtype=torch.int32), found, num_seqs, seqlen, span, VARLEN=varlen)
    return found.tolist()


def test_rows():
    assert found_spans([0], num_seqs=2, seqlen=130, span=64, varlen=False) == [
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
    found = found_spans(bounds, num_seqs=len(lengths), seqlen=bounds[-1], span=64, varlen=True)
    assert found[: len(expected)] == expected
    # What lies beyond the last span is empty.
    assert all(begin == end == 0 for _, _, begin, end, _ in found[len(expected) :])
