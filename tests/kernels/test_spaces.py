import pytest
import torch

from automodel_kernels.hardware import TARGETS, find_target
from automodel_kernels.tuning.candidates import Candidates, Config, Space

SMALL, LARGE = Config(meta={"BLOCK": 64, "A": 1}, num_warps=2), Config(meta={"BLOCK": 256}, num_warps=8, num_stages=3)


def test_a_configuration_gives_launch_options_and_one_label():
    assert LARGE.options == {"BLOCK": 256, "num_warps": 8, "num_stages": 3}
    assert SMALL.label == "A=1 BLOCK=64 warps=2 stages=1"
    assert Config(meta={"A": 1, "BLOCK": 64}, num_warps=2).label == SMALL.label


def test_the_first_candidates_that_match_count():
    space = Space(
        name="toy",
        candidates=(
            Candidates(configs=(SMALL,), targets=("sm_80", "sm_89"), dtypes=(torch.float32,), accepted_stack=16),
            Candidates(configs=(SMALL,), flags={"ALIGNED": False}),
            Candidates(configs=(LARGE, SMALL), dtypes=(torch.bfloat16, torch.float32)),
        ),
    )

    def found(target, dtype, **flags):
        return space.find(find_target(target), dtype=dtype, flags=flags)

    assert found("sm_80", torch.float32, ALIGNED=False).accepted_stack == 16
    assert found("sm_90", torch.float32, ALIGNED=False) is space.candidates[1]
    assert found("sm_90", torch.float32, ALIGNED=True, OTHER=1) is space.candidates[2]
    assert found("sm_80", torch.bfloat16) is space.candidates[2], "a flag that is not given does not match"
    assert found("sm_90", torch.float16, ALIGNED=True) is None
    assert space.get(find_target("gfx942"), dtype=torch.bfloat16, flags={}).configs[0] is LARGE


def test_a_launch_that_is_not_claimed_is_named():
    space = Space(name="toy", candidates=(Candidates(configs=(SMALL,), targets=("sm_80",)),))
    with pytest.raises(ValueError, match=r"toy has no configuration for torch.float32 on sm_90 with \{'A': 1\}"):
        space.get(find_target("sm_90"), dtype=torch.float32, flags={"A": 1})


def test_candidates_are_for_every_target_and_type_unless_told():
    everywhere = Candidates(configs=(SMALL,))
    assert all(everywhere.match(target, dtype=torch.int8, flags={}) for target in TARGETS.values())
    assert everywhere.accepted_stack == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"configs": ()}, "configs must hold at least one configuration"),
        ({"configs": (SMALL, SMALL)}, "configs must differ"),
        ({"configs": (SMALL,), "targets": ("sm_91",)}, "target must be one of .* got 'sm_91'"),
        ({"configs": (SMALL,), "accepted_stack": -1}, "accepted_stack must not be negative, got -1"),
    ],
)
def test_senseless_candidates_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Candidates(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_warps": 3}, "num_warps must be a power of two up to 32, got 3"), ({"num_stages": 0}, "num_stages must be")],
)
def test_senseless_configurations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Config(meta={}, **arguments)
