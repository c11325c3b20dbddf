import pytest


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    """Each test has a cache of its own, outside the folder it writes corpora to."""
    root = tmp_path / "cache-of-this-test"
    monkeypatch.setenv("AUTOMODEL_CACHE", str(root))
    return root


@pytest.fixture
def corpus(tmp_path):
    """A small corpus of twelve text files in two folders: distinct words, one file empty, one with no final newline."""
    folder = tmp_path / "corpus"
    for number in range(12):
        path = folder / ("a" if number % 2 else "b") / f"file{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if number == 4 else "".join(f"value_{number}_{i} = {i * number}\n" for i in range(20)))
    (folder / "a" / "file01.py").write_text("no newline at the end")
    return folder
