import collections
import functools
import logging
import os.path
import subprocess
import sys

import pytest

from automodel.config import reference_names, targets
from automodel.config.targets import (
    InvalidFileTargetError,
    load_module_from_file,
    resolve_target,
    set_enable_user_modules,
)


@pytest.fixture(autouse=True)
def switch_off(monkeypatch):
    """Every test starts without the switch, and what it sets is undone."""
    monkeypatch.setattr(targets, "_user_modules", None)
    monkeypatch.delenv("NEMO_ENABLE_USER_MODULES", raising=False)


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "user_code.py"
    file.write_text(
        "VALUE = 3\n\ndef double(x):\n    return 2 * x\n\ndef _hidden():\n    pass\n\ndef a__b():\n    pass\n"
    )
    return file


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    """A package on sys.path whose modules fail in the ways that real ones do."""
    package = tmp_path / "am_user_package"
    package.mkdir()
    (package / "__init__.py").write_text("def _private():\n    return 'private'\n")
    (package / "needs.py").write_text("import am_absent_dependency\n")
    (package / "broken.py").write_text("raise RuntimeError('at import')\n")
    (package / "_inner.py").write_text("def public():\n    return 'public'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "am_user_package"
    for name in [name for name in sys.modules if name.partition(".")[0] == "am_user_package"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("collections.OrderedDict", collections.OrderedDict),
        ("collections.OrderedDict.fromkeys", collections.OrderedDict.fromkeys),
        ("os.path.join", os.path.join),
        ("builtins.int", int),
    ],
)
def test_dotted_paths(name, expected):
    assert resolve_target(name) == expected


def test_a_callable_is_passed_through():
    for function in (len, int, functools.partial(int, base=2)):
        assert resolve_target(function) is function


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("am_no_such_package.thing", "'am_no_such_package.thing' cannot be resolved: no module named 'am_no_such"),
        ("collections.NoSuch", "'collections.NoSuch' cannot be resolved: collections has no attribute 'NoSuch'"),
        ("collections.OrderedDict.nothing", "OrderedDict has no attribute 'nothing'"),
        ("collections", "'collections' is not a dotted path such as package.module.symbol"),
        ("", "is not a dotted path"),
        ("a b.c", "'a b.c' is not a dotted path"),
        ("collections..x", "is not a dotted path"),
        ("os.sep", "'os.sep' cannot be called: it is of type str"),
        ("os.path", "'os.path' cannot be called: it is of type module"),
    ],
)
def test_an_unresolvable_target_is_an_import_error_that_names_it(name, message):
    with pytest.raises(ImportError) as caught:
        resolve_target(name)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, 5, ["a.b"]])
def test_a_target_that_is_no_name_is_an_import_error(value):
    with pytest.raises(ImportError, match="neither a name nor a callable"):
        resolve_target(value)


def test_errors_inside_the_imported_module_are_not_hidden(user_package):
    with pytest.raises(ImportError, match="No module named 'am_absent_dependency'"):
        resolve_target(f"{user_package}.needs.thing")
    with pytest.raises(RuntimeError, match="at import"):
        resolve_target(f"{user_package}.broken.thing")


@pytest.mark.parametrize("name", ["_private", "_inner.public"])
def test_private_attributes_need_the_switch(user_package, monkeypatch, name):
    target = f"{user_package}.{name}"
    with pytest.raises(ImportError, match=f"{target}' names a private attribute.*NEMO_ENABLE_USER_MODULES"):
        resolve_target(target)
    monkeypatch.setenv("NEMO_ENABLE_USER_MODULES", "1")
    assert callable(resolve_target(target))
    set_enable_user_modules(False)
    with pytest.raises(ImportError, match="private attribute"):
        resolve_target(target)
    monkeypatch.delenv("NEMO_ENABLE_USER_MODULES")
    set_enable_user_modules(True)
    assert callable(resolve_target(target))


def test_dunder_attributes_are_private():
    with pytest.raises(ImportError, match="private attribute"):
        resolve_target("builtins.int.__add__")


def test_a_symbol_of_a_file(user_file, monkeypatch):
    assert resolve_target(f"{user_file}:double")(4) == 8
    monkeypatch.chdir(user_file.parent)
    assert resolve_target("user_code.py:double")(4) == 8
    assert resolve_target("./user_code.py:double")(4) == 8


def test_a_symbol_of_a_file_can_be_pickled(user_file):
    function = resolve_target(f"{user_file}:double")
    assert getattr(sys.modules[function.__module__], "double") is function  # noqa: B009


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}:_hidden", "the private symbol '_hidden' cannot be used"),
        ("{file}:__name__", "the private symbol '__name__' cannot be used"),
        ("{file}:a__b", "the private symbol 'a__b' cannot be used"),
        ("{file}:absent", "has no symbol 'absent'"),
        ("{file}:", "must have the form path/file.py:symbol"),
        ("{file}", "must have the form path/file.py:symbol"),
        (":double", "must have the form path/file.py:symbol"),
        ("{folder}/absent.py:double", "absent.py' is not an existing .py file"),
        ("{folder}/notes.txt:double", "notes.txt' is not an existing .py file"),
        ("{folder}:double", "is not an existing .py file"),
    ],
)
@pytest.mark.parametrize("error_class", [AssertionError, ValueError])
def test_a_bad_file_target_is_both_errors_that_callers_catch(user_file, target, message, error_class):
    (user_file.parent / "notes.txt").write_text("def double(x): pass\n")
    set_enable_user_modules(True)  # It opens dotted paths only.
    with pytest.raises(error_class) as caught:
        resolve_target(target.format(file=user_file, folder=user_file.parent))
    assert isinstance(caught.value, InvalidFileTargetError)
    assert message in str(caught.value)


def test_a_symbol_of_a_file_must_be_callable(user_file):
    with pytest.raises(ImportError, match=r"user_code\.py:VALUE' cannot be called: it is of type int"):
        resolve_target(f"{user_file}:VALUE")


def test_load_module_from_file(user_file):
    assert load_module_from_file(user_file).VALUE == 3
    with pytest.raises(InvalidFileTargetError, match="not an existing"):
        load_module_from_file(user_file.with_name("absent.py"))


def test_a_file_that_fails_leaves_no_module_behind(user_file):
    user_file.write_text("raise KeyError('inside')\n")
    before = set(sys.modules)
    with pytest.raises(KeyError, match="inside"):
        load_module_from_file(user_file)
    assert not {name for name in set(sys.modules) - before if "user_code" in name}


@pytest.mark.parametrize(
    ("theirs", "module", "name"),
    [
        ("nemo_automodel.components.training.rng.StatefulRNG", "automodel.training.rng", "StatefulRNG"),
        (
            "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
            "automodel.training.loss",
            "MaskedCrossEntropy",
        ),
        ("nemo_automodel.components.datasets.utils.default_collater", "automodel.data.collate", "default_collater"),
        ("nemo_automodel.components.config.loader.ConfigNode", "automodel.config.loader", "ConfigNode"),
    ],
)
def test_names_of_the_reference_system_are_ours(theirs, module, name):
    assert resolve_target(theirs) is getattr(sys.modules[module], name)


def test_the_model_classes_of_the_reference_system_are_ours():
    import automodel

    ours = automodel.NeMoAutoModelForCausalLM.from_pretrained
    assert resolve_target("nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained") == ours
    assert resolve_target("nemo_automodel.NeMoAutoConfig.from_pretrained") == automodel.NeMoAutoConfig.from_pretrained


@pytest.mark.parametrize(
    "target",
    [
        "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
        "nemo_automodel.components.datasets.llm.hellaswag.HellaSwag",
        "nemo_automodel.components._peft.lora.PeftConfig",
        "nemo_automodel.components.training.rng.Statefull",
        "nemo_automodel._diffusers.auto_pipeline.Pipeline",
        "nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM",
        "nemo_automodel.NoSuchThing",
    ],
)
def test_what_is_not_built_yet_says_so(target):
    with pytest.raises(ImportError, match=f"target '{target}' is not available yet"):
        resolve_target(target)


def test_a_name_that_only_begins_like_the_reference_system_is_left_alone():
    with pytest.raises(ImportError, match="cannot be resolved: no module named 'nemo_automodels'"):
        resolve_target("nemo_automodels.components.training.rng.StatefulRNG")


def test_an_installed_reference_system_is_used_itself(tmp_path):
    package = tmp_path / "nemo_automodel" / "components" / "training"
    package.mkdir(parents=True)
    (package / "rng.py").write_text("class StatefulRNG:\n    theirs = True\n")
    code = (
        "from automodel.config.targets import resolve_target\n"
        "assert resolve_target('nemo_automodel.components.training.rng.StatefulRNG').theirs\n"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"], check=True)


def test_our_loader_stands_in_for_torchdatas(caplog):
    from automodel.data.loader import StatefulDataLoader

    with caplog.at_level(logging.INFO, logger="automodel.config.targets"):
        resolved = resolve_target("torchdata.stateful_dataloader.StatefulDataLoader")
    assert resolved is StatefulDataLoader
    assert "torchdata.stateful_dataloader.StatefulDataLoader" in caplog.text


def test_a_file_is_loaded_once_however_it_is_named(tmp_path, monkeypatch):
    file = tmp_path / "counting.py"
    file.write_text(
        "from pathlib import Path\n"
        "marks = Path(__file__).with_name('marks')\n"
        "marks.write_text(marks.read_text() + 'x' if marks.exists() else 'x')\n"
        "class Made:\n    @classmethod\n    def make(cls):\n        return cls()\n"
        "def make():\n    return Made()\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(file)
    made = resolve_target(f"{file}:Made")
    for name in ("counting.py:Made", "./counting.py:Made", "link.py:Made"):
        assert resolve_target(name) is made
    assert isinstance(resolve_target("counting.py:make")(), made)
    assert isinstance(resolve_target("counting.py:Made.make")(), made)
    assert load_module_from_file("counting.py") is load_module_from_file(file)
    assert (tmp_path / "marks").read_text() == "x"


def test_a_file_that_failed_is_tried_again(user_file):
    good = user_file.read_text()
    user_file.write_text("raise KeyError('inside')\n")
    with pytest.raises(KeyError):
        resolve_target(f"{user_file}:double")
    user_file.write_text(good)
    assert resolve_target(f"{user_file}:double")(4) == 8


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("collections.OrderedDcit", "(did you mean 'OrderedDict'?)"),
        ("nemo_automodel.components.training.rng.StatefullRNG", "(did you mean 'StatefulRNG'?)"),
        ("{file}:duoble", "(did you mean 'double'?)"),
    ],
)
def test_the_nearest_name_is_told(user_file, target, hint):
    with pytest.raises((ImportError, ValueError)) as caught:
        resolve_target(target.format(file=user_file))
    assert str(caught.value).endswith(hint)


def test_a_translated_target_whose_own_import_fails_keeps_its_error(tmp_path, monkeypatch):
    """Ours is there, but something that it needs is not."""
    monkeypatch.setitem(reference_names._TRANSLATIONS, "nemo_automodel.components.zzz", "am_ours")
    (tmp_path / "am_ours").mkdir()
    (tmp_path / "am_ours" / "needs.py").write_text("import am_absent_dependency\n")
    (tmp_path / "am_ours" / "broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'am_absent_dependency'$"):
        resolve_target("nemo_automodel.components.zzz.needs.thing")
    with pytest.raises(RuntimeError, match="at import"):
        resolve_target("nemo_automodel.components.zzz.broken.thing")
    with pytest.raises(ImportError, match="is not available yet"):
        resolve_target("nemo_automodel.components.zzz.absent.thing")
