"""Callables from their names: dotted paths, `file.py:symbol`, and the names that the reference system uses."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from automodel.config.env import user_modules_enabled

__all__ = ["InvalidFileTargetError", "load_module_from_file", "resolve_target", "set_enable_user_modules"]

logger = logging.getLogger(__name__)

_REFERENCE_PACKAGE = "nemo_automodel"
_TRANSLATIONS = (
    ("nemo_automodel.components.datasets.utils", "automodel.data.collate"),
    ("nemo_automodel.components.datasets.llm", "automodel.data"),
    ("nemo_automodel.components.loss.masked_ce", "automodel.training.loss"),
    ("nemo_automodel.components.loss", "automodel.training.loss"),
    ("nemo_automodel.components._peft", "automodel.peft"),
    ("nemo_automodel.components", "automodel"),
    ("nemo_automodel.recipes.llm.train_ft", "automodel.recipes.llm"),
    ("nemo_automodel.recipes.llm.benchmark", "automodel.recipes.benchmark"),
    ("nemo_automodel.recipes.vlm.finetune", "automodel.recipes.vlm"),
    ("nemo_automodel", "automodel"),
)
"""Module prefixes of the reference system and ours, the longest first."""

_STAND_INS = {"torchdata.stateful_dataloader.StatefulDataLoader": "automodel.data.loader.StatefulDataLoader"}
"""Classes of other packages in whose place ours is used: the same role and arguments, but exact resumption."""

_user_modules: bool | None = None


class InvalidFileTargetError(AssertionError, ValueError):
    """A `file.py:symbol` target whose file or symbol cannot be used."""


def set_enable_user_modules(allow: bool) -> None:
    """Allow (or forbid) private attributes in dotted targets, whatever NEMO_ENABLE_USER_MODULES says."""
    global _user_modules
    _user_modules = allow


def resolve_target(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the object that `target` names; a callable is returned unchanged.

    Resolving imports the module and so executes its top-level code: only trusted recipes should be loaded.

    Args:
        target: `pkg.module.symbol` (attributes may nest), or `path/file.py:symbol`, absolute or relative to the
            working folder.

    Raises:
        InvalidFileTargetError: the file does not exist, is no `.py` file, or the symbol is private or missing.
        ImportError: nothing callable has that name, a private attribute is not allowed, or the name belongs to a part
            of the reference system that is not available here yet.
    """
    if callable(target):
        return target
    if not isinstance(target, str):
        raise ImportError(f"target {target!r} is neither a name nor a callable")
    is_file = ":" in target or target.endswith(".py")
    resolved = _resolve_file_symbol(target) if is_file else _resolve_dotted(target)
    if not callable(resolved):
        raise ImportError(f"target {target!r} cannot be called: it is of type {type(resolved).__name__}")
    return resolved


def load_module_from_file(path: str | Path) -> ModuleType:
    """Execute a Python file as a module and return it.

    Raises:
        InvalidFileTargetError: `path` is no existing `.py` file.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise InvalidFileTargetError(f"{str(path)!r} is not an existing .py file")
    file = file.resolve()
    name = f"automodel_user_{file.stem}_{abs(hash(str(file))):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidFileTargetError(f"{str(path)!r} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _resolve_file_symbol(target: str) -> Callable[..., Any]:
    file, _, symbol = target.rpartition(":")
    if not file or not symbol:
        raise InvalidFileTargetError(f"target {target!r} must have the form path/file.py:symbol")
    if symbol.startswith("_") or "__" in symbol:
        raise InvalidFileTargetError(f"target {target!r}: the private symbol {symbol!r} cannot be used")
    module = load_module_from_file(file)
    try:
        resolved: Callable[..., Any] = getattr(module, symbol)
    except AttributeError:
        raise InvalidFileTargetError(f"target {target!r}: {file} has no symbol {symbol!r}") from None
    return resolved


def _resolve_dotted(target: str) -> Callable[..., Any]:
    allowed = user_modules_enabled() if _user_modules is None else _user_modules
    if not allowed and any(part.startswith("_") for part in _translate(target).split(".")):
        raise ImportError(
            f"target {target!r} names a private attribute; set NEMO_ENABLE_USER_MODULES=1 if that is intended"
        )
    name = _translate(target)
    if name in _STAND_INS:
        logger.info("%s: %s takes its place", name, _STAND_INS[name])
        return _import_dotted(_STAND_INS[name])
    try:
        return _import_dotted(name)
    except ImportError as error:
        if name != target:
            raise ImportError(f"target {target!r} is not available yet: there is no {name!r} here") from error
        raise ImportError(f"target {target!r} cannot be resolved: {error}") from error


def _translate(target: str) -> str:
    if not target.startswith(_REFERENCE_PACKAGE) or importlib.util.find_spec(_REFERENCE_PACKAGE) is not None:
        return target
    for theirs, ours in _TRANSLATIONS:
        if target == theirs or target.startswith(theirs + "."):
            return ours + target.removeprefix(theirs)
    return target


def _import_dotted(name: str) -> Callable[..., Any]:
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ImportError(f"{name!r} is not a dotted path such as package.module.symbol")
    for end in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:end])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise
        return _get_nested(module, parts[end:])
    raise ImportError(f"no module named {parts[0]!r}")


def _get_nested(module: ModuleType, names: list[str]) -> Callable[..., Any]:
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            owner = getattr(found, "__qualname__", getattr(found, "__name__", repr(found)))
            raise ImportError(f"{owner} has no attribute {name!r}") from None
    resolved: Callable[..., Any] = found
    return resolved
