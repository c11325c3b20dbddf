import threading

import pytest

from automodel_kernels.tuning.policy import (
    Settings,
    current_settings,
    resolve_policy,
    set_default_policy,
    tuning_policy,
)


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv("AUTOMODEL_TUNING", raising=False)
    yield
    monkeypatch.delenv("AUTOMODEL_TUNING", raising=False)
    set_default_policy(None)


def resolved(*, measurable=True):
    return resolve_policy(current_settings(), measurable=measurable)


def test_the_caller_comes_before_the_recipe_before_the_environment_before_the_default(monkeypatch):
    assert resolved() == "tune"
    monkeypatch.setenv("AUTOMODEL_TUNING", "error")
    assert resolved() == "error"
    set_default_policy("static")
    assert resolved() == "static"
    with tuning_policy("tune"):
        assert resolved() == "tune"
        with tuning_policy("error"):
            assert resolved() == "error"
        assert resolved() == "tune"
    assert resolved() == "static"
    set_default_policy(None)
    assert resolved() == "error"


def test_where_nothing_can_be_measured_only_the_caller_counts(monkeypatch):
    monkeypatch.setenv("AUTOMODEL_TUNING", "tune")
    set_default_policy("error")
    assert resolved(measurable=False) == "static"
    with tuning_policy("tune"):
        assert resolved(measurable=False) == "tune"


def test_an_empty_variable_asks_for_nothing_and_a_bad_one_is_named(monkeypatch):
    monkeypatch.setenv("AUTOMODEL_TUNING", "")
    assert resolved() == "tune"
    monkeypatch.setenv("AUTOMODEL_TUNING", "tuen")
    message = "the environment variable AUTOMODEL_TUNING must be one of tune, static, error, got 'tuen'"
    with pytest.raises(ValueError, match=message):
        resolved()
    with pytest.raises(ValueError, match=message):
        set_default_policy("static")
    assert current_settings() == Settings()


def test_a_policy_that_does_not_exist_changes_nothing():
    with pytest.raises(ValueError, match="policy must be one of tune, static, error, got 'best'"):
        set_default_policy("best")
    with pytest.raises(ValueError, match="got None"), tuning_policy(None):
        pass
    assert current_settings() == Settings()


def test_the_gate_is_the_callers_then_the_recipes():
    assert not current_settings().bit_exact
    set_default_policy(None, bit_exact=True)
    assert current_settings().bit_exact
    with tuning_policy("tune"):
        assert current_settings().bit_exact
        with tuning_policy("tune", bit_exact=False):
            assert not current_settings().bit_exact
            with tuning_policy("static"):
                assert not current_settings().bit_exact
    assert current_settings().bit_exact


def test_it_ends_with_an_error_and_keeps_what_was_set_inside():
    with pytest.raises(ZeroDivisionError), tuning_policy("error"):
        set_default_and_fail()
    assert current_settings() == Settings(default="static")


def test_it_holds_in_other_threads():
    seen = []
    with tuning_policy("error"):
        thread = threading.Thread(target=lambda: seen.append(resolved()))
        thread.start()
        thread.join()
    assert seen == ["error"]


def set_default_and_fail():
    set_default_policy("static")
    raise ZeroDivisionError
