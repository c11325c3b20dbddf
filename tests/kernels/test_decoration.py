import pytest
import triton
import triton.language as tl

from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.candidates import Candidates, Config, Space
from kernel_toys import SUM_SPACE, sum_kernel


def decorated(**changes):
    asked = {"space": SUM_SPACE, "key": ("x_ptr", "SQUARE"), "restores": ("total_ptr",)} | changes
    return tuned(**asked)(sum_kernel)


def space_of(*metas, flags=None):
    candidates = Candidates(configs=tuple(Config(meta=meta) for meta in metas), flags=flags or {})
    return Space(name="odd", candidates=(candidates,))


@triton.jit(do_not_specialize=["x_ptr"])
def open_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    pass


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": ()}, "key must name an argument"),
        ({"key": ("x_ptr", "SQAURE")}, "key must name arguments of the function, got 'SQAURE'"),
        ({"key": ("SQUARE",)}, "'SQUARE' must be a tensor"),
        ({"key": ("x_ptr", "BLOCK")}, r"key must not name what configurations set, got \['BLOCK'\]"),
        ({"restores": ()}, "outputs or restores must name what the kernel writes"),
        ({"outputs": ("y_ptr",)}, "outputs must name arguments of the function, got 'y_ptr'"),
        ({"restores": ("SQUARE",)}, "'SQUARE' must be a tensor"),
        ({"space": space_of({"BLOCK": 1, "num_elements": 2})}, r"must set constexpr .*\['num_elements'\]"),
        ({"space": space_of({"BLOCK": 1, "BLOCKS": 2})}, r"must set constexpr .*\['BLOCKS'\]"),
        (
            {"space": space_of({"BLOCK": 1}, {"maxnreg": 64})},
            r"configuration must set \['BLOCK'\], got 'maxn",
        ),
        ({"space": space_of({"BLOCK": 1}, flags={"ALIGNED": True})}, r"flags .* in the key .*\['ALIGNED'\]"),
    ],
)
def test_what_does_not_fit_the_function_is_refused(changes, problem):
    with pytest.raises(ValueError, match=rf"kernel_toys:sum_kernel.*{problem}"):
        decorated(**changes)


def test_an_argument_that_triton_may_specialise_is_refused():
    with pytest.raises(ValueError, match=r"do_not_specialize must name .* it lacks out_ptr, size: binaries"):
        tuned(space=space_of({"BLOCK": 1}), key=("x_ptr",), outputs=("out_ptr",))(open_kernel)


def test_it_looks_like_the_function():
    kernel = decorated(space=space_of({"BLOCK": 1, "maxnreg": 64}))
    assert (kernel.fn, kernel.__name__, kernel.__module__) == (sum_kernel, "sum_kernel", "kernel_toys")
    assert kernel.constexprs == ("SQUARE", "BLOCK")
    assert "its bits" in kernel.__doc__
