"""The ALIGNED flag holds exactly where 16 bytes may be moved at a time."""

import pytest
import torch

from automodel_kernels.tuning.keys import key_fields, rows_aligned, tensors_aligned

BASE = torch.zeros(64, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("matrix", "aligned"),
    [
        (BASE, True),
        (BASE[:, 16:48], True),
        (BASE[:, 8:24], True),
        (BASE[3:4, :16], True),
        (BASE[:, :0], True),
        (BASE[:, 4:20], False),  # the address
        (BASE[:, :24], False),  # the number of columns
        (BASE.t(), False),  # the distance between columns
        (BASE[:, ::2], False),
        (BASE.flatten()[: 100 * 20].view(20, 100)[:, :16], False),  # the distance between rows
        (torch.zeros(4, 32, dtype=torch.float8_e5m2), True),
        (torch.zeros(4, 16, device="meta"), True),
        (torch.zeros(4, 20, device="meta"), False),
    ],
)
def test_rows_are_aligned(matrix, aligned):
    assert rows_aligned(matrix) is aligned


def test_one_matrix_that_is_not_decides():
    assert rows_aligned(BASE, BASE[:, :32])
    assert not rows_aligned(BASE, BASE[:, 1:])


CUBE = torch.zeros(4, 6, 64, dtype=torch.bfloat16)
WORDS = torch.zeros(4, 6, 64)


@pytest.mark.parametrize(
    ("tensor", "aligned"),
    [
        (CUBE, True),
        (WORDS, True),
        (CUBE[1:, ::2, 8:24], True),
        (CUBE[..., :8], True),
        (CUBE.transpose(0, 1), True),
        (CUBE[:, :, :0], True),
        (CUBE[:0], True),
        (CUBE[0, 0], True),
        (WORDS[..., 4:12], True),
        (CUBE[..., 4:12], False),  # the address
        (CUBE[..., :12], False),  # the number of elements
        (CUBE[..., ::2], False),
        (CUBE.transpose(1, 2)[..., :0], True),  # nothing to read
        (torch.zeros(4, 8, 6).transpose(1, 2), False),  # the distance between elements
        (CUBE.expand(2, 4, 6, 64), True),
        (torch.zeros(4, 12, dtype=torch.bfloat16)[:, :8], False),  # the distance between rows
        (torch.zeros(4, 12)[:, :8], True),
        (torch.zeros(4, 12, dtype=torch.bfloat16)[2:3, :8], True),  # there is one row
        (torch.zeros(4, 8, dtype=torch.float8_e5m2), False),
        (torch.zeros(1, 8, dtype=torch.float8_e5m2), True),
        (torch.zeros(4, 16, dtype=torch.float8_e5m2), True),
        (torch.zeros(12), False),
        (torch.zeros(17)[1:], False),
        (torch.zeros(()), True),
        (torch.zeros(17)[1], True),
        (torch.zeros(4, 17, device="meta")[:, 1:], False),
        (torch.zeros(17, device="meta")[1:], True),  # of what has no address only its shape counts
    ],
)
def test_tensors_are_aligned(tensor, aligned):
    assert tensors_aligned(tensor) is aligned


def test_one_tensor_that_is_not_decides_and_none_is_passed_over():
    assert tensors_aligned()
    assert tensors_aligned(None, CUBE, None, WORDS)
    assert not tensors_aligned(CUBE, None, WORDS[..., 1:])


def test_a_key_in_files_holds_names_of_types_and_plain_values():
    names = ("x_ptr", "BLOCK", "FLAG", "NONE", "NAME", "PAIR")
    fields = key_fields(names, (torch.bfloat16, 64, True, None, "sum", (1, 2)))
    assert fields == {"x_ptr": "bfloat16", "BLOCK": 64, "FLAG": True, "NONE": None, "NAME": "sum", "PAIR": "(1, 2)"}
