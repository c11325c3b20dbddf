import re

import pytest
import torch

from automodel.config.loader import ConfigNode
from automodel.config.sections import build_section
from automodel.data.loader import StatefulDataLoader
from automodel.training.step_scheduler import StepScheduler, StepSchedulerConfig


class Batches:
    """A loader whose batch i of epoch e is {"epoch": e, "index": i}; `start` is where its next iteration begins."""

    def __init__(self, length, *, start=0, epoch=0):
        self.length, self.start, self.epoch = length, start, epoch

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __iter__(self):
        start, self.start = self.start, 0
        return ({"epoch": self.epoch, "index": index} for index in range(start, self.length))


def walk(scheduler, loader):
    """Every step as (step, epoch, batches)."""
    return [
        (scheduler.step, scheduler.epoch, [(batch["epoch"], batch["index"]) for batch in batches])
        for batches in scheduler.steps(loader)
    ]


def scheduler_of(batches_per_epoch, *, dp_size=1, **settings):
    return StepScheduler(StepSchedulerConfig(**settings), batches_per_epoch=batches_per_epoch, dp_size=dp_size)


def test_steps_count_from_zero_and_the_last_of_an_epoch_may_be_short():
    scheduler = scheduler_of(5, global_batch_size=4, local_batch_size=2, num_epochs=2)
    assert (scheduler.step, scheduler.epoch, scheduler.total_steps, scheduler.steps_per_epoch) == (-1, 0, 6, 3)
    assert walk(scheduler, Batches(5)) == [
        (0, 0, [(0, 0), (0, 1)]),
        (1, 0, [(0, 2), (0, 3)]),
        (2, 0, [(0, 4)]),
        (3, 1, [(1, 0), (1, 1)]),
        (4, 1, [(1, 2), (1, 3)]),
        (5, 1, [(1, 4)]),
    ]
    assert scheduler.finished
    assert walk(scheduler, Batches(5)) == []


@pytest.mark.parametrize(("max_steps", "total"), [(1, 1), (3, 3), (4, 4), (5, 5), (6, 6), (100, 6), (None, 6)])
def test_steps_end_at_max_steps_or_with_the_epochs(max_steps, total):
    scheduler = scheduler_of(3, max_steps=max_steps, num_epochs=2)
    assert scheduler.total_steps == total
    assert [step for step, _, _ in walk(scheduler, Batches(3))] == list(range(total))


@pytest.mark.parametrize(("dp_size", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_accumulation_over_ranks(dp_size, accumulation):
    config = StepSchedulerConfig(global_batch_size=12, local_batch_size=2)
    assert config.accumulation_steps(dp_size) == accumulation
    scheduler = scheduler_of(12, dp_size=dp_size, global_batch_size=12, local_batch_size=2, num_epochs=1)
    assert {len(batches) for _, _, batches in walk(scheduler, Batches(12))} == {accumulation}


def test_a_global_batch_that_does_not_divide_evenly_is_named():
    with pytest.raises(ValueError, match=r"global_batch_size must be a multiple of local_batch_size \(2\), got 5"):
        StepSchedulerConfig(global_batch_size=5, local_batch_size=2)
    message = r"step_scheduler\.global_batch_size must be a multiple of .* \(2 x 4\), got 12"
    with pytest.raises(ValueError, match=message):
        scheduler_of(12, dp_size=4, global_batch_size=12, local_batch_size=2)


@pytest.mark.parametrize(
    ("batches", "drop_last", "num_samples", "named"), [(0, False, None, 0), (1, True, None, 4), (1, True, 7, 7)]
)
def test_data_without_a_step_is_refused(batches, drop_last, num_samples, named):
    config = StepSchedulerConfig(global_batch_size=8, local_batch_size=2)
    message = rf"step_scheduler\.global_batch_size must be .* training samples \({named}\), got 8: .*drop_last: false"
    with pytest.raises(ValueError, match=message):
        StepScheduler(config, batches_per_epoch=batches, dp_size=2, drop_last=drop_last, num_samples=num_samples)


def test_with_drop_last_the_batches_that_make_no_whole_step_are_left_out():
    config = StepSchedulerConfig(global_batch_size=4, local_batch_size=2, num_epochs=2)
    scheduler = StepScheduler(config, batches_per_epoch=5, drop_last=True)
    assert (scheduler.total_steps, scheduler.steps_per_epoch) == (4, 2)
    assert walk(scheduler, Batches(5)) == [
        (0, 0, [(0, 0), (0, 1)]),
        (1, 0, [(0, 2), (0, 3)]),
        (2, 1, [(1, 0), (1, 1)]),
        (3, 1, [(1, 2), (1, 3)]),
    ]


def test_a_loader_that_gives_nothing_does_not_hang():
    class Empty(Batches):
        def __iter__(self):
            return iter(())

    with pytest.raises(RuntimeError, match="no batch for step 0 in epoch 0"):
        walk(scheduler_of(3), Empty(3))


def test_a_loader_that_ends_early_does_not_hand_out_its_first_batches_again():
    steps = scheduler_of(3).steps(Batches(2))
    assert [next(steps), next(steps)] == [[{"epoch": 0, "index": 0}], [{"epoch": 0, "index": 1}]]
    with pytest.raises(RuntimeError, match="no batch for step 2 in epoch 0"):
        next(steps)


def due_steps(name, batches_per_epoch=4, **settings):
    scheduler = scheduler_of(batches_per_epoch, **settings)
    return [scheduler.step for _ in scheduler.steps(Batches(batches_per_epoch)) if getattr(scheduler, name)]


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, [3, 7, 9]),
        ({"save_checkpoint_every_epoch": False}, [9]),
        ({"save_checkpoint_every_epoch": False, "ckpt_every_steps": 3}, [2, 5, 8, 9]),
        ({"ckpt_every_steps": 3}, [2, 3, 5, 7, 8, 9]),
        ({"save_checkpoint_every_epoch": False, "ckpt_every_steps": 5}, [4, 9]),
        ({"save_checkpoint_every_epoch": False, "ckpt_every_steps": 100}, [9]),
    ],
)
def test_checkpoints_are_due(settings, due):
    assert due_steps("is_checkpoint_due", max_steps=10, **settings) == due


@pytest.mark.parametrize(("every", "due"), [(None, [9]), (4, [3, 7, 9]), (5, [4, 9]), (1, list(range(10)))])
def test_validations_are_due(every, due):
    assert due_steps("is_validation_due", max_steps=10, val_every_steps=every) == due


@pytest.mark.parametrize(("every", "due"), [(None, []), (4, [3, 7]), (10, [9])])
def test_garbage_collections_are_due(every, due):
    assert due_steps("is_gc_due", max_steps=10, gc_every_steps=every) == due


def test_epoch_ends():
    assert due_steps("is_epoch_end", max_steps=10) == [3, 7]
    assert due_steps("is_epoch_end", batches_per_epoch=3, global_batch_size=2, num_epochs=2) == [1, 3]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}


@pytest.mark.parametrize("stop_after", range(9))
def test_a_resumed_run_takes_the_steps_that_were_left(stop_after):
    def start():
        loader = StatefulDataLoader(Numbers(), 2, shuffle=True, seed=3)
        settings = StepSchedulerConfig(global_batch_size=4, local_batch_size=2, num_epochs=3)
        return StepScheduler(settings, batches_per_epoch=len(loader)), loader

    def samples(scheduler, loader):
        for batches in scheduler.steps(loader):
            yield scheduler.step, scheduler.epoch, [batch["sample_indices"] for batch in batches]

    whole = list(samples(*start()))
    assert len(whole) == 9
    scheduler, loader = start()
    for step, _, _ in samples(scheduler, loader):
        if step == stop_after:
            break
    states = scheduler.state_dict(), loader.state_dict()
    scheduler, loader = start()
    scheduler.load_state_dict(states[0])
    loader.load_state_dict(states[1])
    assert list(samples(scheduler, loader)) == whole[stop_after + 1 :]


def test_the_position():
    scheduler = scheduler_of(2, num_epochs=3)
    for _ in scheduler.steps(Batches(2)):
        if scheduler.step == 2:
            break
    assert scheduler.state_dict() == {"version": 1, "step": 2, "epoch": 1, "steps_per_epoch": 2}
    resumed = scheduler_of(2, num_epochs=3)
    resumed.load_state_dict(scheduler.state_dict())
    assert (resumed.step, resumed.epoch, resumed.finished) == (2, 1, False)
    with pytest.raises(ValueError, match="state has version 2, newer than 1"):
        resumed.load_state_dict({"version": 2, "step": 0, "epoch": 0, "steps_per_epoch": 2})


def test_a_position_among_epochs_of_another_length_is_refused():
    scheduler = scheduler_of(2, num_epochs=3)
    with pytest.raises(ValueError, match=r"epochs have 5 steps, but 2 here: .*step_scheduler\.global_batch_size"):
        scheduler.load_state_dict({"version": 1, "step": 3, "epoch": 0, "steps_per_epoch": 5})
    assert (scheduler.step, scheduler.epoch) == (-1, 0)


def test_a_run_that_is_past_its_new_end_is_finished():
    scheduler = scheduler_of(2, max_steps=3)
    scheduler.load_state_dict({"version": 1, "step": 5, "epoch": 2, "steps_per_epoch": 2})
    assert scheduler.finished
    assert walk(scheduler, Batches(2)) == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [(key, 0, "positive") for key in ("global_batch_size", "local_batch_size", "num_epochs", "log_remote_every_steps")]
    + [(key, -1, "positive or null") for key in ("max_steps", "ckpt_every_steps", "val_every_steps", "gc_every_steps")]
    + [("nonfinite_loss", "ignore", "one of 'stop', 'skip'")],
)
def test_a_refused_setting_is_named(key, value, expected):
    message = f"step_scheduler.{key} must be {expected}, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_section(StepSchedulerConfig, ConfigNode({key: value}), "step_scheduler")
