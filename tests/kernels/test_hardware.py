import pytest
import triton

from automodel_kernels.hardware import device_slug, interpreter_enabled


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
