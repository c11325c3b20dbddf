"""The rules of the house as functions over parsed sources; tests/architecture applies them.

A rule takes sources and returns one line per violation, `path:line: what`. It reads text with the standard library's
`ast` and imports nothing of ours.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "PACKAGES",
    "REPOSITORY",
    "Source",
    "environment_reads",
    "forbidden_imports",
    "import_cycles",
    "kernels_without_proof",
    "load_sources",
    "long_files",
    "long_functions",
    "misnamed_modules",
    "missing_annotations",
    "missing_docstrings",
    "missing_exports",
    "prints",
]

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("automodel", "automodel_kernels")
MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 60
MOST_JIT_LINES = 120
ENVIRONMENT_READERS = (
    "automodel.config.env",
    "automodel.caches.roots",
    "automodel.distributed.env",
    "automodel.observe.environment",
    "automodel_kernels.hardware",
)
ENVIRONMENT_WRITERS = (*ENVIRONMENT_READERS, "automodel.training.rng")
ALLOWED_UTILS = ("automodel.checkpoint.utils",)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file: `module` is its dotted name, `path` is relative to the repository."""

    module: str
    path: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST, what: str) -> str:
        """A violation at a node."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def load_sources(root: Path, folders: Iterable[str]) -> list[Source]:
    """Every Python file under the folders, parsed, in a stable order."""
    sources = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            sources.append(Source(module=module, path=str(relative), text=text, tree=ast.parse(text, str(path))))
    return sources


def import_cycles(sources: list[Source]) -> list[str]:
    """Cycles among imports that run when a module is imported; those under TYPE_CHECKING or in functions do not."""
    modules = {source.module for source in sources}
    edges = {source.module: set(_imported(source, modules)) - {source.module} for source in sources}
    cycles, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycle = trail[trail.index(module) :]
            cycles.append(f"import cycle: {' -> '.join([*cycle, module])}")
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return cycles


def _imported(source: Source, modules: set[str]) -> Iterator[str]:
    package = source.path.endswith("__init__.py")
    for node in _import_time_nodes(source.tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module=source.module, package=package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            yield from names & modules
            if base in modules and names - modules:
                yield base


def _absolute(node: ast.ImportFrom, *, module: str, package: bool) -> str:
    """The dotted name after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _import_time_nodes(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, in nested blocks and classes too."""
    for node in body:
        yield node
        if isinstance(node, FunctionNode):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _import_time_nodes(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _import_time_nodes(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _import_time_nodes(handler.body)


def forbidden_imports(sources: list[Source], *, names: Iterable[str]) -> list[str]:
    """Imports of the named top-level packages anywhere, in functions and under TYPE_CHECKING too."""
    forbidden, found = set(names), []
    for source in sources:
        for node in ast.walk(source.tree):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                targets = [node.module or ""]
            found += [source.at(node, f"imports {name}") for name in targets if name.split(".")[0] in forbidden]
    return found


def long_files(sources: list[Source]) -> list[str]:
    """Files of more than 500 lines."""
    lengths = [(source, source.text.count("\n")) for source in sources]
    return [f"{source.path}:1: {length} lines" for source, length in lengths if length > MOST_FILE_LINES]


def long_functions(sources: list[Source]) -> list[str]:
    """Functions with bodies of more than 60 lines, or 120 if jit; signatures and docstrings do not count."""
    found = []
    for source in sources:
        for node in _functions(source):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            length = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
            if length > (MOST_JIT_LINES if is_jit(node) else MOST_FUNCTION_LINES):
                found.append(source.at(node, f"{node.name} has {length} lines"))
    return found


def _functions(source: Source) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(source.tree) if isinstance(node, FunctionNode))


def is_jit(node: FunctionNode) -> bool:
    """Whether a decorator is `triton.jit`, with or without arguments, or a `jit` imported from it."""
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(ast.unparse(each) in {"triton.jit", "jit"} for each in decorators)


def environment_reads(sources: list[Source]) -> list[str]:
    """Uses of os.environ, os.getenv, os.putenv and os.unsetenv outside the modules that own them."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for source in sources:
        if source.module in ENVIRONMENT_READERS:
            continue
        writes = _environment_writes(source.tree) if source.module in ENVIRONMENT_WRITERS else set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
                if id(node) not in writes:
                    found.append(source.at(node, f"uses os.{node.attr}"))
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [source.at(node, f"imports {each.name} from os") for each in node.names if each.name in names]
    return found


def _environment_writes(tree: ast.Module) -> set[int]:
    """The `os.environ` nodes of statements such as `os.environ[name] = value`, and of `os.environ.setdefault(...)`."""
    writes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            writes.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
            writes.add(id(node.func.value))
    return writes


def prints(sources: list[Source]) -> list[str]:
    """Calls of print outside automodel.cli."""
    return [
        source.at(node, "calls print")
        for source in sources
        if not f"{source.module}.".startswith("automodel.cli.")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def misnamed_modules(sources: list[Source]) -> list[str]:
    """Modules and packages called utils or helpers, or the like."""
    vague = {"util", "utils", "utilities", "helper", "helpers", "misc"}
    found = []
    for source in sources:
        bad = vague & {part.strip("_") for part in source.module.split(".")}
        if bad and source.module not in ALLOWED_UTILS:
            found.append(f"{source.path}:1: is called {', '.join(sorted(bad))}")
    return found


def missing_docstrings(sources: list[Source]) -> list[str]:
    """Modules without a docstring."""
    return [f"{each.path}:1: has no docstring" for each in sources if ast.get_docstring(each.tree) is None]


def missing_exports(sources: list[Source]) -> list[str]:
    """Public modules, other than __init__ and __main__, that do not assign __all__."""
    found = []
    for source in sources:
        name = Path(source.path).stem
        if name.startswith("_"):
            continue
        targets = [target for node in source.tree.body for target in _assigned(node)]
        if "__all__" not in targets:
            found.append(f"{source.path}:1: has no __all__")
    return found


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def missing_annotations(sources: list[Source]) -> list[str]:
    """Functions outside jit bodies whose arguments or result have no annotation."""
    found = []
    for source in sources:
        exempt = {id(inner) for node in _functions(source) if is_jit(node) for inner in ast.walk(node)}
        for node in _functions(source):
            if id(node) in exempt:
                continue
            spec = node.args
            named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
            arguments = [*named, *(each for each in (spec.vararg, spec.kwarg) if each is not None)]
            bare = [each.arg for each in arguments if each.annotation is None and each.arg not in {"self", "cls"}]
            if bare or (node.returns is None and node.name != "__init__"):
                found.append(source.at(node, f"{node.name} lacks annotations: {', '.join(bare) or 'its result'}"))
    return found


def kernels_without_proof(root: Path) -> list[str]:
    """Files of automodel_kernels with a kernel and without a test and a bench that begin with its stem.

    A kernel is a jit function whose name says so. The files of a folder are a family, and its stem is theirs.
    """
    found = []
    for source in load_sources(root, ["automodel_kernels"]):
        if not any(is_jit(node) and node.name.endswith("_kernel") for node in _functions(source)):
            continue
        path = Path(source.path)
        family = path.parent.name
        stem = path.stem if family == "automodel_kernels" else family
        for folder, name in (("tests/kernels", f"test_{stem}*.py"), ("bench", f"bench_{stem}*.py")):
            if not any((root / folder).rglob(name)):
                found.append(f"{source.path}:1: has no {folder}/**/{name}")
    return found
