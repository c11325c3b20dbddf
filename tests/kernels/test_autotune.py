import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import kernel_tuning
from automodel_kernels.hardware import find_target
from automodel_kernels.target_driver import target_driver
from automodel_kernels.tuning import autotune, store
from automodel_kernels.tuning.autotune import tuned
from automodel_kernels.tuning.candidates import Candidates, Config, Space
from automodel_kernels.tuning.policy import set_default_policy, tuning_policy
from automodel_kernels.tuning.store import FolderStore, set_store
from automodel_kernels.tuning.table import Entry, write_table
from kernel_toys import SUM_SPACE, add_sum, sum_kernel, tuned_sum
from kernel_tuning import TOY_GPU

META = torch.device("meta")
LABELS = [config.label for config in SUM_SPACE.candidates[0].configs]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A Triton cache of this file's tests."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def no_store():
    yield
    set_store(None)


@pytest.fixture
def tunings():
    found = []
    autotune.listeners.append(found.append)
    yield found
    autotune.listeners.remove(found.append)


def block_is_time(record):
    """The block 128 takes 1 ms, the others longer."""
    return {64: 3.0, 128: 1.0}[record.arguments["BLOCK"]]


def values(dtype=torch.float32, *, elements=1000, device=META):
    return torch.empty(elements, dtype=dtype, device=device), torch.empty(1, device=device)


def block(driver):
    return driver.launches[-1].arguments["BLOCK"]


def entry(key, config, *, bit_exact=False):
    return Entry(
        key=key,
        config=config,
        milliseconds=0.5,
        static_milliseconds=0.75,
        bit_exact=bit_exact,
        date="2026-11-01",
        torch="2.13.0",
        triton="3.7.1",
        driver="580.1",
    )


FLOAT_KEY = {"x_ptr": "float32", "SQUARE": False}


@pytest.mark.usefixtures("compiled")
class TestPolicies:
    def test_nothing_is_measured_without_a_gpu_unless_the_caller_asks(self, monkeypatch):
        monkeypatch.setenv("AUTOMODEL_TUNING", "tune")
        kernel = tuned_sum()
        set_default_policy("tune")
        try:
            with target_driver("sm_90", timer=block_is_time) as driver:
                add_sum(kernel, *values())
                assert (driver.measured, block(driver), len(driver.binaries)) == (0, 64, 1)
                with tuning_policy("tune"):
                    add_sum(kernel, *values())
                    assert (driver.measured, block(driver)) == (3, 128)
                add_sum(kernel, *values())
                assert (driver.measured, block(driver)) == (3, 128), "what the process knows holds for every policy"
        finally:
            set_default_policy(None)

    def test_error_names_kernel_key_device_and_what_to_do(self):
        with target_driver(TOY_GPU) as driver, tuning_policy("error"):
            with pytest.raises(
                RuntimeError, match=r"kernel_toys:sum_kernel has no .*float32.* on Toy GPU 9000"
            ) as error:
                add_sum(tuned_sum(), *values())
            assert driver.launches == []
        assert "kernels.tuning" in str(error.value)
        assert "AUTOMODEL_TUNING" in str(error.value)

    def test_a_single_candidate_is_taken_under_every_policy(self):
        space = Space(name="one", candidates=(Candidates(configs=(Config(meta={"BLOCK": 64}),)),))
        with target_driver("sm_90") as driver:
            for policy in ("tune", "error"):
                with tuning_policy(policy):
                    add_sum(tuned_sum(space=space), *values())
            assert driver.measured == 0

    def test_deterministic_mode_takes_the_table_and_else_the_static_choice(self, tmp_path, no_store):
        write_table(
            tmp_path / "tables",
            device=TOY_GPU,
            kernel="kernel_toys:sum_kernel",
            entries=[entry({"x_ptr": "bfloat16", "SQUARE": False}, LABELS[1])],
        )
        kernel = tuned_sum(tables=tmp_path / "tables")
        set_store(FolderStore(tmp_path / "store"))
        with target_driver(TOY_GPU, timer=block_is_time) as driver, tuning_policy("tune"):
            add_sum(kernel, *values())
            assert block(driver) == 128
            before = driver.measured
            torch.use_deterministic_algorithms(True)
            try:
                add_sum(kernel, *values())
                assert block(driver) == 64, "neither memo nor store"
                add_sum(kernel, *values(torch.bfloat16))
                assert block(driver) == 128, "the table"
                add_sum(kernel, *values(torch.float16))
                assert (block(driver), driver.measured) == (64, before)
            finally:
                torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("compiled")
class TestKeys:
    def test_other_shapes_strides_and_addresses_need_no_tuning_and_no_binary(self):
        kernel = tuned_sum()
        with target_driver("sm_90", timer=block_is_time) as driver, tuning_policy("tune"):
            add_sum(kernel, *values(device="cpu"))
            counts = driver.measured, len(driver.binaries)
            assert counts == (3, 3)
            x, total = values(elements=4096, device="cpu")
            for view in (x[:1], x[1:], x[::3], x[16:32], x[:0]):
                add_sum(kernel, view, total)
            kernel[lambda meta: (meta["BLOCK"],)](x, total, 16, 1, SQUARE=False)
            kernel[(1,)](x_ptr=x, total_ptr=total, num_elements=16, stride_x=1, SQUARE=False)
            assert (driver.measured, len(driver.binaries)) == counts
            assert driver.launches[-2].grid == (128, 1, 1)

    def test_another_data_type_or_flag_is_another_key_and_another_target_a_new_choice(self, tunings):
        kernel = tuned_sum()
        with tuning_policy("tune"):
            with target_driver("sm_90", timer=block_is_time) as driver:
                for dtype in (torch.float32, torch.bfloat16):
                    for square in (False, True, False):
                        add_sum(kernel, *values(dtype), square=square)
                assert driver.measured == 4 * 3
            with target_driver("sm_80") as driver:
                add_sum(kernel, *values())
                assert (driver.measured, block(driver)) == (3, 64)
        assert [tuning.key for tuning in tunings[:2]] == [FLOAT_KEY, FLOAT_KEY | {"SQUARE": True}]
        assert [tuning.device for tuning in tunings] == ["sm_90"] * 4 + ["sm_80"]

    def test_threads_tune_a_key_once(self):
        kernel = tuned_sum()
        with target_driver("sm_90", timer=block_is_time) as driver, tuning_policy("tune"):
            threads = [threading.Thread(target=add_sum, args=(kernel, *values())) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (driver.measured, len(driver.launches)) == (3, 3 + 4)

    def test_a_recorder_sees_launches_that_do_not_happen(self, monkeypatch):
        seen = []
        monkeypatch.setattr(autotune, "recorder", lambda kernel, arguments: seen.append((kernel, arguments)))
        kernel, (x, total) = tuned_sum(), values()
        add_sum(kernel, x, total)
        assert seen[0][0] is kernel
        assert seen[0][1] == {"x_ptr": x, "total_ptr": total, "num_elements": 1000, "stride_x": 1, "SQUARE": False}


@pytest.mark.usefixtures("compiled")
class TestTuning:
    def test_the_report_has_every_candidate_and_the_fastest_is_taken(self, tunings, caplog):
        with target_driver(TOY_GPU, timer=block_is_time) as driver, tuning_policy("tune"):
            with caplog.at_level(logging.INFO):
                add_sum(tuned_sum(), *values(device="cpu"))
            assert block(driver) == 128
            assert [record.arguments["BLOCK"] for record in driver.launches] == [64, 128, 64, 128], "static first"
        (tuning,) = tunings
        assert (tuning.kernel, tuning.key, tuning.device) == ("kernel_toys:sum_kernel", FLOAT_KEY, "Toy GPU 9000")
        assert [trial.config for trial in tuning.trials] == LABELS
        assert [trial.milliseconds for trial in tuning.trials] == [3.0, 1.0, None, 3.0]
        assert "the block is too large" in tuning.trials[2].reason
        assert (tuning.measured, tuning.chosen.label, tuning.final) == (4, LABELS[1], True)
        assert tuning.extra_bytes == 4, "the copy of what the kernel changes"
        assert tuning.seconds > 0
        assert len([record for record in caplog.records if "tuned kernel_toys:sum_kernel" in record.message]) == 1

    def test_a_failing_listener_does_not_fail_the_launch(self, caplog):
        def listener(tuning):
            raise ZeroDivisionError

        autotune.listeners.append(listener)
        try:
            with target_driver("sm_90") as driver, tuning_policy("tune"):
                add_sum(tuned_sum(), *values())
                assert len(driver.launches) == 4
        finally:
            autotune.listeners.remove(listener)
        assert "a listener failed" in caplog.text

    def test_what_needs_too_much_shared_memory_is_passed_over(self, tunings):
        configs = (Config(meta={"BLOCK": 64}), Config(meta={"BLOCK": 16}))
        kernel = tuned(
            space=Space(name="product", candidates=(Candidates(configs=configs),)),
            key=("x_ptr",),
            outputs=("out_ptr",),
        )(product_kernel)
        small = replace(find_target("sm_89"), shared_memory=4096)
        x, out = torch.empty(0, dtype=torch.float16, device=META), torch.empty(0, device=META)
        with target_driver(small) as driver, tuning_policy("tune"):
            kernel[(1,)](x, out)
            assert block(driver) == 16
        assert "OutOfResources: out of resource: shared memory" in tunings[0].trials[0].reason

    def test_if_nothing_works_every_reason_is_told(self):
        configs = (Config(meta={"BLOCK": 2048}), Config(meta={"BLOCK": 4096}))
        space = Space(name="large", candidates=(Candidates(configs=configs),))
        failing = pytest.raises(RuntimeError, match="no configuration works")
        with target_driver("sm_90"), tuning_policy("tune"), failing as error:
            add_sum(tuned_sum(space=space), *values())
        assert len(re.findall("the block is too large", str(error.value))) == 2


@triton.jit(do_not_specialize=["x_ptr", "out_ptr"])
def product_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]
    x = tl.load(x_ptr + tile)
    tl.store(out_ptr + tile, tl.dot(x, x))


@pytest.mark.interpreter
@pytest.mark.parametrize("bit_exact", [False, True])
def test_tuning_leaves_what_the_kernel_changes_as_it_was(bit_exact):
    x, total = torch.arange(100.0)[::2], torch.tensor([3.0])
    kernel = tuned_sum()
    with tuning_policy("tune", bit_exact=bit_exact):
        add_sum(kernel, x, total)
    assert total.item() == 3 + x.sum(), "added once, not once more for every candidate"


@pytest.mark.interpreter
def test_the_gate_drops_a_candidate_with_other_bits(tunings):
    generator = torch.Generator().manual_seed(0)
    x, total = torch.randn(1000, generator=generator), torch.zeros(1)
    kernel = tuned_sum()
    with tuning_policy("tune", bit_exact=True):
        add_sum(kernel, x, total)
    (tuning,) = tunings
    assert "outputs differ" in tuning.trials[1].reason
    assert tuning.trials[3].milliseconds is not None
    assert tuning.chosen.label in (LABELS[0], LABELS[3])
    assert tuning.extra_bytes == 8, "the copy, and the bits to compare with"
    with tuning_policy("tune"):
        add_sum(kernel, x, total)
    assert len(tunings) == 2, "a winner with the gate is no winner without it"
    assert tunings[1].trials[1].milliseconds is not None


@pytest.mark.interpreter
def test_tensors_that_are_the_same_memory_are_copied_together():
    x = torch.ones(1)
    with tuning_policy("tune", bit_exact=True):
        tuned_sum()[(1,)](x, x, 1, 1, SQUARE=False)
    assert x.item() == 2


@pytest.mark.interpreter
def test_nothing_is_tuned_under_the_interpreter_unasked(tunings, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_TUNING", "tune")
    add_sum(tuned_sum(), torch.ones(10), torch.zeros(1))
    assert tunings == []


@pytest.mark.usefixtures("compiled", "no_store")
class TestStore:
    def test_what_one_process_measured_the_next_one_takes(self, tmp_path):
        set_store(FolderStore(tmp_path / "store"))
        with target_driver(TOY_GPU, timer=block_is_time), tuning_policy("tune"):
            add_sum(tuned_sum(), *values())
        with target_driver(TOY_GPU) as driver, tuning_policy("error"):
            add_sum(tuned_sum(), *values())
            assert (block(driver), driver.measured) == (128, 0)
            with tuning_policy("error", bit_exact=True), pytest.raises(RuntimeError, match="no tuned configuration"):
                add_sum(tuned_sum(), *values())
        with target_driver("sm_90") as driver:
            add_sum(tuned_sum(), *values())
            assert block(driver) == 64, "a bare target has no name, and so no winners"

    def test_a_killed_tuning_goes_on_where_it_was(self, tmp_path, tunings):
        command = [sys.executable, kernel_tuning.__file__, str(tmp_path / "store"), "128", "--kill-at", "3"]
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == -9, done.stderr
        set_store(FolderStore(tmp_path / "store"))
        with target_driver(TOY_GPU, timer=lambda record: 9.0) as driver, tuning_policy("tune"):
            add_sum(tuned_sum(), *values())
            assert (driver.measured, block(driver)) == (1, 128)
        (tuning,) = tunings
        assert [trial.milliseconds for trial in tuning.trials] == [2.0, 1.0, None, 9.0]
        assert tuning.measured == 1

    def test_a_tuning_that_was_killed_after_its_last_candidate_measures_nothing(self, tmp_path, tunings):
        set_store(FolderStore(tmp_path / "store"))
        with target_driver(TOY_GPU, timer=block_is_time), tuning_policy("tune"):
            add_sum(tuned_sum(), *values())
        (file,) = (tmp_path / "store").iterdir()
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "winner" not in line))
        with target_driver(TOY_GPU) as driver, tuning_policy("tune"):
            add_sum(tuned_sum(), *values())
            assert (driver.measured, block(driver)) == (0, 128)
        assert len(tunings) == 1
        assert '"winner"' in file.read_text()

    def test_processes_that_tune_at_once_take_the_same_winner(self, tmp_path):
        processes = [
            subprocess.Popen(
                [sys.executable, kernel_tuning.__file__, str(tmp_path / "store"), best, "--meet", own, other],
                env=child_environment(),
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
            for best, own, other in (("64", "a", "b"), ("128", "b", "a"))
        ]
        chosen = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert chosen[0] == chosen[1] in ("64", "128")

    @pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ZeroDivisionError()])
    def test_a_store_that_fails_is_one_warning(self, caplog, fault):
        class Broken:
            def __getattr__(self, name):
                raise fault

        set_store(Broken())
        with target_driver(TOY_GPU, timer=block_is_time) as driver, tuning_policy("tune"):
            for square in (False, True):
                add_sum(tuned_sum(), *values(), square=square)
                assert block(driver) == 128
        assert len([record for record in caplog.records if "the store of tuned" in record.message]) == 1

    def test_a_winner_that_is_no_candidate_is_not_obeyed(self, tmp_path):
        class Odd(FolderStore):
            def find_winner(self, scope):
                return "BLOCK=7 warps=4 stages=1"

        set_store(Odd(tmp_path))
        with target_driver(TOY_GPU) as driver:
            add_sum(tuned_sum(), *values())
            assert block(driver) == 64

    def test_the_scope_holds_all_that_a_time_depends_on(self, tmp_path):
        class Noting(FolderStore):
            def find_winner(self, scope):
                seen.append(scope)

        seen = []
        set_store(Noting(tmp_path))
        other_order = Space(name="sum", candidates=(Candidates(configs=SUM_SPACE.candidates[0].configs[::-1]),))
        with target_driver(TOY_GPU):
            add_sum(tuned_sum(), *values())
            add_sum(tuned_sum(), *values(), square=True)
        with target_driver(TOY_GPU), tuning_policy("static", bit_exact=True):
            add_sum(tuned_sum(), *values())
        with target_driver(TOY_GPU):
            add_sum(tuned_sum(space=other_order), *values())
        plain, square, exact, order = seen
        assert (plain.kernel, plain.device, plain.sm_count) == ("kernel_toys:sum_kernel", "Toy GPU 9000", 132)
        assert (plain.shared_memory, plain.triton) == (232_448, triton.__version__)
        assert plain.key == '{"SQUARE": false, "x_ptr": "float32"}'
        assert square.key != plain.key
        assert (exact.bit_exact, plain.bit_exact) == (True, False)
        assert order.space != plain.space
        assert order.source == plain.source
        assert len({each.digest for each in seen}) == 4


def child_environment():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.usefixtures("compiled", "no_store")
class TestTables:
    def write(self, tmp_path, *entries):
        return write_table(tmp_path, device=TOY_GPU, kernel="kernel_toys:sum_kernel", entries=entries)

    def test_the_table_comes_before_store_and_policy(self, tmp_path):
        class Store(FolderStore):
            def find_winner(self, scope):
                return LABELS[0]

        set_store(Store(tmp_path / "store"))
        self.write(tmp_path, entry(FLOAT_KEY, LABELS[3]))
        kernel = tuned_sum(tables=tmp_path)
        with target_driver(TOY_GPU) as driver, tuning_policy("error"):
            add_sum(kernel, *values())
            assert [each.name for each in driver.binaries] == ["sum_kernel"]
            # Eight warps are not among a launch's arguments: what was compiled tells.
            assert triton_warps(driver) == 2
        with target_driver("sm_90") as driver:
            add_sum(kernel, *values())
            assert triton_warps(driver) == 1, "a bare target has no tables"

    def test_only_entries_with_the_static_bits_pass_the_gate(self, tmp_path):
        self.write(
            tmp_path, entry(FLOAT_KEY, LABELS[1]), entry(FLOAT_KEY | {"SQUARE": True}, LABELS[1], bit_exact=True)
        )
        kernel = tuned_sum(tables=tmp_path)
        with target_driver(TOY_GPU) as driver, tuning_policy("error", bit_exact=True):
            with pytest.raises(RuntimeError, match="no tuned configuration"):
                add_sum(kernel, *values())
            add_sum(kernel, *values(), square=True)
            assert block(driver) == 128
            with tuning_policy("error", bit_exact=False):
                add_sum(kernel, *values())

    def test_the_static_choice_passes_the_gate_by_itself(self, tmp_path):
        self.write(tmp_path, entry(FLOAT_KEY, LABELS[0]))
        with target_driver(TOY_GPU) as driver, tuning_policy("error", bit_exact=True):
            add_sum(tuned_sum(tables=tmp_path), *values())
            assert block(driver) == 64

    @pytest.mark.parametrize(
        ("key", "config", "problem"),
        [
            (FLOAT_KEY, "BLOCK=7 warps=1 stages=1", "is no candidate of the space sum"),
            ({"x_ptr": "float32"}, LABELS[1], "key must name x_ptr, SQUARE"),
            (FLOAT_KEY | {"MORE": 1}, LABELS[1], "key must name x_ptr, SQUARE"),
            (FLOAT_KEY | {"x_ptr": "float33"}, LABELS[1], "has no candidates for"),
        ],
    )
    def test_an_entry_that_does_not_fit_the_space_is_ignored_with_a_warning(
        self, tmp_path, caplog, key, config, problem
    ):
        path = self.write(tmp_path, entry(key, config), entry({"x_ptr": "bfloat16", "SQUARE": False}, LABELS[1]))
        kernel = tuned_sum(tables=tmp_path)
        with target_driver(TOY_GPU) as driver:
            for _ in range(2):
                add_sum(kernel, *values())
                assert block(driver) == 64
            add_sum(kernel, *values(torch.bfloat16))
            assert block(driver) == 128
        (record,) = caplog.records
        assert str(path) in record.message
        assert re.search(r"entry [01] ", record.message)
        assert problem in record.message

    def test_no_folder_and_a_damaged_file_are_warnings(self, tmp_path, caplog):
        path = self.write(tmp_path, entry(FLOAT_KEY, LABELS[1]))
        path.write_text(path.read_text()[:-10])
        with target_driver(TOY_GPU) as driver:
            add_sum(tuned_sum(tables=tmp_path), *values())
            assert block(driver) == 64

            def missing():
                raise FileNotFoundError("no tables here")

            kernel = tuned(space=SUM_SPACE, key=("x_ptr",), restores=("total_ptr",), tables=missing)(sum_kernel)
            add_sum(kernel, *values())
        first, second = caplog.records
        assert str(path) in first.message
        assert "no tables here" in second.message


def triton_warps(driver):
    (device_cache,) = [
        caches[0] for device, caches in sum_kernel.device_caches.items() if device == driver.get_current_device()
    ]
    (binary,) = device_cache.values()
    return binary.metadata.num_warps


def test_without_a_store_there_is_none():
    assert store.current_store() is None
    assert store.guarded(lambda each: 1) is None
