import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kernel_toys
from automodel_kernels.hardware import find_target
from automodel_kernels.tuning import registry
from automodel_kernels.tuning.registry import Cost, Kernel, Launch, Pointer

IMPORTS = """
import sys
import automodel_kernels.tuning.registry as registry
assert registry.registered() == ()
loaded = {name for name in sys.modules if name.startswith("automodel_kernels")}
assert loaded == {"automodel_kernels", "automodel_kernels.tuning", "automodel_kernels.tuning.registry"}, loaded
ops = registry.load_all()
assert "automodel_kernels.resources" in sys.modules
assert ops == registry.registered()
assert [op.name for op in ops] == sorted(op.name for op in ops)
"""


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_ops", {})


def test_importing_the_registry_imports_no_operator_and_load_all_imports_them_all():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("empty_registry")
def test_what_is_registered_is_found_sorted_by_name():
    other = replace(kernel_toys.SCALE, name="another")
    assert registry.register(kernel_toys.SCALE) is kernel_toys.SCALE
    registry.register(other)
    assert registry.registered() == (other, kernel_toys.SCALE)
    assert registry.get("scale") is kernel_toys.SCALE
    with pytest.raises(ValueError, match=r"name must be a registered operator \(another, scale\), got 'scales'"):
        registry.get("scales")


@pytest.mark.usefixtures("empty_registry")
def test_a_module_may_replace_its_own_operator_but_not_anothers():
    registry.register(kernel_toys.SCALE)
    anew = replace(kernel_toys.SCALE)
    assert registry.register(anew) is registry.get("scale")
    with pytest.raises(ValueError, match=r"name 'scale' is taken by kernel_toys, and builtins wants it too"):
        registry.register(replace(kernel_toys.SCALE, run=len))


def test_a_launch_keeps_no_data():
    tensor = torch.empty(9, dtype=torch.float16)
    launch = Launch(
        label="x",
        dtype=torch.float16,
        arguments={
            "a": tensor,
            "b": tensor[1:],
            "c": torch.empty(4, device="meta"),
            "d": torch.int64,
            "e": 3,
            "f": None,
        },
    )
    assert launch.arguments == {
        "a": Pointer(dtype=torch.float16),
        "b": Pointer(dtype=torch.float16, aligned=False),
        "c": Pointer(dtype=torch.float32),
        "d": Pointer(dtype=torch.int64),
        "e": 3,
        "f": None,
    }


def test_a_kernel_claims_the_launches_that_its_space_knows():
    (kernel,) = kernel_toys.SCALE.kernels
    claimed = list(kernel.claimed(find_target("sm_80")))
    assert [launch.label for launch, _ in claimed] == ["float32", "float32 square", "bfloat16", "bfloat16 square"]
    assert [len(found.configs) for _, found in claimed] == [1, 2, 1, 2]
    greedy = kernel_toys.greedy_op(targets=("sm_89",)).kernels[0]
    assert list(greedy.claimed(find_target("sm_80"))) == []


def test_launches_with_one_label_are_refused():
    (kernel,) = kernel_toys.SCALE.kernels
    twice = Kernel(function=kernel.function, launches=lambda: [*kernel.launches()] * 2)
    with pytest.raises(ValueError, match="scale_kernel: the labels of launches must differ"):
        list(twice.claimed(find_target("sm_80")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ()}, "scale: kernels must be there"),
        ({"kernels": kernel_toys.SCALE.kernels * 2}, "scale: kernels must be there and have different names"),
        ({"gradients": ("x",)}, "scale: gradients and backward_cost go together"),
        ({"backward_cost": lambda: Cost(moved_bytes=1)}, "scale: gradients and backward_cost go together"),
    ],
)
def test_an_incomplete_operator_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(kernel_toys.SCALE, **changes)


def test_a_launch_of_another_type_than_its_keys_first_tensor_is_refused():
    (kernel,) = kernel_toys.SCALE.kernels
    wrong = Kernel(function=kernel.function, launches=lambda: [replace(kernel.launches()[0], dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"scale_kernel: the launch 'float32' has .*float64, and its x_ptr .*float32"):
        list(wrong.claimed(find_target("sm_80")))
