import importlib.util
import sys

from automodel_kernels.tuning.sources import function_hash

SOURCE = """
import triton
import triton.language as tl

OFFSET = tl.constexpr(1)


@triton.jit
def inner(x):
    return x + OFFSET


@triton.jit(do_not_specialize=["size"])
def outer(x_ptr, size):
    tl.store(x_ptr, inner(tl.load(x_ptr)) * size)
"""


def hash_of(tmp_path, source, *, name="a"):
    path = tmp_path / f"source_{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        return function_hash(module.outer)
    finally:
        del sys.modules[path.stem]


def test_it_changes_with_all_that_a_binary_is_made_from_and_with_nothing_else(tmp_path):
    plain = hash_of(tmp_path, SOURCE)
    assert hash_of(tmp_path, "# moved\n\n" + SOURCE, name="b") == plain
    changes = [("x + OFFSET", "x - OFFSET"), ("constexpr(1)", "constexpr(2)"), ("* size", "+ size"), ('"size"', "")]
    hashes = {hash_of(tmp_path, SOURCE.replace(*change), name=f"c{n}") for n, change in enumerate(changes)}
    assert len(hashes | {plain}) == len(changes) + 1
