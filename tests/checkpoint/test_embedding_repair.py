"""A repaired copy: which bytes change, what is refused, and that a kill leaves nothing under the final name."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from automodel.caches.folder_lock import FolderBusyError, FolderLock
from automodel.checkpoint.embedding_diagnosis import diagnose
from automodel.checkpoint.embedding_files import find_embeddings, read_squared_norms
from automodel.checkpoint.embedding_repair import RepairRefusedError, check_output_folder, repair_on_disk
from embedding_models import DAMAGED, INPUT, OUTPUT, make_weights, write_model

SHARD = "model-00001-of-00004.safetensors"
OTHERS = [f"model-0000{number}-of-00004.safetensors" for number in (2, 3, 4)]


def examine(path, **options):
    found = find_embeddings(path)
    return diagnose(found, read_squared_norms(found.input), **options)


def repair(path, out, *, min_norm=None, **options):
    return repair_on_disk(examine(path, min_norm=min_norm), out, **options)


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expected_rows(weights, ids=DAMAGED):
    """The output embedding's rows with the norm that healthy rows have, rounded once."""
    norms = weights[INPUT].double().norm(dim=1)
    healthy = norms[torch.isfinite(norms) & (norms > 1e-3)]
    rows = weights[OUTPUT][ids].double()
    return rows * (healthy.square().mean().sqrt() / rows.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_damaged_rows_take_the_direction_of_the_output(tmp_path, dtype):
    weights = make_weights(dtype)
    source, out = write_model(tmp_path / "model", weights), tmp_path / "out"
    report = repair(source, out)
    assert report.repaired_row_ids == tuple(DAMAGED)
    repaired = load_file(out / SHARD)[INPUT]
    assert repaired.dtype == dtype
    torch.testing.assert_close(
        repaired[DAMAGED].double(), expected_rows(weights), rtol=torch.finfo(dtype).eps, atol=1e-7
    )
    norms = repaired.double().norm(dim=1)
    torch.testing.assert_close(norms[DAMAGED], torch.full((79,), report.target_norm).double(), rtol=1e-2, atol=0)
    assert examine(out).damaged_ids == []


def test_only_those_rows_change(tmp_path):
    source, out = write_model(tmp_path / "model"), tmp_path / "out"
    before = snapshot(source)
    repair(source, out)
    after = snapshot(out)
    assert snapshot(source) == before
    assert {name for name in before if before[name] != after[name]} == {SHARD}
    assert set(after) == set(before)
    old, new = load_file(source / SHARD)[INPUT], load_file(out / SHARD)[INPUT]
    others = [row for row in range(2048) if row not in DAMAGED]
    assert torch.equal(old[others], new[others])
    with safe_open(out / SHARD, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "number": "1"}
    # Beside the rows not a byte of the file differs, header and metadata included.
    differing = [place for place in range(len(before[SHARD])) if before[SHARD][place] != after[SHARD][place]]
    start = find_embeddings(source).input.offset
    assert {(place - start) // old[0].nbytes for place in differing} == set(DAMAGED)


def test_untouched_weights_are_links_and_the_rest_are_copies(tmp_path):
    source, out = write_model(tmp_path / "model"), tmp_path / "out"
    (source / SHARD).chmod(0o440)
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("notes")
    (source / ".git").mkdir()
    (source / ".git" / "object").write_text("large")
    totals, pieces = [], []
    report = repair(source, out, on_total=totals.append, on_bytes=pieces.append)
    assert (report.folder, report.written_file, report.linked, report.copied) == (out, out / SHARD, 3, 3)
    copied = (SHARD, "config.json", "model.safetensors.index.json", "sub/notes.txt")
    assert totals == [sum(pieces)] == [sum((source / name).stat().st_size for name in copied)]
    assert all((out / name).samefile(source / name) for name in OTHERS)
    for name in copied:
        assert not (out / name).samefile(source / name)
        assert (out / name).stat().st_mode == (source / name).stat().st_mode
    assert not (out / ".git").exists()


def test_the_files_behind_links_are_linked(tmp_path):
    """The cache of downloaded models holds links to files elsewhere."""
    blobs, source = write_model(tmp_path / "blobs"), tmp_path / "snapshot"
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    repair(source, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert all((tmp_path / "out" / name).samefile(blobs / name) for name in OTHERS)


def test_a_filesystem_of_its_own_gets_copies(tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem to write to")
    source = write_model(tmp_path / "model")
    out = shared / f"embedding-repair-{os.getpid()}"
    try:
        totals, pieces = [], []
        report = repair(source, out, on_total=totals.append, on_bytes=pieces.append)
        assert (report.linked, report.copied) == (0, 5)
        assert totals == [sum(pieces)] == [sum(path.stat().st_size for path in source.iterdir())]
        assert snapshot(out).keys() == snapshot(source).keys()
    finally:
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def test_a_single_file(tmp_path):
    source = tmp_path / "weights.safetensors"
    save_file(make_weights(), source, metadata={"format": "pt"})
    (tmp_path / "unrelated").touch()
    report = repair(source, tmp_path / "out")
    assert [path.name for path in report.folder.iterdir()] == ["weights.safetensors"]
    assert examine(report.written_file).damaged_ids == []


def test_healthy_models_are_copied(tmp_path):
    source, out = write_model(tmp_path / "model", make_weights(damaged={})), tmp_path / "out"
    report = repair(source, out)
    assert (report.repaired_row_ids, report.target_norm, report.written_file) == ((), None, None)
    assert snapshot(out) == snapshot(source)


def test_other_weights_are_kept_and_named(tmp_path, caplog):
    source, out = write_model(tmp_path / "model"), tmp_path / "out"
    (source / "pytorch_model.bin").write_bytes(b"damaged too")
    repair(source, out)
    assert (out / "pytorch_model.bin").exists()
    assert "pytorch_model.bin is not one of the model's safetensors files" in caplog.text


def test_the_median_is_offered_where_outliers_distort_the_mean(tmp_path, caplog):
    source = write_model(tmp_path / "model", make_weights(torch.float32, damaged={5: 0.0, 6: 1e4}))
    rms = repair(source, tmp_path / "rms")
    assert "outliers distort the norm" in caplog.text
    caplog.clear()
    median = repair(source, tmp_path / "median", target="median")
    assert caplog.text == ""
    assert rms.target_norm > 100
    norms = load_file(source / SHARD)[INPUT].double().norm(dim=1)
    assert median.target_norm == pytest.approx(float(norms[norms > 0].median()), rel=1e-6)


def without(*names):
    return {name: weight for name, weight in make_weights().items() if name not in names}


def changed(name, change):
    weights = make_weights()
    weights[name] = change(weights[name]).contiguous()
    return weights


def damage_output(output):
    output[DAMAGED[3]] = 0
    output[DAMAGED[7]] = float("inf")
    return output


def in_dtype(name, dtype):
    return changed(name, lambda weight: weight.to(dtype))


REFUSALS = {
    "tied": (without(OUTPUT), {"tie_word_embeddings": True}, {}, "79 rows .* tied to the output embedding"),
    "no_output": (without(OUTPUT), {}, {}, "holds no output embedding"),
    "shape": (changed(OUTPUT, lambda weight: weight[:2000]), {}, {}, r"has shape \[2000, 24\], not \[2048, 24\]"),
    "float8": (
        in_dtype(INPUT, torch.float8_e5m2),
        {},
        {},
        f"{INPUT} is torch.float8_e5m2: rows can be repaired in torch.bfloat16, ",
    ),
    "float8_output": (in_dtype(OUTPUT, torch.float8_e4m3fn), {}, {}, f"{OUTPUT} is torch.float8_e4m3fn: rows can be"),
    "too_many": (make_weights(), {}, {"max_rows": 78}, "79 rows of .* more than max_rows=78"),
    "output": (
        changed(OUTPUT, damage_output),
        {},
        {},
        rf"lm_head.weight are damaged too: ids=\[{DAMAGED[3]}, {DAMAGED[7]}\]",
    ),
    "nothing_healthy": (changed(INPUT, lambda weight: weight * 0), {}, {"max_rows": 9999}, "it has no healthy rows"),
    "overflow": (
        {
            INPUT: torch.cat([torch.full((9, 4), 6e4), torch.zeros(1, 4)]).half(),
            OUTPUT: torch.eye(10, 4).half() + torch.ones(10, 1).half() * 1e-3,
        },
        {},
        {},
        r"would overflow or vanish in torch.float16, the dtype of model.embed_tokens.weight: ids=\[9\]",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_repaired_is_refused_and_leaves_nothing(tmp_path, case):
    weights, settings, options, message = REFUSALS[case]
    if case == "overflow":
        weights[OUTPUT][9] = torch.tensor([1.0, 0, 0, 0])
    source = write_model(tmp_path / "model", weights, **settings)
    before = snapshot(source)
    if case == "overflow":
        # It shows while the copy is written; what was there from a killed run goes away with it.
        (tmp_path / ".out.partial").mkdir()
    with pytest.raises(RepairRefusedError, match=message):
        repair(source, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert snapshot(source) == before


def test_a_bound_without_sense(tmp_path):
    source = write_model(tmp_path / "model")
    with pytest.raises(ValueError, match="max_rows must be positive, got 0"):
        repair(source, tmp_path / "out", max_rows=0)


@pytest.mark.parametrize("out", ["model", "model/inside", ".", "link"])
def test_the_source_is_never_written_to(tmp_path, out):
    source = write_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(source)
    before = snapshot(source)
    with pytest.raises(ValueError, match="must lie outside the source folder"):
        repair(source, tmp_path / out)
    assert snapshot(source) == before


def test_what_exists_is_not_written_over(tmp_path):
    source = write_model(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("full", "full/file", "dangling"):
        with pytest.raises(ValueError, match="exists already"):
            repair(source, tmp_path / name)
    single = tmp_path / "model" / SHARD
    with pytest.raises(ValueError, match="exists already"):
        check_output_folder(find_embeddings(single), single.parent)


def test_an_empty_folder_is_used(tmp_path):
    source = write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    assert repair(source, tmp_path / "out").folder == tmp_path / "out"
    assert snapshot(tmp_path / "out").keys() == snapshot(source).keys()


def test_the_present_folder_is_used_while_it_is_empty(tmp_path, monkeypatch):
    source = write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    repair(source, Path())
    assert snapshot(tmp_path / "out").keys() == snapshot(source).keys()


def test_what_a_killed_repair_left_goes_away(tmp_path):
    source = write_model(tmp_path / "model")
    (tmp_path / ".out.partial" / "sub").mkdir(parents=True)
    (tmp_path / ".out.partial" / "sub" / "half").touch()
    repair(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert snapshot(tmp_path / "out").keys() == snapshot(source).keys()


def test_two_repairs_do_not_mix(tmp_path):
    source = write_model(tmp_path / "model")
    lock = FolderLock(tmp_path / ".out.partial")
    with pytest.raises(FolderBusyError, match="another process"):
        repair(source, tmp_path / "out")
    lock.close()
    repair(source, tmp_path / "out")
