import importlib
import json
import sys
import threading

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import kernel_toys
from automodel_kernels.audit import ColdStartAudit, owner_of
from automodel_kernels.row_norm import row_squared_norms, row_squared_norms_kernel
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import autotune
from automodel_kernels.tuning.policy import tuning_policy

META = torch.device("meta")

pytestmark = pytest.mark.usefixtures("triton_cache")

THIRD_PARTY = """
import triton
import triton.language as tl

@triton.jit
def fill_kernel(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr, VALUE)

@triton.autotune([triton.Config({"BLOCK": block}, num_warps=1) for block in BLOCKS], key=["count"])
@triton.jit(do_not_specialize=["count"])
def tuned_kernel(x_ptr, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.static_assert(BLOCK < 64, "too large")
    tl.store(x_ptr + offs, 0.0, mask=offs < count)

@triton.jit
def broken_kernel(x_ptr):
    tl.store(x_ptr, no_such_name)
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Writes a package with kernels of the given name into the test's folder, and imports it from there."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(package, *, blocks=(16, 32)):
        folder = tmp_path / package / "ops"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "fill.py").write_text(f"BLOCKS = {blocks}\n{THIRD_PARTY}")
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.ops.fill")

    yield write
    for name in list(sys.modules):
        if name.partition(".")[0] in {"fla", "mamba_ssm", "causal_conv1d", "somebody"}:
            del sys.modules[name]


def some_rows(rows=8, columns=64, dtype=torch.bfloat16):
    return torch.empty(rows, columns, dtype=dtype, device=META)


def pointer():
    return torch.empty(64, device=META)


def fill_source(kernel):
    """What `triton.compile` takes, as Inductor calls it."""
    return triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32", "VALUE": "constexpr"}, {"VALUE": 3.0})


def kinds(events):
    return [(event.kind, event.owner, event.kernel) for event in events]


def test_compiles_and_disk_hits_are_listed_with_key_and_time():
    with ColdStartAudit() as audit, target_driver("sm_90") as driver:
        row_squared_norms(some_rows())
        row_squared_norms(some_rows(rows=1000))
    (compiled,) = audit.events
    assert kinds([compiled]) == [("compile", "ours", "row_squared_norms_kernel")]
    assert compiled.key == driver.binaries[0].key
    assert compiled.seconds > 0
    assert compiled.cpu_seconds > 0
    assert compiled.started >= 0
    assert not compiled.violation
    assert compiled.detail.startswith("x_ptr: *bf16, norms_ptr: *fp64, num_rows: i32, ")
    assert "ALIGNED=True, BLOCK_M=4, BLOCK_N=1024, num_warps=4, num_stages=1" in compiled.detail
    # A driver of its own has nothing in memory, as a process of its own.
    with audit, target_driver("sm_90"):
        row_squared_norms(some_rows())
        row_squared_norms(some_rows(dtype=torch.float32))
    assert [(event.kind, event.key == compiled.key) for event in audit.events] == [
        ("compile", True),
        ("disk hit", True),
        ("compile", False),
    ]
    assert audit.events[1].seconds < audit.events[1].started
    assert len({event.started for event in audit.events}) == 3


def test_what_specialises_a_binary_is_told(third_party):
    kernel, x = third_party("somebody").fill_kernel, torch.zeros(65)
    with ColdStartAudit() as audit, target_driver("sm_90"):
        kernel[(1,)](x, VALUE=2, num_warps=2)
        kernel[(1,)](x[1:], VALUE=3.0)
    assert [event.detail for event in audit.events] == [
        "x_ptr: *fp32 /16, VALUE=2, num_warps=2, num_stages=3",
        "x_ptr: *fp32, VALUE=3.0, num_warps=4, num_stages=3",
    ]


@pytest.mark.parametrize("package", ["fla", "mamba_ssm", "causal_conv1d", "somebody"])
def test_a_kernels_owner_is_its_package(third_party, package):
    module = third_party(package)
    with ColdStartAudit() as audit, target_driver("sm_90"):
        module.fill_kernel[(1,)](pointer(), VALUE=1.0)
    assert kinds(audit.events) == [("compile", "other" if package == "somebody" else package, "fill_kernel")]


def test_kernels_from_a_hub_are_found_by_their_folder_and_inductors_by_their_module(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    file = tmp_path / "hub" / "snapshots" / "mamba_ssm" / "ops.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"BLOCKS = (1, 2)\n{THIRD_PARTY}")
    spec = importlib.util.spec_from_file_location("f00d_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert owner_of(module.fill_kernel) == "mamba_ssm"
    assert owner_of(module.tuned_kernel) == "mamba_ssm"

    from torch._inductor.codecache import PyCodeCache

    generated = PyCodeCache.load(f"BLOCKS = (1, 2)\n{THIRD_PARTY}")
    with ColdStartAudit() as audit, target_driver("sm_90"):
        generated.fill_kernel[(1,)](pointer(), VALUE=2.0)
    assert kinds(audit.events) == [("compile", "inductor", "fill_kernel")]
    assert owner_of(row_squared_norms_kernel) == "ours"
    assert owner_of(None) == "other"


def test_a_compile_that_inductor_starts_itself_is_listed_without_cpu_seconds(third_party):
    module = third_party("somebody")
    with ColdStartAudit() as audit, target_driver("sm_90"):
        triton.compile(fill_source(module.fill_kernel))
    (event,) = audit.events
    assert (event.kind, event.cpu_seconds) == ("compile", None)
    assert event.seconds > 0
    assert event.detail.startswith("x_ptr: *fp32, VALUE=3.0, num_warps=4")
    (total,) = audit.totals
    assert total.cpu_seconds == 0
    assert audit.table().splitlines()[1].split()[-1] == "-"


def test_tunings_of_triton_are_listed_once_for_each_key(third_party):
    module = third_party("fla")
    with ColdStartAudit() as audit, target_driver("sm_90") as driver:
        for count in (5, 5, 6):
            module.tuned_kernel[(1,)](pointer(), count)
        assert driver.measured == 4
        module.tuned_kernel.cache.clear()
        module.tuned_kernel[(1,)](pointer(), 6)
    assert sorted(kinds(audit.events)) == [
        ("compile", "fla", "tuned_kernel"),
        ("compile", "fla", "tuned_kernel"),
        ("tuning", "fla", "tuned_kernel"),
        ("tuning", "fla", "tuned_kernel"),
        ("tuning", "fla", "tuned_kernel"),
    ]
    first, second, again = [event for event in audit.events if event.kind == "tuning"]
    assert [event.key for event in (first, second, again)] == [f"{count}, torch.float32" for count in (5, 6, 6)]
    assert {event.detail for event in (first, second, again)} == {"2 candidates"}
    compiles = [event for event in audit.events if event.kind == "compile"]
    assert first.seconds >= sum(event.seconds for event in compiles)
    assert 0 <= second.cpu_seconds <= first.cpu_seconds


def test_our_own_tunings_are_listed_with_our_key():
    with ColdStartAudit() as audit, target_driver("sm_90") as driver, tuning_policy("tune"):
        for elements in (64, 100):
            kernel_toys.scale(torch.empty(elements, device=META), factor=1.0, square=True)
        audit.mark_warm()
        kernel_toys.scale(torch.empty(64, device=META), factor=2.0, square=True)
        assert driver.measured == 2
    assert [event.kind for event in audit.events] == ["compile", "compile", "tuning"]
    assert audit.violations == []
    tuning = audit.events[-1]
    assert (tuning.kernel, tuning.owner, tuning.cpu_seconds) == ("scale_kernel", "other", None)
    assert "SQUARE=True" in tuning.key
    assert "float32" in tuning.key
    assert tuning.detail == "2 candidates, 2 measured"
    assert tuning.seconds >= sum(event.seconds for event in audit.events[:2])
    with audit, target_driver("sm_90"), tuning_policy("tune"):
        row_squared_norms(some_rows())
    assert kinds(audit.events)[-1] == ("tuning", "ours", "row_squared_norms_kernel")


def test_a_candidate_that_fails_is_a_failed_compile_and_counted(third_party):
    module = third_party("fla", blocks=(32, 64))
    with ColdStartAudit() as audit, target_driver("sm_90"):
        module.tuned_kernel[(1,)](pointer(), 5)
    assert [event.kind for event in audit.events] == ["tuning", "compile", "failed compile"]
    tuning, _, failed = audit.events
    assert tuning.detail == "2 candidates, 1 failed"
    assert (failed.kernel, failed.owner, failed.key) == ("tuned_kernel", "fla", "")
    assert failed.detail == "CompileTimeAssertionFailure"
    assert failed.seconds > 0


def test_a_tuning_that_raises_is_listed_and_the_error_passes(third_party):
    module = third_party("fla")
    audit = ColdStartAudit()
    with pytest.raises(triton.CompilationError), audit, target_driver("sm_90"):
        module.broken_kernel[(1,)](pointer())
    assert [event.kind for event in audit.events] == ["failed compile"]
    tuned = triton.autotune([triton.Config({}, num_warps=warps) for warps in (1, 2)], key=[])(module.broken_kernel)
    with pytest.raises(triton.CompilationError), audit, target_driver("sm_90"):
        tuned[(1,)](pointer())
    assert [(event.kind, event.detail) for event in audit.events[1:]] == [
        ("tuning", "1 candidate, 1 failed"),
        ("failed compile", "CompilationError"),
    ]


def test_what_follows_mark_warm_is_a_violation(third_party):
    module = third_party("fla")
    with ColdStartAudit() as audit, target_driver("sm_90"):
        row_squared_norms(some_rows())
        module.tuned_kernel[(1,)](pointer(), 5)
        assert "after warm-up" not in audit.table()
        audit.mark_warm()
        row_squared_norms(some_rows(rows=77))
        module.tuned_kernel[(1,)](pointer(), 5)
        assert audit.violations == []
        assert audit.table().endswith("after warm-up: 0 violations")
        before = len(audit.events)
        # The same key in the same thread, which could pass for more of the former tuning.
        module.tuned_kernel.configs = [triton.Config({"BLOCK": block}, num_warps=1) for block in (4, 8)]
        module.tuned_kernel.cache.clear()
        module.tuned_kernel[(1,)](pointer(), 5)
        row_squared_norms(some_rows(columns=65))
    assert kinds(audit.violations) == [
        ("tuning", "fla", "tuned_kernel"),
        ("compile", "fla", "tuned_kernel"),
        ("compile", "fla", "tuned_kernel"),
        ("compile", "ours", "row_squared_norms_kernel"),
    ]
    assert audit.events[before:] == audit.violations
    _, late = audit.table().split("\n\nafter warm-up: 4 violations\n")
    assert "ALIGNED=False" in late
    assert "    2 candidates" in late.splitlines()
    report = json.loads(audit.to_json())
    assert report["warm"] is True
    assert len(report["violations"]) == 4
    assert len(report["events"]) == before


def test_a_disk_hit_after_the_warm_up_is_a_violation_too():
    with target_driver("sm_90"):
        row_squared_norms(some_rows())
    with ColdStartAudit() as audit, target_driver("sm_90"):
        audit.mark_warm()
        row_squared_norms(some_rows())
    assert [event.kind for event in audit.violations] == ["disk hit"]


def test_reports_are_sorted_by_seconds_and_add_up(third_party):
    module = third_party("fla")
    with ColdStartAudit() as audit, target_driver("sm_90"):
        module.tuned_kernel[(1,)](pointer(), 5)
        row_squared_norms(some_rows())
        third_party("somebody").fill_kernel[(1,)](pointer(), VALUE=1.0)
    events, totals = audit.table().split("\n\n")
    head, *lines = events.splitlines()
    assert head.split() == ["kind", "whose", "kernel", "key", "seconds", "CPU", "s"]
    assert len(lines) == 5
    seconds = [float(line.split()[-2]) for line in lines]
    assert seconds == sorted(seconds, reverse=True)
    assert len({line.rindex(line.split()[-1]) + len(line.split()[-1]) for line in lines}) == 1, "flush right"
    assert {line.index("kernel") for line in lines if line.startswith("compile")}
    assert len(totals.splitlines()) == 1 + 4
    report = json.loads(audit.to_json())
    assert [event["seconds"] for event in report["events"]] == sorted(
        (event.seconds for event in audit.events), reverse=True
    )
    assert report["violations"] == []
    assert report["warm"] is False
    by_group = {(total["kind"], total["owner"]): total for total in report["totals"]}
    assert {group: total["count"] for group, total in by_group.items()} == {
        ("tuning", "fla"): 1,
        ("compile", "fla"): 2,
        ("compile", "ours"): 1,
        ("compile", "other"): 1,
    }
    for (kind, owner), total in by_group.items():
        group = [event for event in audit.events if (event.kind, event.owner) == (kind, owner)]
        assert total["seconds"] == pytest.approx(sum(event.seconds for event in group))
        assert total["cpu_seconds"] == pytest.approx(sum(event.cpu_seconds for event in group))


def test_an_audit_without_events_has_a_report():
    audit = ColdStartAudit()
    assert audit.table().split("\n\n") == [
        "kind  whose  kernel  key  seconds  CPU s",
        "total  whose  number  seconds  CPU s",
    ]
    assert json.loads(audit.to_json()) == {"warm": False, "events": [], "violations": [], "totals": []}


def hooks():
    return (
        triton.knobs.compilation.listener,
        triton.runtime.JITFunction._do_compile,
        Autotuner._bench,
        list(autotune.listeners),
    )


def test_audits_nest_and_everything_is_as_before_after_an_error():
    seen = []

    def listener(**what):
        seen.append(what["metadata"]["hash"])

    def fails(outer, inner):
        with outer, target_driver("sm_90"):
            row_squared_norms(some_rows())
            with inner:
                row_squared_norms(some_rows(columns=65))
                raise ZeroDivisionError

    before = hooks()
    triton.knobs.compilation.listener = listener
    try:
        outer, inner = ColdStartAudit(), ColdStartAudit()
        with pytest.raises(ZeroDivisionError):
            fails(outer, inner)
        assert triton.knobs.compilation.listener is listener
    finally:
        triton.knobs.compilation.listener = before[0]
    assert hooks() == before
    assert len(outer.events) == 2
    assert [event.key for event in outer.events] == seen, "the former listener is told, too"
    assert [event.key for event in inner.events] == seen[1:]
    with target_driver("sm_90"):
        row_squared_norms(some_rows(dtype=torch.float16))
    assert len(outer.events) == 2


def test_a_compile_whose_listener_fails_is_listed_once(monkeypatch):
    def listener(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    with ColdStartAudit() as audit, target_driver("sm_90"), pytest.raises(ZeroDivisionError):
        row_squared_norms(some_rows())
    assert [event.kind for event in audit.events] == ["compile"]


def test_audits_that_overlap_end_in_any_order(third_party, monkeypatch):
    module = third_party("fla")
    # What is left of them afterwards does nothing; this removes it.
    monkeypatch.setattr(Autotuner, "_bench", Autotuner._bench)
    monkeypatch.setattr(triton.runtime.JITFunction, "_do_compile", triton.runtime.JITFunction._do_compile)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    first, second = ColdStartAudit(), ColdStartAudit()
    with target_driver("sm_90"):
        first.__enter__()
        second.__enter__()
        module.tuned_kernel[(1,)](pointer(), 5)
        first.__exit__(None, None, None)
        module.tuned_kernel[(1,)](pointer(), 6)
        second.__exit__(None, None, None)
        module.tuned_kernel[(1,)](pointer(), 7)
    assert [[event.kind for event in audit.events].count("tuning") for audit in (first, second)] == [1, 2]
    with ColdStartAudit() as third, target_driver("sm_90"):
        module.tuned_kernel[(1,)](pointer(), 8)
    assert "tuning" in {event.kind for event in third.events}
    assert len(first.events) + len(second.events) == 3 + 2 * 2


def test_an_audit_listens_once_at_a_time():
    with ColdStartAudit() as audit:
        before = hooks()
        with pytest.raises(RuntimeError, match="listens already"):
            audit.__enter__()
        assert hooks() == before


def test_compiles_in_other_threads_are_listed():
    x = some_rows()
    with ColdStartAudit() as audit, target_driver("sm_90"):
        threads = [
            threading.Thread(target=row_squared_norms, args=(x.to(dtype),)) for dtype in (torch.float32, torch.float16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event.kind for event in audit.events] == ["compile", "compile"]
    assert all(event.cpu_seconds > 0 for event in audit.events)


def test_without_tritons_inner_functions_an_audit_warns_and_lists_what_it_can(third_party, monkeypatch, caplog):
    module = third_party("fla")
    monkeypatch.delattr(Autotuner, "_bench")
    monkeypatch.delattr(triton.runtime.JITFunction, "_do_compile")
    with ColdStartAudit() as audit:
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert "has no JITFunction._do_compile: the audit lists no CPU seconds" in caplog.text
        assert "has no Autotuner._bench: the audit lists no tunings of triton.autotune" in caplog.text
        with target_driver("sm_90"):
            triton.compile(fill_source(module.fill_kernel))
    assert [event.kind for event in audit.events] == ["compile"]
    assert not hasattr(Autotuner, "_bench")


def test_a_cpu_without_a_driver_compiles_nothing():
    with ColdStartAudit() as audit:
        row_squared_norms(torch.ones(4, 4))
    assert audit.events == []


@pytest.mark.interpreter
def test_the_interpreter_compiles_nothing():
    with ColdStartAudit() as audit:
        assert row_squared_norms(torch.ones(4, 4)).tolist() == [4.0] * 4
    assert audit.events == []
