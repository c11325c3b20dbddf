"""The ALIGNED flag holds exactly where 16 bytes may be moved at a time."""

import pytest
import torch

from automodel_kernels.tuning.keys import rows_aligned

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
