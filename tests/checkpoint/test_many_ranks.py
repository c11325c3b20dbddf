"""Checkpoints of several ranks: exact on any number of them, and one failing rank never leaves a bad one behind."""

import json
import os
import shutil
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel.caches.folder_lock import FolderLock
from automodel.checkpoint.directories import LATEST, LOWEST_VAL, find_latest_checkpoint, read_checkpoint_pointer
from rank_pool import RankError
from small_disks import mounted_tmpfs

SAVERS = [("single", 1), ("fsdp", 4), ("fsdp", 3), ("hsdp", 4), ("ddp", 2)]
READERS = [("single", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("ddp", 2)]


@pytest.fixture(scope="module")
def saved(ranks, sharded, tmp_path_factory):
    """Folders with a checkpoint of each of SAVERS, and what each rank of it held when it saved."""
    folder = tmp_path_factory.mktemp("saved")
    found = {}
    for number, (strategy, world_size) in enumerate(SAVERS):
        root = folder / str(number)
        found[root] = ranks.run(world_size, sharded.train_and_save, strategy, root)
    return found


@pytest.fixture
def of_four(saved):
    """The folder of the checkpoint that four FSDP ranks saved."""
    return next(root for root, held in saved.items() if len(held) == 4)


@pytest.mark.parametrize(("strategy", "world_size"), READERS)
def test_what_any_number_of_ranks_saved_any_other_restores_bit_by_bit(ranks, sharded, saved, strategy, world_size):
    per_rank = ranks.run(world_size, sharded.restore_each, strategy, list(saved))
    for case, held in enumerate(saved.values()):
        restored = [found[case] for found in per_rank]
        for rank, mine in enumerate(restored):
            assert mine["directory"] == held[0]["directory"]
            assert mine["fingerprint"] == held[0]["fingerprint"]
            assert mine["step"] == 2
            if rank < len(held):
                assert mine["draws"] == held[rank]["draws"]
        # The ranks together go on with the samples that the saving ranks would have taken next.
        assert list(chain(*(mine["next"] for mine in restored))) == list(chain(*(rank["next"] for rank in held)))


def test_additional_ranks_draw_numbers_of_their_own_the_same_after_every_restore(ranks, sharded, saved):
    of_one, of_two = (next(root for root, held in saved.items() if len(held) == count) for count in (1, 2))
    found = ranks.run(4, sharded.restore_each, "fsdp", [of_one, of_two, of_one, of_two])
    for case in (0, 1):
        draws = [tuple(mine[case]["draws"]) for mine in found]
        assert len(set(draws)) == 4
        assert draws == [tuple(mine[case + 2]["draws"]) for mine in found]


def test_training_goes_on_alike_on_another_number_of_ranks(ranks, sharded, of_four):
    for strategy, world_size in (("fsdp", 2), ("ddp", 2)):
        fingerprints = ranks.run(world_size, sharded.train_on_alike, strategy, of_four)
        assert all(fingerprint == fingerprints[0] for fingerprint in fingerprints)


def test_what_a_checkpoint_of_several_ranks_holds(of_four, saved):
    directory = saved[of_four][0]["directory"]
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    once = {"checkpoint.json", "config.yaml", "losses.json", "step_scheduler.pt", "optim/.metadata"}
    expected = {
        *(f"rng/rng_global_rank_{rank}.pt" for rank in range(4)),
        *(f"dataloader/dataloader_dp_rank_{rank}.pt" for rank in range(4)),
        *(f"optim/__{rank}_0.distcp" for rank in range(4)),
        *(f"model/shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, 5)),
    }
    assert names == once | expected
    manifest = json.loads((directory / "checkpoint.json").read_text())
    assert manifest["ranks"] == 4
    assert manifest["model_class"] == "Odd"
    assert read_checkpoint_pointer(of_four, LATEST) == directory


def test_a_tied_tensor_is_stored_once_and_stays_tied(ranks, sharded, tmp_path):
    held = ranks.run(2, sharded.train_and_save, "fsdp", tmp_path, None, "tied")
    restored = ranks.run(4, sharded.restore_each, "fsdp", [tmp_path], "tied")
    assert [found[0]["fingerprint"] for found in restored] == [held[0]["fingerprint"]] * 4
    assert held[0]["fingerprint"]["head.weight"] == held[0]["fingerprint"]["embedding.weight"]


def test_old_checkpoints_go_once(ranks, sharded, tmp_path):
    settings = {"max_recent_checkpoints": 1, "save_consolidated": False}
    held = ranks.run(2, sharded.train_and_save, "fsdp", tmp_path, settings, "odd", 3)
    # LOWEST_VAL names the first one.
    assert sorted(path.name for path in tmp_path.glob("epoch_*")) == ["epoch_0_step_2", "epoch_0_step_6"]
    assert held[0]["directory"].name == held[1]["directory"].name == "epoch_0_step_6"


@pytest.mark.parametrize(
    ("strategy", "world_size", "model"),
    [
        ("fsdp", 4, "llama"),
        ("fsdp", 3, "tied llama"),
        ("fsdp", 2, "hybrid"),
        ("hsdp", 4, "tied llama"),
        ("ddp", 2, "llama"),
    ],
)
def test_the_consolidated_copy_loads_in_plain_transformers(ranks, sharded, tmp_path, strategy, world_size, model):
    counts = ranks.run(world_size, sharded.consolidate, strategy, tmp_path, model)
    folder = tmp_path / "epoch_0_step_1/model/consolidated"
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    torch.manual_seed(7)
    original = sharded.MODELS[model]().eval()
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(original).__name__]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert counts == [len(original.state_dict()), *[0] * (world_size - 1)]


def assert_failed(facts, *, rank, says):
    """Every rank raised for the one that failed, nothing that was good is lost, and saving works again."""
    for mine in facts:
        assert mine["message"] is not None, "the save succeeded"
        assert f"rank {rank} failed: " in mine["message"]
        assert says in mine["message"]
        assert f"the last good checkpoint is {mine['good']}" in mine["message"]
        assert mine["incomplete"]
        assert mine["latest"] == mine["good"]
        assert mine["latest at last"] == mine["failed"]


def largest(folder):
    return max(path.stat().st_size for path in folder.iterdir() if path.is_file())


# Plain SGD keeps no state, so that the random state is larger than what the optimizer writes.
@pytest.mark.parametrize(
    ("faulty", "size", "optimizer", "fits", "fails"),
    [
        (0, 300, "AdamW", None, "model"),
        (2, 300, "AdamW", None, "model"),
        (1, 9_000, "AdamW", "model", "optim"),
        (0, 14_000, "SGD", "optim", "rng"),
        (3, 14_000, "SGD", "optim", "rng"),
    ],
)
def test_a_rank_that_fails_to_write_fails_the_save_on_every_rank(
    ranks, sharded, tmp_path, faulty, size, optimizer, fits, fails
):
    facts = ranks.run(4, sharded.save_beside_a_small_limit, tmp_path, faulty, size, {"optimizer": optimizer})
    good = facts[0]["good"]
    assert (0 if fits is None else largest(good / fits)) < size < largest(good / fails), (
        "the limit is not between the two files"
    )
    assert_failed(facts, rank=faulty, says="OSError: [Errno 27] File too large")
    restored = ranks.run(1, sharded.restore_each, "single", [tmp_path], "odd", optimizer)
    assert restored[0][0]["step"] == 2


@pytest.mark.parametrize(("faulty", "size"), [(0, 300), (2, 300), (1, 9_000)])
def test_a_failed_save_over_the_only_checkpoint_leaves_it(ranks, sharded, tmp_path, faulty, size):
    ends = ranks.run(3, sharded.save_over_beside_a_small_limit, tmp_path, faulty, size)
    for message, found, _ in ends:
        assert message is not None, "the save succeeded"
        assert f"rank {faulty} failed: OSError: [Errno 27] File too large" in message
        assert f"the last good checkpoint is {tmp_path / 'epoch_0_step_2'}" in message
        assert found
    restored = ranks.run(1, sharded.restore_each, "single", [tmp_path])
    assert restored[0][0]["fingerprint"] == ends[0][2]
    assert json.loads((tmp_path / "epoch_0_step_2/losses.json").read_text()) == {"val_loss": 1.0}


def test_losses_that_rank_zero_cannot_add_fail_on_every_rank(ranks, sharded, tmp_path):
    ends = ranks.run(2, sharded.add_losses, tmp_path, 10)
    for message, holds in ends:
        assert message is not None
        assert message.startswith(
            f"{tmp_path / 'epoch_0_step_1/losses.json'} could not be updated: rank 0 failed: OSError"
        )
        assert holds
    losses = json.loads((tmp_path / "epoch_0_step_1/losses.json").read_text())
    assert losses == {"train_loss": 1.0, "val_loss": 3.0}
    assert read_checkpoint_pointer(tmp_path, LOWEST_VAL) == tmp_path / "epoch_0_step_1"


def test_a_consolidated_copy_that_cannot_be_written_fails_the_save(ranks, sharded, tmp_path):
    settings = {"save_consolidated": "every"}
    parts = {"model": "wide llama"}
    facts = ranks.run(4, sharded.save_beside_a_small_limit, tmp_path, 0, 150_000, parts, settings)
    assert_failed(facts, rank=0, says="File too large (os error 27)")
    good = facts[0]["good"]
    assert largest(good / "model") < 150_000
    assert largest(good / "optim") < 150_000 < largest(good / "model/consolidated")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_rank_that_may_not_write_is_named(ranks, sharded, tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tmp_path.parent.parent):
            folder.chmod(0o755)
    facts = ranks.run(3, sharded.save_beside_a_locked_out_rank, tmp_path, 1)
    assert_failed(facts, rank=1, says="Permission denied")


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 2 MiB."""
    with mounted_tmpfs(tmp_path / "disk", size="2m") as folder:
        yield folder


@pytest.mark.parametrize("left", [0, 50_000, 300_000])
def test_a_full_disk_fails_the_save_on_every_rank(ranks, sharded, small_disk, left):
    facts = ranks.run(2, sharded.save_on_a_full_disk, small_disk, left)
    for mine in facts:
        assert mine["message"] is not None, "the disk was not full"
        assert mine["latest"] == mine["good"]
        assert mine["latest at last"] == mine["failed"]


@pytest.mark.parametrize(("victim", "number"), [(1, 4), (0, 9)])
def test_a_rank_that_is_killed_leaves_the_last_good_checkpoint(
    fresh_ranks, ranks, sharded, of_four, saved, tmp_path, victim, number
):
    root = tmp_path / "copy"
    shutil.copytree(of_four, root, symlinks=True)
    with pytest.raises(RankError) as error:
        fresh_ranks.run(2, sharded.save_and_die, root, victim, number)
    assert error.value.failures[victim] == "died of SIGKILL"
    good = find_latest_checkpoint(root)
    assert good is not None
    assert good.name == "epoch_0_step_2"
    restored = ranks.run(1, sharded.restore_each, "single", [root])
    assert restored[0][0]["fingerprint"] == saved[of_four][0]["fingerprint"]


def test_an_interrupt_of_one_rank_interrupts_all_of_them(ranks, sharded, tmp_path):
    assert ranks.run(2, sharded.save_and_interrupt, tmp_path) == [("KeyboardInterrupt", "epoch_0_step_1")] * 2


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def test_a_damaged_file_is_named_on_every_rank(ranks, sharded, of_four, saved, tmp_path):
    damages = [
        ("model/shard-00003-model-00001-of-00001.safetensors", truncate),
        ("model/shard-00002-model-00001-of-00001.safetensors", lambda file: file.unlink()),
        ("optim/__2_0.distcp", truncate),
        ("optim/__1_0.distcp", lambda file: file.unlink()),
        ("optim/.metadata", truncate),
        ("rng/rng_global_rank_2.pt", truncate),
        ("rng/rng_global_rank_3.pt", lambda file: file.unlink()),
        ("dataloader/dataloader_dp_rank_1.pt", truncate),
        ("step_scheduler.pt", lambda file: file.write_bytes(b"nonsense")),
        ("checkpoint.json", lambda file: file.write_text("{")),
    ]
    folders = []
    for number, (name, damage) in enumerate(damages):
        copy = tmp_path / str(number) / "epoch_0_step_2"
        shutil.copytree(saved[of_four][0]["directory"], copy)
        damage(copy / name)
        folders.append(copy)
    for messages in ranks.run(4, sharded.restore_damaged, folders):
        for folder, (name, _), message in zip(folders, damages, messages, strict=True):
            assert message is not None, f"{name} was restored"
            # A shard that is gone is seen by what is missing of the tensors.
            wanted = "a shard is missing" if "shard-00002" in name else str(folder / name)
            assert wanted in message
            assert "Traceback" not in message


def test_rank_zero_decides_what_is_resumed(ranks, sharded, of_four, saved):
    directory = saved[of_four][0]["directory"]
    assert ranks.run(3, sharded.find, of_four, None) == [directory] * 3
    missing = ranks.run(2, sharded.find, of_four, "epoch_0_step_77")
    assert missing[0].startswith("FileNotFoundError: checkpoint.restore_from: 'epoch_0_step_77'")
    assert missing[1].startswith("PeerError: rank 0 failed: FileNotFoundError: checkpoint.restore_from")


def test_a_folder_that_another_job_holds_is_refused_on_every_rank(ranks, sharded, tmp_path):
    root = tmp_path / "checkpoints"
    lock = FolderLock(root)
    refusals = ranks.run(2, sharded.open_store, root)
    assert refusals[0] == f"FolderBusyError: another process is working in {root}"
    assert refusals[1] == f"PeerError: rank 0 failed: {refusals[0]}"
    lock.close()
    assert ranks.run(2, sharded.open_store, root) == [None, None]


def test_a_folder_that_the_ranks_do_not_share_is_refused(ranks, sharded, tmp_path):
    roots = [tmp_path / "one", tmp_path / "other"]
    opened, saved = zip(*ranks.run(2, sharded.disagree_about_the_folder, roots), strict=True)
    assert "rank 1 failed: FileNotFoundError" in opened[0]
    assert opened[1].startswith(f"FileNotFoundError: the folder {roots[1]}, which rank 0 made, is not there")
    for end in saved:
        assert end.startswith("CheckpointSaveError: ")
        assert "rank 1 failed: FileNotFoundError: the folder" in end
        assert "must be on a filesystem that all ranks share" in end
    FolderLock(roots[0]).close()
