from dataclasses import replace

import pytest
import triton

import kernel_toys
from automodel_kernels import resources
from automodel_kernels.aot import Resources
from automodel_kernels.hardware import TARGETS, find_target
from automodel_kernels.resources import (
    Entry,
    Row,
    Table,
    build_table,
    default_sample,
    fit_problem,
    load_table,
    save_table,
    source_hash,
    table_problems,
    variants,
)
from automodel_kernels.tuning import registry

KERNEL = kernel_toys.SCALE.kernels[0]
FITS = Resources(registers=16, stack=0, spills=0, shared_memory=1024)


def invented_table(op, row):
    """A table that has the same row for everything an operator asks for."""
    entries = {
        f"{op.name}/{kernel.name}": Entry(
            source=source_hash(kernel),
            rows={variant.label: row for target in TARGETS.values() for variant in variants(kernel, target)},
        )
        for kernel in op.kernels
    }
    return Table(triton=triton.__version__, entries=entries)


def some_variant(op, target="sm_89"):
    return next(variants(op.kernels[0], find_target(target)))


def test_variants_name_everything_a_space_asks_for_and_the_default_of_every_launch():
    found = list(variants(KERNEL, find_target("sm_90")))
    assert [variant.label for variant in found[:2]] == [
        "sm_90 | float32 | BLOCK=128 warps=1 stages=1",
        "sm_90 | float32 square | BLOCK=256 warps=2 stages=1",
    ]
    assert [(variant.launch, variant.default) for variant in found] == [
        ("float32", True),
        ("float32 square", True),
        ("float32 square", False),
        ("bfloat16", True),
        ("bfloat16 square", True),
        ("bfloat16 square", False),
    ]
    assert len({variant.label for variant in found}) == 6


def test_a_sample_has_the_default_of_every_launch_and_all_come_in_turn():
    every = {each.label for target in TARGETS.values() for each in variants(KERNEL, target) if each.default}
    first = {label for label in every if "| float32 |" in label}
    samples = [{variant.label for variant in default_sample(KERNEL, turn=7 + turn)} for turn in range(len(TARGETS))]
    assert all(first <= sample <= every for sample in samples)
    assert {len(sample) for sample in samples} == {len(TARGETS) + 3}
    assert set().union(*samples) == every
    assert {each.launch for each in default_sample(KERNEL, turn=0)} == {each.label for each in KERNEL.launches()}


def test_a_sample_names_only_targets_that_a_launch_is_claimed_on():
    found = default_sample(kernel_toys.greedy_op(targets=("gfx942",)).kernels[0], turn=3)
    assert [(variant.target.name, variant.launch) for variant in found] == [("gfx942", "float16")]


def test_a_table_is_built_kept_where_nothing_changed_and_written_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "TARGETS", {name: TARGETS[name] for name in ("sm_100", "gfx942")})
    half = replace(KERNEL, launches=lambda: KERNEL.launches()[2:])
    op = replace(kernel_toys.SCALE, kernels=(half,))
    built = build_table([op], former=None, jobs=2)
    assert built.triton == triton.__version__
    (entry,) = built.entries.values()
    assert len(entry.rows) == 2 * 3
    assert all(row.resources.registers > 0 and row.cpu_seconds > 0 for row in entry.rows.values())
    assert table_problems(built, [op]) == []

    save_table(built, tmp_path / "a.json")
    assert load_table(tmp_path / "a.json") == built
    shuffled = Entry(source=entry.source, rows=dict(reversed(entry.rows.items())))
    save_table(replace(built, entries={"scale/scale_kernel": shuffled}), tmp_path / "b.json")
    text = (tmp_path / "a.json").read_text()
    assert (tmp_path / "b.json").read_text() == text
    assert len(text.splitlines()) == 6 + 7, "a line for every row"

    # Kept rows are told by an impossible time; the missing one is compiled.
    label = "gfx942 | bfloat16 | BLOCK=128 warps=1 stages=1"
    marked = {each: replace(row, cpu_seconds=99.0) for each, row in entry.rows.items() if each != label}
    former = replace(built, entries={"scale/scale_kernel": Entry(source=entry.source, rows=marked)})
    again = build_table([op], former=former).entries["scale/scale_kernel"]
    assert again.rows.keys() == entry.rows.keys()
    assert [each for each, row in again.rows.items() if row.cpu_seconds != 99.0] == [label]


def test_an_invented_table_has_no_problems_and_survives_a_file(tmp_path):
    table = invented_table(kernel_toys.SCALE, Row(resources=FITS, cpu_seconds=0.5))
    save_table(table, tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == table
    assert table_problems(table, [kernel_toys.SCALE]) == []
    failed = invented_table(kernel_toys.SCALE, Row(error='said "no"'))
    save_table(failed, tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == failed
    save_table(Table(triton="3.7.1"), tmp_path / "t.json")
    assert load_table(tmp_path / "t.json") == Table(triton="3.7.1")


def with_source(source):
    """The toy kernel with another source; it compiles nothing."""
    function = triton.runtime.JITFunction(KERNEL.function.fn.fn)
    function._unsafe_update_src(source)
    return replace(KERNEL, function=function)


def test_the_hash_sees_sources_called_functions_globals_launches_and_specialisation(monkeypatch):
    former = source_hash(KERNEL)
    assert source_hash(replace(KERNEL)) == former
    assert len(former) == 16
    plain = triton.runtime.JITFunction(KERNEL.function.fn.fn)
    assert source_hash(replace(KERNEL, function=plain)) != former, "do_not_specialize"
    source = KERNEL.function.fn.src
    assert source_hash(with_source(source)) != source_hash(with_source(source.replace("x * x", "x * x * x")))
    assert source_hash(replace(KERNEL, launches=lambda: KERNEL.launches()[1:])) != former
    tuned = triton.autotune(configs=[triton.Config({})], key=[])(KERNEL.function.fn)
    assert source_hash(replace(KERNEL, function=tuned)) == former
    monkeypatch.setattr(kernel_toys, "FACTOR_BIAS", triton.language.constexpr(1.0))
    assert source_hash(KERNEL) != former
    monkeypatch.undo()
    monkeypatch.setattr(kernel_toys, "scaled", kernel_toys.greedy_kernel)
    assert source_hash(KERNEL) != former


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"shared_memory": 101_376}, ""),
        ({"shared_memory": 101_377}, "needs 101377 bytes of shared memory, sm_89 has 101376"),
        ({"stack": 8}, ""),
        ({"stack": 9}, "uses 9 bytes of stack, its space accepts 8"),
        ({"tensor_memory": 513}, "needs 513 columns of tensor memory, there are 512"),
    ],
)
def test_what_does_not_fit_is_named(changes, problem):
    variant = some_variant(kernel_toys.greedy_op(accepted_stack=8))
    assert fit_problem(replace(FITS, **changes), variant) == problem


def test_stale_missing_surplus_failed_and_unfit_rows_are_problems():
    op = kernel_toys.greedy_op()
    table = invented_table(op, Row(resources=FITS))
    (name,) = table.entries
    entry = table.entries[name]
    (label,) = entry.rows

    def problems(**changes):
        return table_problems(replace(table, entries={name: replace(entry, **changes)}), [op])

    assert problems() == []
    assert problems(source="0" * 16) == [f"{name}: the table is stale, its source or a launch has changed"]
    assert problems(rows={}) == [f"{name}: {label}: is not in the table"]
    assert problems(rows={**entry.rows, "x": entry.rows[label]}) == [
        f"{name}: x: is in the table, and the space does not have it"
    ]
    assert problems(rows={label: Row(error="it broke")}) == [f"{name}: {label}: does not compile: it broke"]
    assert problems(rows={label: Row(resources=replace(FITS, stack=16))}) == [
        f"{name}: {label}: uses 16 bytes of stack, its space accepts 0"
    ]
    assert table_problems(Table(triton="3.7.1"), [op]) == [f"{name}: is not in the table"]
    assert table_problems(table, []) == [f"{name}: is in the table, and no operator has it"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"triton": "3", "kernels": {"a": {"source": "x", "rows": [1]}}}'])
def test_a_file_that_is_no_table_is_named(tmp_path, text):
    path = tmp_path / "resources.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path} is not a table of resources"):
        load_table(path)


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """The command works on a file of this test alone, with the toy operator as the only one."""
    path = tmp_path / "resources.json"
    monkeypatch.setattr(resources, "TABLE", path)
    monkeypatch.setattr(resources, "load_table", lambda: load_table(path))
    monkeypatch.setattr(resources, "save_table", lambda table: save_table(table, path))
    monkeypatch.setattr(registry, "_ops", {})
    monkeypatch.setattr(registry, "load_all", registry.registered)
    monkeypatch.setattr(resources, "TARGETS", {"sm_89": TARGETS["sm_89"]})
    return path


def test_the_command_writes_the_table_and_fails_on_what_does_not_fit(committed, caplog):
    caplog.set_level("INFO")
    other = invented_table(kernel_toys.SCALE, Row(resources=FITS))
    save_table(other, committed)
    registry.register(kernel_toys.greedy_op(block=64, num_warps=4))
    assert resources.main(["--only", "greedy", "--jobs", "1"]) == 1
    table = load_table(committed)
    assert table.entries.keys() == {"greedy/greedy_kernel", "scale/scale_kernel"}
    assert table.entries["scale/scale_kernel"] == other.entries["scale/scale_kernel"]
    assert "bytes of stack, its space accepts 0" in caplog.text
    assert "1/1 greedy_kernel sm_89 | float16 | BLOCK=64 warps=4 stages=1" in caplog.text

    registry.register(kernel_toys.greedy_op(block=64, num_warps=4, accepted_stack=64))
    assert resources.main([]) == 0, "nothing has to be compiled for another limit"
    assert load_table(committed).entries.keys() == {"greedy/greedy_kernel"}


def test_the_command_refuses_a_part_of_another_tritons_table_and_the_interpreter(committed, monkeypatch, capsys):
    save_table(Table(triton="3.0.0"), committed)
    registry.register(kernel_toys.SCALE)
    for arguments, message in ((["--only", "scale"], "the table is of Triton 3.0.0"), ([], "TRITON_INTERPRET is set")):
        if not arguments:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(SystemExit):
            resources.main(arguments)
        assert message in capsys.readouterr().err
    assert load_table(committed) == Table(triton="3.0.0")
