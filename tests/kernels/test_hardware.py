import pytest
import torch
import triton

from automodel_kernels.hardware import (
    TARGETS,
    Device,
    StandIn,
    can_measure,
    compiler_environment,
    current_device,
    current_target,
    device_slug,
    find_target,
    interpreter_enabled,
    launch_place,
    nearest_target,
    present_device,
    runs_triton,
    stand_in,
)

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb"),
        ("AMD Instinct MI300X / (gfx942:sramecc+)", "amd_instinct_mi300x_gfx942_sramecc"),
        ("../..//etc", "etc"),
    ],
)
def test_the_slug_is_one_plain_folder_name(name, slug):
    assert device_slug(name) == slug
    assert device_slug(slug) == slug


@pytest.mark.parametrize("name", ["", "  ", "../.."])
def test_a_name_without_letters_is_refused(name):
    with pytest.raises(ValueError, match="name must hold"):
        device_slug(name)


def test_the_interpreter_variable_is_read_at_every_call(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not interpreter_enabled()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreter_enabled()


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", " 1", "t", "2", "0", "", "off"])
def test_the_interpreter_variable_means_what_triton_takes_it_for(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreter_enabled() == triton.knobs.runtime.interpret


@pytest.mark.parametrize("name", list(TARGETS))
def test_triton_has_a_compiler_for_every_target_and_reads_its_8_bit_floats(name):
    from triton.compiler.compiler import make_backend

    target = find_target(name)
    assert target.name == name
    options = make_backend(target.gpu_target()).parse_options({})
    assert options.warp_size == target.warp_size if target.backend == "hip" else target.warp_size == 32
    names = {"float8_e5m2": "fp8e5", "float8_e4m3fn": "fp8e4nv"}
    assert {names[each] for each in target.float8} == set(names.values()) & set(options.supported_fp8_dtypes)


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"target must be one of sm_80, .*gfx942, got 'sm_75'"):
        find_target("sm_75")


@pytest.mark.parametrize(
    ("device", "capability", "shared_memory", "target"),
    [
        ("A100", (8, 0), 166_912, "sm_80"),
        ("RTX 3090", (8, 6), 101_376, "sm_89"),
        ("Jetson Orin", (8, 7), 166_912, "sm_80"),
        ("L4", (8, 9), 101_376, "sm_89"),
        ("H200", (9, 0), 232_448, "sm_90"),
        ("B200", (10, 0), 232_448, "sm_100"),
        ("B300", (10, 3), 232_448, "sm_100"),
        ("RTX 5090", (12, 0), 101_376, "sm_89"),
        ("V100", (7, 0), 98_304, "sm_89"),
    ],
)
def test_a_device_gets_the_newest_target_that_it_can_hold(device, capability, shared_memory, target):
    assert nearest_target(capability=capability, shared_memory=shared_memory).name == target


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 3), (12, 0)])
def test_a_device_gets_no_8_bit_float_that_triton_refuses_there(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    names = {"float8_e5m2": "fp8e5", "float8_e4m3fn": "fp8e4nv"}
    backend = make_backend(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    supported = backend.parse_options({}).supported_fp8_dtypes
    target = nearest_target(capability=capability, shared_memory=101_376)
    assert {names[each] for each in target.float8} == set(names.values()) & set(supported)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_missing_device_is_named():
    with pytest.raises(RuntimeError, match="device 0 is not there: PyTorch sees 0 GPUs"):
        present_device()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_present_device_describes_itself():
    device = present_device()
    assert device.slug == device_slug(torch.cuda.get_device_name(0))
    assert device.sm_count > 0
    assert device.shared_memory >= device.target.shared_memory
    assert current_target(torch.device("cuda")) is device.target
    assert runs_triton(torch.device("cuda", 0))


@pytest.mark.parametrize("device", [CPU, META])
def test_tensors_elsewhere_take_the_torch_path_and_have_no_target(monkeypatch, device):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton(device)
    with pytest.raises(RuntimeError, match=rf"device {device} has no Triton target"):
        current_target(device)


@pytest.mark.parametrize("device", [CPU, META])
def test_the_interpreter_takes_every_tensor_with_the_choices_of_sm_90(monkeypatch, device):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_triton(device)
    assert current_target(device).name == "sm_90"


def test_a_stand_in_takes_every_tensor_until_it_ends(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    target = find_target("gfx942")
    device = Device(name="AMD Toy", capability=(9, 4), sm_count=304, shared_memory=65_536, warp_size=64, target=target)
    value = StandIn(target=target, device=device, number=1_234_567)
    assert stand_in(value) is None
    try:
        assert runs_triton(META)
        assert current_target(CPU) is target
        assert current_device(CPU) is device
        assert launch_place(META) == 1_234_567
        assert not can_measure(CPU)
    finally:
        assert stand_in(None) is value
    assert not runs_triton(META)
    assert current_device(CPU) is None
    assert launch_place(torch.device("cuda", 3)) == 3
    assert launch_place(CPU) < 0


def test_a_compiling_child_does_not_interpret(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    environment = compiler_environment(cache_dir=None, python_path="a:b")
    assert "TRITON_INTERPRET" not in environment
    assert (environment["TRITON_CACHE_DIR"], environment["PYTHONPATH"]) == ("mine", "a:b")
    assert compiler_environment(cache_dir="theirs", python_path="")["TRITON_CACHE_DIR"] == "theirs"
