"""Imports every module of some packages and reports what those imports touch: environment, GPU, files.

    python import_effects.py ROOT PACKAGE...

An access counts when the code that makes it, the standard library's wrappers aside, is a file of these packages: what
other libraries do while they are imported or called is theirs, such as what Triton reads when it decorates a kernel.
Starting a GPU counts wherever it comes from. Prints one line per access.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Observer", "import_all", "main"]

WRAPPERS = frozenset(
    {"os", "_collections_abc", "collections.abc", "codecs", "io", "pathlib", "posixpath", "shutil", "tempfile"}
)
FILE_EVENTS = frozenset({"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.scandir", "subprocess.Popen"})


class Observer:
    """Collects accesses that come from files below some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._prefixes = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
        self.accesses: list[str] = []

    def note(self, what: str, *, always: bool = False) -> None:
        """Notes an access if the code that makes it is ours, or in any case."""
        frame = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename == __file__ or frame.f_globals.get("__name__") in WRAPPERS
        ):
            frame = frame.f_back
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("?", 0)
        if always or file.startswith(self._prefixes):
            self.accesses.append(f"{file}:{line}: {what}")

    def watch_environment(self) -> None:
        """Notes every read and write of os.environ, whoever holds it."""
        kind: Any = type(os.environ)
        observer = self

        class Watched(kind):
            def __getitem__(self, name: str) -> str:
                observer.note(f"reads the environment variable {name}")
                return super().__getitem__(name)

            def __setitem__(self, name: str, value: str) -> None:
                observer.note(f"sets the environment variable {name}")
                super().__setitem__(name, value)

            def __iter__(self) -> Iterator[str]:
                observer.note("reads the whole environment")
                return super().__iter__()

        os.environ.__class__ = Watched

    def watch_gpu(self) -> None:
        """Notes questions to the CUDA runtime and every start of it, or of Triton's driver."""
        for name in ("is_available", "device_count", "current_device", "get_device_name", "get_device_properties"):
            self._wrap(torch.cuda, name, always=False)
        self._wrap(torch.cuda, "_lazy_init", always=True)
        observer = self

        def active(config: object) -> None:
            observer.note("asks Triton for its active driver", always=True)
            raise RuntimeError("no driver while importing")

        type(triton.runtime.driver).active = property(active)

    def _wrap(self, module: Any, name: str, *, always: bool) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.note(f"calls {module.__name__}.{name}", always=always)
            return original(*args, **kwargs)

        setattr(module, name, watched)

    def watch_files(self) -> None:
        """Notes files opened, folders listed or changed, and processes started."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in FILE_EVENTS:
                self.note(f"{event} {arguments[0]!r}")

        sys.addaudithook(hook)


def import_all(package: str) -> None:
    """Imports a package and every module in it, except __main__."""
    module = importlib.import_module(package)
    for info in pkgutil.iter_modules(module.__path__, f"{package}."):
        if info.ispkg:
            import_all(info.name)
        elif not info.name.endswith(".__main__"):
            importlib.import_module(info.name)


def main(root: str, *packages: str) -> None:
    """Observes the packages below `root` and prints the accesses."""
    sys.path.insert(0, root)
    observer = Observer(Path(root, package) for package in packages)
    observer.watch_environment()
    observer.watch_gpu()
    observer.watch_files()
    for package in packages:
        import_all(package)
    for access in observer.accesses:
        print(access)


if __name__ == "__main__":
    main(*sys.argv[1:])
