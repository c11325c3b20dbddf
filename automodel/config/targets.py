"""Callables from their names: dotted paths, `file.py:symbol`, and the names that the reference system uses."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from automodel.config.env import user_modules_enabled
from automodel.config.names import did_you_mean
from automodel.config.reference_names import STAND_INS, translate_name

__all__ = ["InvalidFileTargetError", "load_module_from_file", "resolve_target", "set_enable_user_modules"]

_user_modules: bool | None = None
_file_lock = threading.RLock()


class InvalidFileTargetError(AssertionError, ValueError):
    """A `file.py:symbol` target whose file or symbol cannot be used."""


class _NothingThereError(ImportError):
    """No object has the name; errors that a module raises while it is imported are of other classes."""


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
        Exception: whatever the module raises while it is imported.
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
    """Execute a Python file as a module, once in this process, and return the module.

    Raises:
        InvalidFileTargetError: `path` is no existing `.py` file.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise InvalidFileTargetError(f"{str(path)!r} is not an existing .py file")
    file = file.resolve()
    import hashlib  # Few recipes need it.

    # The same name in every process, so that what the module defines can be pickled between ranks.
    digest = hashlib.sha256(str(file).encode("utf-8", errors="surrogateescape")).hexdigest()
    name = f"automodel_user_{file.stem}_{digest[:12]}"
    with _file_lock:
        if name in sys.modules:
            return sys.modules[name]
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
    names = symbol.split(".")
    if any(name.startswith("_") or "__" in name for name in names):
        raise InvalidFileTargetError(f"target {target!r}: the private symbol {symbol!r} cannot be used")
    module = load_module_from_file(file)
    try:
        return _get_nested(module, names)
    except _NothingThereError:
        hint = did_you_mean(symbol, _public_names(module))
        raise InvalidFileTargetError(f"target {target!r}: {file} has no symbol {symbol!r}{hint}") from None


def _resolve_dotted(target: str) -> Callable[..., Any]:
    ours = translate_name(target)
    name = ours or target
    allowed = user_modules_enabled() if _user_modules is None else _user_modules
    if not allowed and any(part.startswith("_") for part in name.split(".")):
        if ours is not None:
            raise ImportError(f"target {target!r} is not available yet")
        raise ImportError(
            f"target {target!r} names a private attribute; set NEMO_ENABLE_USER_MODULES=1 if that is intended"
        )
    if name in STAND_INS:
        import logging  # Loading a recipe has no need of it.

        logging.getLogger(__name__).info("%s: %s takes its place", name, STAND_INS[name])
        name = STAND_INS[name]
    try:
        return _import_dotted(name)
    except _NothingThereError as error:
        verdict = "cannot be resolved" if ours is None else "is not available yet"
        raise ImportError(f"target {target!r} {verdict}: {error}") from None


def _import_dotted(name: str) -> Callable[..., Any]:
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise _NothingThereError(f"{name!r} is not a dotted path such as package.module.symbol")
    for end in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:end])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise
        return _get_nested(module, parts[end:])
    raise _NothingThereError(f"no module named {parts[0]!r}")


def _get_nested(module: ModuleType, names: list[str]) -> Callable[..., Any]:
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            owner = getattr(found, "__qualname__", getattr(found, "__name__", repr(found)))
            hint = did_you_mean(name, _public_names(found))
            raise _NothingThereError(f"{owner} has no attribute {name!r}{hint}") from None
    resolved: Callable[..., Any] = found
    return resolved


def _public_names(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
