"""Embeddings on the disk in processes of their own: how much memory they take, and what is left of a killed repair."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from embedding_models import INPUT, write_model

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def ask():
    """Asks the process of embedding_process.py; None where its fork was killed."""
    command = [sys.executable, str(Path(__file__).with_name("embedding_process.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(**request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline().strip() or "null")

    yield ask
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == 0


def sparse_model(folder, *, rows, columns, with_values):
    """A file of fp32 numbers whose rows are holes, but for one number each where there are values."""
    folder.mkdir()
    size = rows * columns * 4
    header = json.dumps({INPUT: {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        file.truncate(start + size)
        for row in range(rows) if with_values else ():
            file.seek(start + row * columns * 4)
            file.write(struct.pack("<f", 1.0))
    return folder


@pytest.mark.parametrize(
    ("mebibytes", "rows", "with_values"), [(256, 1024, True), (128, 32_768, False)], ids=["healthy", "zero"]
)
def test_a_large_embedding_is_read_in_little_memory(tmp_path, ask, mebibytes, rows, with_values):
    columns = mebibytes * MEBIBYTE // 4 // rows
    folder = sparse_model(tmp_path / "model", rows=rows, columns=columns, with_values=with_values)
    assert (folder / "model.safetensors").stat().st_size > mebibytes * MEBIBYTE
    assert ask(read=str(folder)) < 64 * MEBIBYTE


def test_the_mode_of_a_link_is_left_alone(tmp_path, ask):
    """It is the original's, and of another user's file it cannot be changed."""
    source = write_model(tmp_path / "model")
    names = ask(repair=str(source), out=str(tmp_path / "out"))
    assert sorted(names) == ["config.json", "model-00001-of-00004.safetensors", "model.safetensors.index.json"]


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_kill_at_any_change_leaves_the_whole_copy_or_none(tmp_path, ask):
    source = write_model(tmp_path / "model")
    assert ask(repair=str(source), out=str(tmp_path / "whole"), die_before=0) == "done"
    before, whole = snapshot(source), snapshot(tmp_path / "whole")
    survived, outcomes = False, []
    for number in range(1, 60):
        out = tmp_path / "out"
        survived = ask(repair=str(source), out=str(out), die_before=number) == "done"
        outcomes.append(out.exists())
        assert snapshot(source) == before
        if out.exists():
            assert snapshot(out) == whole
        if survived:
            break
        if out.exists():
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
    assert survived, "the repair has more changes than were tried"
    assert outcomes.count(False) > 8, "the repair was killed at too few places"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "whole", "out"}
