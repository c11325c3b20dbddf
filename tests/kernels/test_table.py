import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import automodel_kernels
from automodel_kernels.tuning.table import Entry, read_table, shipped_tables, table_name, write_table
from kernel_tuning import TOY_GPU

FIND_TABLES = "from automodel_kernels.tuning.table import shipped_tables; print(shipped_tables())"


def test_the_tables_lie_beside_the_package():
    folder = shipped_tables()
    assert folder.parent == Path(automodel_kernels.__file__).parents[1]
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("present", [True, False])
def test_a_copy_of_the_package_finds_its_own_tables_or_names_the_missing_folder(tmp_path, present):
    shutil.copytree(Path(automodel_kernels.__file__).parent, tmp_path / "automodel_kernels")
    if present:
        (tmp_path / "autotune_cache").mkdir()
    found = subprocess.run([sys.executable, "-c", FIND_TABLES], cwd=tmp_path, capture_output=True, text=True)
    expected = str(tmp_path / "autotune_cache")
    if present:
        assert found.stdout.strip() == expected, found.stderr
    else:
        assert found.returncode != 0
        assert f"FileNotFoundError: the shipped tuning tables are missing: {expected}" in found.stderr


KERNEL = "package.module:some_kernel"
FIRST = Entry(
    key={"x_ptr": "bfloat16", "ALIGNED": True},
    config="BLOCK=64 warps=4 stages=1",
    milliseconds=0.25,
    static_milliseconds=0.5,
    bit_exact=False,
    date="2026-11-01",
    torch="2.13.0",
    triton="3.7.1",
    driver="580.1",
)
SECOND = replace(FIRST, key={"x_ptr": "float32", "ALIGNED": True}, static_milliseconds=None, bit_exact=True)


def read(folder, *, device=TOY_GPU, kernel=KERNEL, problem=lambda key, config: ""):
    return read_table(folder, device=device, kernel=kernel, problem=problem)


def test_what_is_written_is_read_and_replaces_what_was_there(tmp_path):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[SECOND, FIRST])
    assert path == tmp_path / "toy_gpu_9000" / "some.json"
    assert sorted(read(tmp_path), key=lambda entry: entry.key["x_ptr"]) == [FIRST, SECOND]
    text = path.read_text()
    assert write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST, SECOND]).read_text() == text
    write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[SECOND])
    assert read(tmp_path) == [SECOND]
    write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[])
    assert read(tmp_path) == []
    assert list(path.parent.iterdir()) == [path]


def test_two_entries_for_one_key_are_refused_and_the_file_stays(tmp_path):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST])
    before = path.read_text()
    with pytest.raises(ValueError, match="entries must have different keys"):
        write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[SECOND, replace(SECOND, config="other")])
    assert path.read_text() == before


def test_a_kernel_without_a_table_has_no_winners(tmp_path, caplog):
    assert read(tmp_path) == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"kernel": "other:some_kernel"}, "kernel must be 'package.module:some_kernel', got 'other:some_kernel'"),
        ({"device": {"name": "Toy GPU 9000", "sm_count": 66, "shared_memory": 1}}, "device must be .*132.*got .*66"),
        ({"entries": {}}, "entries must be a list"),
        ({"more": 1}, "must hold schema, device, kernel and entries"),
    ],
)
def test_a_table_of_something_else_is_ignored_with_a_warning(tmp_path, caplog, change, problem):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read(tmp_path) == []
    (record,) = caplog.records
    assert str(path) in record.message
    assert re.search(problem, record.message)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"{", b"null", b'{"schema": 1}'])
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, caplog, content):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST])
    path.write_bytes(content)
    assert read(tmp_path) == []
    (record,) = caplog.records
    assert f"the tuned configurations in {path} are ignored" in record.message


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(tmp_path, caplog):
    (tmp_path / "toy_gpu_9000" / "some.json").mkdir(parents=True)
    assert read(tmp_path) == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"milliseconds": "0.5"}, "milliseconds has the wrong type, got '0.5'"),
        ({"milliseconds": True}, "milliseconds has the wrong type, got True"),
        ({"milliseconds": 0}, "milliseconds must be positive, got 0"),
        ({"bit_exact": 1}, "bit_exact has the wrong type, got 1"),
        ({"key": []}, "key has the wrong type"),
        ({"static_milliseconds": -1}, "static_milliseconds must be positive, got -1"),
        ({"note": "fast"}, "it must hold key, config"),
    ],
)
def test_a_bad_entry_is_left_out_with_a_warning_and_the_others_count(tmp_path, caplog, change, problem):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST, SECOND])
    content = json.loads(path.read_text())
    content["entries"][0] |= change
    path.write_text(json.dumps(content))
    assert len(read(tmp_path)) == 1
    (record,) = caplog.records
    assert f"entry 0 in {path} is ignored" in record.message
    assert problem in record.message


def test_what_the_kernel_finds_wrong_is_left_out_with_a_warning(tmp_path, caplog):
    path = write_table(tmp_path, device=TOY_GPU, kernel=KERNEL, entries=[FIRST, SECOND])
    found = read(tmp_path, problem=lambda key, config: "no such type" if key["x_ptr"] == "float32" else "")
    assert found == [FIRST]
    (record,) = caplog.records
    assert str(path) in record.message
    assert "no such type" in record.message


@pytest.mark.parametrize("kernel", ["a.b:some_kernel", "a.b:some"])
def test_the_file_has_the_functions_name_without_its_ending(kernel):
    assert table_name(kernel) == "some.json"


def test_every_shipped_table_is_one_of_a_kernel_and_its_readme_names_the_schema():
    readme = (shipped_tables() / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in ("schema", "device", "kernel", "entries", *vars(FIRST)))
