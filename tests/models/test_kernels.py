import pytest

from automodel.config.loader import ConfigNode
from automodel.config.sections import NotAvailableYetError, build_section
from automodel.models.kernels import KernelsConfig
from automodel_kernels.tuning.policy import Settings, current_settings, set_default_policy


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv("AUTOMODEL_TUNING", raising=False)
    yield
    monkeypatch.delenv("AUTOMODEL_TUNING", raising=False)
    set_default_policy(None)


def test_it_sets_what_holds_for_the_process():
    config = build_section(KernelsConfig, ConfigNode({"tuning": "static", "bit_exact": True}), "kernels")
    assert current_settings() == Settings()
    config.apply()
    assert current_settings() == Settings(default="static", default_bit_exact=True)
    build_section(KernelsConfig, None, "kernels").apply()
    assert current_settings() == Settings()


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"tuning": "fast"}, "kernels.tuning must be one of 'tune', 'static', 'error', got 'fast'"),
        ({"tuning": False}, "kernels.tuning must be one of"),
        ({"bit_exact": 1}, "kernels.bit_exact must be true or false, got 1"),
        ({"tunning": "tune"}, r"unknown key kernels.tunning \(did you mean 'tuning'"),
    ],
)
def test_a_mistake_is_named(section, problem):
    with pytest.raises(ValueError, match=problem):
        build_section(KernelsConfig, ConfigNode(section), "kernels")


def test_the_choice_of_kernels_is_not_built_yet():
    with pytest.raises(NotAvailableYetError, match=r"kernels\.backend: 'triton' is not available yet"):
        build_section(KernelsConfig, ConfigNode({"backend": "triton"}), "kernels")


def test_a_bad_variable_is_named_before_anything_changes(monkeypatch):
    monkeypatch.setenv("AUTOMODEL_TUNING", "fast")
    with pytest.raises(ValueError, match="AUTOMODEL_TUNING must be one of tune, static, error, got 'fast'"):
        KernelsConfig(tuning="static").apply()
    assert current_settings() == Settings()
