import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from automodel.data.cached_files import DamagedFileError, cached_path, load_cached, publish

NOBODY = 65534


@contextmanager
def no_room_beyond(size):
    """Make every write past `size` bytes of a file fail, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def read_only_root(monkeypatch):
    """A cache whose one folder, `kind`, cannot be written; root, whom modes do not bind, acts as nobody."""
    root = Path(tempfile.mkdtemp())
    (root / "kind").mkdir()
    (root / "kind" / "entry").write_bytes(b"old")
    for folder in (root / "kind", root):
        folder.chmod(0o555)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(root))
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield root
    if user == 0:
        os.seteuid(user)
    for folder in (root, root / "kind"):
        folder.chmod(0o755)
    shutil.rmtree(root)


def test_publish_then_load(cache_root):
    path = cached_path("kind", "sub/entry")
    assert path == cache_root / "kind" / "sub" / "entry"
    assert load_cached(path, Path.read_bytes) is None
    assert publish(path, b"content")
    assert load_cached(path, Path.read_bytes) == b"content"
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_keeps_the_file_that_a_writer_replaces():
    path = cached_path("kind", "entry")
    publish(path, b"first")
    with path.open("rb") as reader:
        publish(path, b"second")
        assert reader.read() == b"first"
    assert path.read_bytes() == b"second"


@pytest.mark.parametrize("error", [DamagedFileError("torn"), OSError(5, "Input/output error")])
def test_unusable_file_is_a_warning_that_names_it(error, caplog):
    def load(path):
        raise error

    path = cached_path("kind", "entry")
    assert load_cached(path, load) is None
    assert str(path) in caplog.text
    assert str(error) in caplog.text


def test_full_disk_is_one_warning_and_leaves_nothing_behind(caplog):
    path = cached_path("kind", "entry")
    with no_room_beyond(1000):
        assert not publish(path, b"x" * 5000)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert list(path.parent.iterdir()) == []


def test_full_disk_keeps_the_file_that_was_there():
    path = cached_path("kind", "entry")
    publish(path, b"old")
    with no_room_beyond(1000):
        assert not publish(path, b"x" * 5000)
    assert path.read_bytes() == b"old"


def test_read_only_cache_is_read_and_not_written(read_only_root, caplog):
    path = cached_path("kind", "entry")
    assert load_cached(path, Path.read_bytes) == b"old"
    assert not publish(path, b"new")
    assert cached_path("other", "entry") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert path.read_bytes() == b"old"


def test_a_writer_killed_half_way_leaves_no_entry(cache_root):
    path = cached_path("kind", "entry")
    code = (
        "import os, signal, sys; from pathlib import Path; from automodel.data import cached_files\n"
        "cached_files.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached_files.publish(Path(sys.argv[1]), b'content')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    assert not path.exists()
    assert publish(path, b"content")
    assert path.read_bytes() == b"content"
