"""What every kernel takes of every GPU in every configuration: a committed table, made by compiling for each target.

`python -m automodel_kernels.resources` (`make tables`) writes `resources.json` beside this module. A kernel with the
same source and launches keeps its rows, so that only what changed is compiled and shows up as a difference.
`table_problems` finds what is stale, does not fit the target that a space claims, or uses more stack than declared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton

from automodel_kernels.aot import Resources, compile_pairs, launch_request, usable_cores
from automodel_kernels.hardware import TARGETS, interpreter_enabled
from automodel_kernels.tuning import registry
from automodel_kernels.tuning.sources import add_function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from automodel_kernels.aot import Compiled, Request
    from automodel_kernels.hardware import Target
    from automodel_kernels.tuning.candidates import Candidates
    from automodel_kernels.tuning.registry import Kernel, Op

__all__ = [
    "TABLE",
    "Entry",
    "Row",
    "Table",
    "Variant",
    "build_table",
    "default_sample",
    "fit_problem",
    "load_table",
    "main",
    "save_table",
    "source_hash",
    "table_problems",
    "variants",
]

logger = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("resources.json")
MOST_TENSOR_MEMORY = 512  # columns; Triton's compiler goes beyond without complaint


@dataclass(frozen=True, kw_only=True)
class Row:
    """One binary of the table.

    Attributes:
        resources: what it takes; None if it does not compile.
        cpu_seconds: processor time of compiling it, on the machine that made the table.
        error: empty, or why it does not compile.
    """

    resources: Resources | None = None
    cpu_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One kernel of the table.

    Attributes:
        source: hash of all that its binaries are made from; see `source_hash`.
        rows: by `Variant.label`.
    """

    source: str
    rows: dict[str, Row]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table.

    Attributes:
        triton: the version that compiled it.
        entries: by `operator/kernel`.
    """

    triton: str
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A binary that a space asks for.

    Attributes:
        label: its row's name: target, launch, configuration.
        target: the GPU.
        request: compiles it.
        candidates: where its configuration stands.
        launch: the launch's label.
        default: whether it is what its launch takes where nothing is tuned.
    """

    label: str
    target: Target
    request: Request
    candidates: Candidates
    launch: str
    default: bool


def variants(kernel: Kernel, target: Target) -> Iterator[Variant]:
    """Every binary that a kernel's space asks for on a target, launch by launch, each launch's default one first."""
    for launch, found in kernel.claimed(target):
        for place, config in enumerate(found.configs):
            label = f"{target.name} | {launch.label} | {config.label}"
            yield Variant(
                label=label,
                target=target,
                request=launch_request(kernel, launch, config, label=f"{kernel.name} {label}"),
                candidates=found,
                launch=launch.label,
                default=place == 0,
            )


def default_sample(kernel: Kernel, *, turn: int) -> list[Variant]:
    """Some defaults of a kernel: of every launch that on one target, and of the first launch those on all targets.

    Compiling the defaults of all launches for all targets takes most of a minute. The targets take turns: as many
    consecutive turns as there are targets have every default in one of them.

    Args:
        kernel: the kernel.
        turn: which target is whose; the same sample for the same number.
    """
    chosen: dict[str, Variant] = {}
    by_launch: dict[str, list[Variant]] = {}
    for target in TARGETS.values():
        defaults = [variant for variant in variants(kernel, target) if variant.default]
        chosen |= {variant.label: variant for variant in defaults[:1]}
        for variant in defaults:
            by_launch.setdefault(variant.launch, []).append(variant)
    for number, claimed in enumerate(by_launch.values()):
        variant = claimed[(turn + number) % len(claimed)]
        chosen[variant.label] = variant
    return list(chosen.values())


def source_hash(kernel: Kernel) -> str:
    """A hash of a kernel's source, of all jit functions and constexpr globals it uses, and of its launches.

    Unlike Triton's key it does not change when the function moves within its file.
    """
    digest = hashlib.sha256()
    add_function(digest, kernel.function)
    for launch in kernel.launches():
        digest.update(f"{launch.label}:{launch.dtype}:{sorted(launch.arguments.items())}\0".encode())
    return digest.hexdigest()[:16]


def fit_problem(resources: Resources, variant: Variant) -> str:
    """In a line why a binary must not stand in its space; empty if it may."""
    target, accepted = variant.target, variant.candidates.accepted_stack
    if resources.shared_memory > target.shared_memory:
        return f"needs {resources.shared_memory} bytes of shared memory, {target.name} has {target.shared_memory}"
    if resources.tensor_memory > MOST_TENSOR_MEMORY:
        return f"needs {resources.tensor_memory} columns of tensor memory, there are {MOST_TENSOR_MEMORY}"
    if resources.stack > accepted:
        return f"uses {resources.stack} bytes of stack, its space accepts {accepted}"
    return ""


def table_problems(table: Table, ops: Sequence[Op]) -> list[str]:
    """Where the table does not match the operators, or a space claims what its kernel cannot keep; one line each."""
    found, known = [], set()
    for op in ops:
        for kernel in op.kernels:
            name = f"{op.name}/{kernel.name}"
            known.add(name)
            entry = table.entries.get(name)
            if entry is None:
                found.append(f"{name}: is not in the table")
            elif entry.source != source_hash(kernel):
                found.append(f"{name}: the table is stale, its source or a launch has changed")
            else:
                found += [f"{name}: {problem}" for problem in _row_problems(entry, kernel)]
    return found + [f"{name}: is in the table, and no operator has it" for name in sorted(table.entries.keys() - known)]


def _row_problems(entry: Entry, kernel: Kernel) -> Iterator[str]:
    asked = {variant.label: variant for target in TARGETS.values() for variant in variants(kernel, target)}
    for label, variant in asked.items():
        row = entry.rows.get(label)
        if row is None:
            yield f"{label}: is not in the table"
        elif row.resources is None:
            yield f"{label}: does not compile: {row.error}"
        elif problem := fit_problem(row.resources, variant):
            yield f"{label}: {problem}"
    for label in sorted(entry.rows.keys() - asked.keys()):
        yield f"{label}: is in the table, and the space does not have it"


def build_table(ops: Sequence[Op], *, former: Table | None, jobs: int | None = None) -> Table:
    """Compiles what a former table lacks, and returns the whole table.

    Args:
        ops: the operators.
        former: its rows are kept where kernel and Triton are the same; None compiles everything.
        jobs: how many binaries to compile at a time.
    """
    if former is not None and former.triton != triton.__version__:
        former = None
    entries: dict[str, Entry] = {}
    missing: list[tuple[str, Variant]] = []
    for op in ops:
        for kernel in op.kernels:
            name, source = f"{op.name}/{kernel.name}", source_hash(kernel)
            kept = former.entries.get(name) if former is not None else None
            rows = kept.rows if kept is not None and kept.source == source else {}
            entries[name] = Entry(source=source, rows={})
            for variant in (each for target in TARGETS.values() for each in variants(kernel, target)):
                if variant.label in rows and not rows[variant.label].error:
                    entries[name].rows[variant.label] = rows[variant.label]
                else:
                    missing.append((name, variant))
    rows_made = _compile_rows([variant for _, variant in missing], jobs=jobs)
    for (name, variant), row in zip(missing, rows_made, strict=True):
        entries[name].rows[variant.label] = row
    return Table(triton=triton.__version__, entries=entries)


def _compile_rows(wanted: Sequence[Variant], *, jobs: int | None) -> list[Row]:
    done = 0

    def report(outcome: Compiled) -> None:
        nonlocal done
        done += 1
        error = f": {outcome.error}" if outcome.error else ""
        logger.info("%d/%d %s, %.1f s%s", done, len(wanted), outcome.request.label, outcome.cpu_seconds, error)

    pairs = [(variant.target, variant.request) for variant in wanted]
    with tempfile.TemporaryDirectory(prefix="tables-") as folder:
        outcomes = compile_pairs(pairs, jobs=jobs, cache_dir=Path(folder), progress=report)
    return [
        Row(resources=each.resources, cpu_seconds=round(each.cpu_seconds, 1), error=each.error) for each in outcomes
    ]


def save_table(table: Table, path: Path = TABLE) -> None:
    """Writes the table as JSON: sorted, one line a row, numbers that are zero left out."""
    lines = ["{", f' "triton": {json.dumps(table.triton)},', ' "kernels": {']
    for name in sorted(table.entries):
        entry = table.entries[name]
        rows = [f"   {json.dumps(label)}: {json.dumps(_row_json(entry.rows[label]))}" for label in sorted(entry.rows)]
        lines += [f'  {json.dumps(name)}: {{"source": {json.dumps(entry.source)}, "rows": {{']
        lines += [",\n".join(rows)] if rows else []
        lines += ["  }}" + ("," if name != max(table.entries) else "")]
    path.write_text("\n".join([*lines, " }", "}"]) + "\n", encoding="utf-8")


def _row_json(row: Row) -> dict[str, Any]:
    if row.resources is None:
        return {"error": row.error}
    numbers = {name: value for name, value in asdict(row.resources).items() if value or name == "registers"}
    return {**numbers, "cpu_seconds": row.cpu_seconds}


def load_table(path: Path = TABLE) -> Table:
    """Reads a table.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no table; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {
            name: Entry(
                source=entry["source"], rows={label: _row_from_json(each) for label, each in entry["rows"].items()}
            )
            for name, entry in content["kernels"].items()
        }
        return Table(triton=content["triton"], entries=entries)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of resources: {type(error).__name__}: {error}") from error


def _row_from_json(row: dict[str, Any]) -> Row:
    if "error" in row:
        return Row(error=row["error"])
    names = ("registers", "stack", "spills", "shared_memory", "tensor_memory")
    return Row(resources=Resources(**{name: row.get(name, 0) for name in names}), cpu_seconds=row["cpu_seconds"])


def main(arguments: Iterable[str] | None = None) -> int:
    """Brings the committed table up to date; returns 1 if a space claims what it cannot keep."""
    parser = argparse.ArgumentParser(prog="python -m automodel_kernels.resources", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="binaries to compile at a time")
    parser.add_argument("--only", metavar="OP", help="compile for this operator only, and keep the others' rows")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if interpreter_enabled():
        parser.error("TRITON_INTERPRET is set: kernels are interpreted in this process and have no source to compile")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    ops = registry.load_all()
    former = load_table() if TABLE.exists() else None
    if options.only and former is not None and former.triton != triton.__version__:
        parser.error(
            f"--only: the table is of Triton {former.triton}, this is {triton.__version__}; compile everything"
        )
    chosen = [registry.get(options.only)] if options.only else list(ops)
    built = build_table(chosen, former=None if options.all else former, jobs=options.jobs)
    entries = dict(built.entries)
    if options.only and former is not None:
        others = {name: each for name, each in former.entries.items() if name.split("/")[0] != options.only}
        entries = {**others, **entries}
    table = Table(triton=built.triton, entries=entries)
    save_table(table)
    problems = table_problems(table, chosen if options.only else ops)
    if options.only:
        problems = [each for each in problems if each.startswith(f"{options.only}/")]
    for problem in problems:
        logger.error("%s", problem)
    logger.info("%d kernels, %d rows: %s", len(entries), sum(len(each.rows) for each in entries.values()), TABLE)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
