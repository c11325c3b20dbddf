"""What tests of kernels may use; the machinery is in tests/support/kernel_*.py."""

import pytest


@pytest.fixture
def narrow_floats():
    """bfloat16 and float8 are right under the interpreter, and element-wise arithmetic on them raises."""
    from kernel_bfloat16 import exact_narrow_floats

    with exact_narrow_floats():
        yield


@pytest.fixture
def poison():
    """New uninitialised tensors hold NaN, or the largest integer."""
    from kernel_memory import poisoned_empty

    with poisoned_empty():
        yield


@pytest.fixture
def traffic():
    """The list of the test's launches under the interpreter, with what each loaded and stored."""
    from kernel_recorder import record_traffic

    with record_traffic() as launches:
        yield launches


@pytest.fixture
def triton_cache(tmp_path, monkeypatch):
    """An empty Triton cache of this test alone; returns its folder."""
    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder
