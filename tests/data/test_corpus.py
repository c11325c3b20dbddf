import hashlib
import os
import sysconfig
from pathlib import Path

import pytest

from automodel.data.corpus import CorpusFile, corpus_digest, find_files, hash_order, split_files


def write(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")


def names(files):
    return [file.name for file in files]


def test_stdlib_holds_the_library_and_neither_tests_nor_packages():
    files = find_files("stdlib")
    found = names(files)
    assert {"argparse.py", "json/decoder.py", "__future__.py"} <= set(found)
    assert found == sorted(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert all(file.path == Path(sysconfig.get_paths()["stdlib"]) / file.name for file in files)


def test_folder_is_sorted_by_name_and_keeps_folders_the_stdlib_leaves_out(tmp_path):
    write(tmp_path, ["b.py", "a/z.py", "a.py", "tests/t.py", "note.txt"])
    assert names(find_files(tmp_path)) == ["a.py", "a/z.py", "b.py", "tests/t.py"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", ["a/b/deep.txt", "a/mid.txt", "top.txt"]),
        ("*.txt", ["top.txt"]),
        ("a/*.txt", ["a/mid.txt"]),
        ("a/**/*.txt", ["a/b/deep.txt", "a/mid.txt"]),
        ("**/d??p.*", ["a/b/deep.txt"]),
        ("a/**", ["a/b/deep.txt", "a/mid.txt"]),
    ],
)
def test_pattern(pattern, expected, tmp_path):
    write(tmp_path, ["top.txt", "a/mid.txt", "a/b/deep.txt", "other.md"])
    assert names(find_files(tmp_path, pattern=pattern)) == expected


def test_single_file_needs_no_pattern(tmp_path):
    write(tmp_path, ["poem.txt"])
    assert find_files(tmp_path / "poem.txt") == [CorpusFile(name="poem.txt", path=tmp_path / "poem.txt")]


def test_link_loops_end_and_linked_folders_are_read_once(tmp_path):
    write(tmp_path, ["corpus/a/x.py", "elsewhere/y.py"])
    (tmp_path / "corpus" / "a" / "up").symlink_to(tmp_path / "corpus", target_is_directory=True)
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "corpus" / "linked_again").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert names(find_files(tmp_path / "corpus")) == ["a/x.py", "linked/y.py"]


def test_dangling_links_and_pipes_are_passed_over_with_a_warning(tmp_path, caplog):
    write(tmp_path, ["x.py"])
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    assert names(find_files(tmp_path)) == ["x.py"]
    assert "gone.py" in caplog.text
    assert "pipe.py" in caplog.text


@pytest.mark.parametrize("source", ["no/such/folder", "STDLIB"])
def test_missing_source(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=source):
        find_files(source)


def test_no_matching_file_names_source_and_pattern(tmp_path):
    write(tmp_path, ["a.txt"])
    with pytest.raises(ValueError, match=r"no file that matches the pattern '\*\*/\*.py'"):
        find_files(tmp_path)


def test_file_that_vanished_is_a_clear_error(tmp_path):
    write(tmp_path, ["a.py"])
    files = find_files(tmp_path)
    (tmp_path / "a.py").unlink()
    with pytest.raises(ValueError, match=r"a\.py"):
        files[0].read_text()


def test_text_keeps_line_ends_and_replaces_what_is_not_utf8(tmp_path):
    (tmp_path / "a.py").write_bytes(b"caf\xe9\r\nna\xc3\xafve\n")
    assert find_files(tmp_path)[0].read_text() == "caf\ufffd\r\nna\u00efve\n"


def test_digest_depends_on_names_and_contents_and_on_where_they_part(tmp_path):
    def digest(**contents):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in contents.items():
            (folder / name).write_text(content)
        return corpus_digest(find_files(folder, pattern="*"))

    original = digest(a="one", b="two")
    assert digest(a="one", b="two") == original
    different = [digest(a="one", c="two"), digest(a="onet", b="wo"), digest(a="one", bt="wo"), digest(a="one")]
    assert len({original, *different}) == 5


def test_hash_order_depends_on_the_name_alone():
    files = [CorpusFile(name=name, path=Path("/x") / name) for name in ("c", "a", "b", "d/\udcff")]
    by_name = sorted(("c", "a", "b"), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert [files[i].name for i in hash_order(files) if files[i].name in by_name] == by_name
    assert sorted(hash_order(files)) == [0, 1, 2, 3]


def test_split_is_by_file_disjoint_complete_and_large_enough():
    files = [CorpusFile(name=f"f{i}", path=Path(f"/x/f{i}")) for i in range(40)]
    counts = [10 + i for i in range(40)]
    training, held_out = split_files(files, token_counts=counts, validation_tokens=200)
    assert sorted(training + held_out) == list(range(40))
    assert training == sorted(training)
    held_tokens = sum(counts[i] for i in held_out)
    # Files of more than 20 tokens come last.
    order = sorted(hash_order(files), key=lambda index: counts[index] > 20)
    last_taken = max(held_out, key=order.index)
    assert held_tokens >= 200 > held_tokens - counts[last_taken]


def test_split_takes_a_large_file_only_when_the_small_ones_do_not_suffice():
    files = [CorpusFile(name=f"f{i}", path=Path(f"/x/f{i}")) for i in range(30)]
    counts = [1_000 if i % 3 == 0 else 10 for i in range(30)]
    _, held_out = split_files(files, token_counts=counts, validation_tokens=150)
    assert [counts[i] for i in held_out] == [10] * 15
    _, held_out = split_files(files, token_counts=counts, validation_tokens=300)
    assert sorted(counts[i] for i in held_out) == [10] * 20 + [1_000]


def test_split_is_the_same_whatever_order_the_files_come_in():
    files = [CorpusFile(name=f"f{i}", path=Path(f"/x/f{i}")) for i in range(20)]
    _, held_out = split_files(files, token_counts=[5] * 20, validation_tokens=22)
    _, reverse = split_files(files[::-1], token_counts=[5] * 20, validation_tokens=22)
    assert {files[i].name for i in held_out} == {files[::-1][i].name for i in reverse}


@pytest.mark.parametrize("validation_tokens", [100, 91, 1000])
def test_corpus_too_small_to_split(validation_tokens):
    files = [CorpusFile(name=f"f{i}", path=Path(f"/x/f{i}")) for i in range(10)]
    with pytest.raises(ValueError, match=f"validation_tokens {validation_tokens}"):
        split_files(files, token_counts=[10] * 10, validation_tokens=validation_tokens)


@pytest.mark.parametrize("validation_tokens", [0, -1])
def test_validation_tokens_must_be_positive(validation_tokens):
    with pytest.raises(ValueError, match=f"validation_tokens must be positive, got {validation_tokens}"):
        split_files([], token_counts=[], validation_tokens=validation_tokens)
