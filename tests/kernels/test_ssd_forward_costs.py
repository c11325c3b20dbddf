"""SSD's forward kernels as they are compiled, and what they move."""

import re

import pytest
import torch

from automodel_kernels.ssd.forward import ssd_forward_triton
from automodel_kernels.ssd.tiles import CHUNK, Spans
from automodel_kernels.target_driver import target_driver
from ssd_inputs import ABSENT, cut, inputs

interpreted = [pytest.mark.interpreter, pytest.mark.usefixtures("narrow_floats", "poison")]


def expected_bytes(*, seqlen, heads, dim, state, segment, save):
    """What each launch loads and stores, by tensor, for one row, 16 bits, one group, and no option."""
    token, steps = 2 * seqlen * heads * dim, 4 * seqlen * heads
    projection, states = 2 * seqlen * state, 2 * heads * dim * state
    segments = seqlen // segment
    unread = 1 - 1 / segments
    return [
        {
            "loads": {"x": token * unread, "B": projection * unread, "dt": steps / 2, "A": 4 * heads},
            "stores": {"dts": steps, "decay": steps, "states": states * (segments - 1)},
        },
        {"loads": {"states": states * (segments - 1)}, "stores": {"states": states * (segments - 1)}},
        {
            "loads": {
                "x": token,
                "B": projection,
                "C": projection,
                "dts": steps,
                "decay": steps,
                "states": states * (segments - 1),
            },
            "stores": {"out": token, "chunk_states": states * (seqlen // CHUNK) * save},
        },
    ]


class TestTraffic:
    pytestmark = interpreted

    @pytest.mark.parametrize("save", [False, True])
    def test_every_launch_moves_each_byte_once(self, traffic, save):
        sizes = {"seqlen": 1024, "heads": 1, "dim": 32, "state": 32}
        given = inputs(**sizes, dtype=torch.bfloat16)
        given["dt"] = given["dt"].bfloat16()
        ssd_forward_triton(**given, save=save, need_final=False, spans=cut(seqlen=1024, segment=512))
        expected = expected_bytes(**sizes, segment=512, save=save)
        assert len(traffic) == len(expected) == 3
        for launch, each in zip(traffic, expected, strict=True):
            loads = {name: launch.loaded(f"{name}_ptr") for name in each["loads"]}
            stores = {name: launch.stored(f"{name}_ptr") for name in each["stores"]}
            assert {"loads": loads, "stores": stores} == each
            # The factors are all that is not named.
            assert launch.loads.distinct_bytes + launch.stores.distinct_bytes - sum(
                (loads | {f"{name} written": size for name, size in stores.items()}).values()
            ) in (0, 4)

    @pytest.mark.parametrize(("save", "most"), [(False, 1.85), (True, 2.0)])
    def test_at_full_size_that_is_at_most_twice_the_floor(self, save, most):
        sizes = {"seqlen": 8192, "heads": 80, "dim": 64, "state": 128}
        segment = Spans.of(torch.empty(1, 8192, 80, 64, device="meta"), None).segment
        launches = expected_bytes(**sizes, segment=segment, save=save)
        moved = sum(sum(each.values()) for launch in launches for each in launch.values())
        # x, dt, B and C read once, out written.
        floor = 2 * 8192 * (2 * 80 * 64 + 80 + 2 * 128)
        assert moved <= most * floor


def described(*, batch=1, seqlen=4096, heads=8, dim=32, state=16, dtype=torch.bfloat16):
    """The arguments of the forward without data; dt, A, D and dt_bias have the dtypes of training."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    five = {
        "x": empty(batch, seqlen, heads, dim),
        "dt": empty(batch, seqlen, heads),
        "A": empty(heads, dtype=torch.float32),
        "B": empty(batch, seqlen, 1, state),
        "C": empty(batch, seqlen, 1, state),
    }
    return five | ABSENT | {"dt_softplus": True, "save": True}


class TestBinaries:
    def test_shapes_strides_and_saving_are_no_reason_for_another(self, triton_cache):
        with target_driver("sm_90") as driver:
            ssd_forward_triton(**described())
            names = ["segment_states_kernel", "pass_states_kernel", "scan_kernel"]
            assert [binary.name for binary in driver.compiled] == names
            assert [launch.name for launch in driver.launches] == names
            for more in (
                described(batch=3, seqlen=1) | {"save": False},
                described(seqlen=70_001, heads=1) | {"need_final": False, "dt_limit": (0.001, 0.1)},
                described(batch=0),
                described(seqlen=0),
            ):
                ssd_forward_triton(**more)
            projection = torch.empty(2, 300, 8 * 32 + 2 * 16 + 8, dtype=torch.bfloat16, device="meta")
            x, B, C, dt = projection.split([8 * 32, 16, 16, 8], -1)
            views = {"x": x.unflatten(-1, (8, 32)), "B": B[:, :, None], "C": C[:, :, None], "dt": dt}
            ssd_forward_triton(**(described() | views))
            assert len(driver.compiled) == 3

    def test_an_option_costs_the_kernels_that_know_it(self, triton_cache):
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="meta")

        options = {
            "z": (empty(1, 4096, 8, 32), ["scan_kernel"]),
            "D": (empty(8, dtype=torch.float32), ["scan_kernel"]),
            "dt_bias": (empty(8, dtype=torch.float32), ["segment_states_kernel"]),
            "initial_states": (empty(1, 8, 32, 16, dtype=torch.float32), ["pass_states_kernel"]),
            "seq_idx": (empty(1, 4096, dtype=torch.int32), ["segment_states_kernel", "scan_kernel"]),
        }
        with target_driver("gfx942") as driver:
            ssd_forward_triton(**described())
            for name, (value, kernels) in options.items():
                before = len(driver.compiled)
                ssd_forward_triton(**(described() | {name: value}))
                assert [binary.name for binary in driver.compiled[before:]] == kernels, name

    def test_main_tiles_are_moved_16_bytes_at_a_time(self, triton_cache):
        moved = {}
        for shift in (0, 1):
            given = described(dim=64, state=128)
            wide = torch.empty(1, 4096, 8, 64 + 8 * shift + shift, dtype=torch.bfloat16, device="meta")
            given["x"] = wide[..., shift : shift + 64]
            before = set(triton_cache.rglob("*.ptx"))
            with target_driver("sm_90"):
                ssd_forward_triton(**given)
            made = set(triton_cache.rglob("*.ptx")) - before
            moved[shift] = {path.stem: path.read_text() for path in made}
        # 8 rows of 128 B a warp: x, B and C of 64 tokens are 8 + 16 + 16 KiB.
        copies = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (?:0x10|16)")
        assert len(copies.findall(moved[0]["scan_kernel"])) * 256 * 16 >= (8 + 16 + 16) * 1024
        assert len(copies.findall(moved[0]["segment_states_kernel"])) * 128 * 16 >= (8 + 16) * 1024
        assert "st.global.v4" in moved[0]["scan_kernel"]
        assert not copies.findall(moved[1]["scan_kernel"])
