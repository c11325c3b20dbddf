import os
import shutil
import tempfile
from pathlib import Path

import pytest

from automodel.caches.roots import CacheRootError, cache_dir, cache_root

NOBODY = 65534


@pytest.fixture
def read_only_root():
    """A cache root with one folder, `tokens`, that cannot be written; root, whom modes do not bind, acts as nobody."""
    root = Path(tempfile.mkdtemp())
    (root / "tokens").mkdir()
    root.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield root
    if user == 0:
        os.seteuid(user)
    root.chmod(0o755)
    shutil.rmtree(root)


def test_root_prefers_own_variable_then_xdg_then_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.setenv("AUTOMODEL_CACHE", "")
    assert cache_root() == tmp_path / "xdg" / "automodel"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/counts/as/unset")
    assert cache_root() == tmp_path / "home" / ".cache" / "automodel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / "home" / ".cache" / "automodel"
    assert list(tmp_path.iterdir()) == []


def test_root_is_absolute_and_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOMODEL_CACHE", "~/here")
    assert cache_root() == tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", "beside")
    assert cache_root() == tmp_path / "beside"


def test_unknown_home_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", "~no-such-user-anywhere/cache")
    with pytest.raises(CacheRootError, match="AUTOMODEL_CACHE"):
        cache_root()


def test_folder_is_private_and_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "deep" / "root"))
    folder = cache_dir("tokens")
    assert folder == tmp_path / "deep" / "root" / "tokens"
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "kept").touch()
    assert (cache_dir("tokens") / "kept").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", ".hidden"])
def test_name_must_be_one_plain_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="name must be"):
        cache_dir(name)
    assert list(tmp_path.iterdir()) == []


def test_unusable_root_names_path_and_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheRootError, match="AUTOMODEL_CACHE") as caught:
        cache_dir("tokens")
    assert str(tmp_path / "file" / "tokens") in str(caught.value)
    assert isinstance(caught.value, OSError)


def test_read_only_root_refuses_new_folders_but_gives_those_it_has(read_only_root, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(read_only_root))
    assert cache_dir("tokens") == read_only_root / "tokens"
    with pytest.raises(CacheRootError, match="Permission denied"):
        cache_dir("tokenizers")
