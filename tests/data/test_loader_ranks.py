"""What several ranks get: all samples once, equally many batches, the same sums, and the same position after a step."""

import math
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from automodel.data.collate import IGNORE_INDEX
from automodel.data.loader import StatefulDataLoader
from automodel.training.loss import MaskedCrossEntropy
from automodel.training.step_scheduler import StepScheduler, StepSchedulerConfig

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)


class Ragged(torch.utils.data.Dataset):
    """Sample i has 2 + i % 3 tokens, of which the first has no label."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.arange(2 + index % 3) + index
        return {"input_ids": tokens % 16, "labels": torch.cat([torch.tensor([IGNORE_INDEX]), tokens[1:] % 16])}


def loaders_of(dataset, world_size, batch_size=2, **arguments):
    return [
        StatefulDataLoader(dataset, batch_size, rank=rank, world_size=world_size, **arguments)
        for rank in range(world_size)
    ]


def sums(loader):
    """Sum of a value per label token, label tokens, and samples, over all batches of a loader."""
    totals = torch.zeros(3, dtype=torch.int64)
    for batch in loader:
        counted = batch["labels"] != IGNORE_INDEX
        values = (batch["labels"] + 1) * (batch["input_ids"] + 3)
        totals += torch.tensor([int(values[counted].sum()), int(counted.sum()), len(batch["sample_indices"])])
    return totals.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_sums_over_label_tokens_do_not_depend_on_the_number_of_ranks(world_size, batch_size):
    for size in range(1, 21):
        loaders = loaders_of(Ragged(size), world_size, batch_size, shuffle=True, seed=size)
        assert {len(loader) for loader in loaders} == {-(-size // (batch_size * world_size))}
        assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders]
        expected = sums([Ragged(size)[index] | {"sample_indices": [index]} for index in range(size)])
        assert [sum(column) for column in zip(*map(sums, loaders), strict=True)] == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_without_a_sample_gets_one_that_does_not_count(num_workers):
    loaders = loaders_of(Ragged(9), 4, num_workers=num_workers)
    last = [list(loader)[-1] for loader in loaders]
    assert [batch["sample_indices"] for batch in last] == [[], [], [], [8]]
    for batch in last:
        assert batch["input_ids"].tolist() == [[8, 9, 10, 11]]
    assert [batch["labels"].tolist() for batch in last] == [[[IGNORE_INDEX] * 4]] * 3 + [[[IGNORE_INDEX, 9, 10, 11]]]
    assert [loader.batches_seen for loader in loaders] == [2] * 4


def test_the_labels_of_the_dataset_stay_as_they_are():
    samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([3, 4])}]
    stand_in, real = (list(loader) for loader in loaders_of(samples, 2, collate_fn=lambda found: found[0]))
    assert stand_in[0]["labels"].tolist() == [IGNORE_INDEX] * 2
    assert real[0]["labels"] is samples[0]["labels"]
    assert samples[0]["labels"].tolist() == [3, 4]


def test_with_drop_last_no_rank_is_without_a_sample():
    loaders = loaders_of(Ragged(9), 4, drop_last=True)
    assert [[batch["sample_indices"] for batch in loader] for loader in loaders] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
        [[6, 7]],
    ]
    assert [loader.drop_last for loader in loaders + loaders_of(Ragged(9), 1)] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("collated", "got"), [({"input_ids": torch.zeros(1)}, r"only \['input_ids'\]"), ({"labels": [1, 2]}, "a list")]
)
def test_batches_without_labels_are_refused_by_all_ranks_at_the_same_batch(collated, got):
    for loader in loaders_of(list(range(9)), 4, collate_fn=lambda samples: collated):
        batches = iter(loader)
        next(batches)
        with pytest.raises(
            ValueError, match=rf"tensor `labels`, got {got}: 3 of 4 ranks have no sample of the last global batch"
        ):
            next(batches)
        assert loader.batches_seen == 1
    # Where each rank has samples, labels are the collate function's own affair.
    assert [len(list(loader)) for loader in loaders_of(list(range(12)), 4, collate_fn=lambda samples: collated)] == [
        2
    ] * 4


def validation_loss(rank, world_size, sizes):
    """The losses of validations in which each forward pass waits for the other ranks, as a sharded model's does."""
    loss_fn, losses = MaskedCrossEntropy(), []
    for size in sizes:
        total = torch.zeros(2, dtype=torch.float64)
        for batch in StatefulDataLoader(Ragged(size), 2, rank=rank, world_size=world_size):
            ranks_here = torch.ones(())
            dist.all_reduce(ranks_here)
            logits = torch.sin(torch.arange(16.0) * (batch["input_ids"][..., None] + ranks_here / world_size))
            total[0] += loss_fn(logits, batch["labels"], num_label_tokens=1)
            total[1] += (batch["labels"] != IGNORE_INDEX).sum()
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
    return losses


def test_real_ranks_validate_to_the_same_loss(ranks):
    sizes = [1, 2, 3, 5, 8, 9, 13]
    (alone,) = ranks.run(1, validation_loss, sizes)
    for world_size in (2, 3, 4):
        for losses in ranks.run(world_size, validation_loss, sizes):
            assert losses == pytest.approx(alone, rel=1e-6)


@st.composite
def geometries(draw, count):
    """A global batch size, and `count` ways to share it: (ranks, local batch size)."""
    ways = [(draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(count)]
    return math.lcm(*(world_size * batch_size for world_size, batch_size in ways)) * draw(st.integers(1, 2)), ways


class Job:
    """The loaders and schedulers of all ranks, in one process."""

    def __init__(self, num_samples, global_batch_size, way, *, drop_last, num_epochs=2, **arguments):
        self.world_size, batch_size = way
        config = StepSchedulerConfig(
            global_batch_size=global_batch_size, local_batch_size=batch_size, num_epochs=num_epochs
        )
        self.loaders = loaders_of(Ragged(num_samples), self.world_size, batch_size, drop_last=drop_last, **arguments)
        self.schedulers = [
            StepScheduler(
                config,
                batches_per_epoch=len(loader),
                dp_size=self.world_size,
                drop_last=drop_last,
                num_samples=num_samples,
            )
            for loader in self.loaders
        ]

    def steps(self):
        """Run all steps that are left: (step, epoch, what each rank got, states of the ranks) of each."""
        runs = [scheduler.steps(loader) for scheduler, loader in zip(self.schedulers, self.loaders, strict=True)]
        for parts in zip(*runs, strict=True):
            ((step, epoch),) = {(scheduler.step, scheduler.epoch) for scheduler in self.schedulers}
            (passes,) = {len(batches) for batches in parts}
            assert passes >= 1
            samples = [list(chain.from_iterable(batch["sample_indices"] for batch in batches)) for batches in parts]
            yield step, epoch, samples, self.state()

    def state(self):
        """The position, which must be the same on every rank."""
        states = [
            (scheduler.state_dict(), loader.state_dict())
            for scheduler, loader in zip(self.schedulers, self.loaders, strict=True)
        ]
        assert all(state == states[0] for state in states)
        return states[0]

    def resume(self, state):
        for scheduler, loader in zip(self.schedulers, self.loaders, strict=True):
            scheduler.load_state_dict(state[0])
            loader.load_state_dict(state[1])
        return self


def sample_sets(steps):
    """(step, epoch, samples) of each step; no sample may come twice in an epoch, on one rank or on two."""
    found, seen = [], set()
    for step, epoch, parts, _ in steps:
        samples = [(epoch, index) for index in chain.from_iterable(parts)]
        assert len(seen.union(samples)) == len(seen) + len(samples)
        seen.update(samples)
        found.append((step, epoch, sorted(samples)))
    return found


@SETTINGS
@given(st.integers(1, 200), geometries(2), st.booleans())
@example(7, (4, [(1, 2), (2, 2)]), True)
@example(7, (4, [(1, 2), (2, 2)]), False)
def test_an_epoch_has_equally_many_steps_for_any_ranks_and_local_batch_sizes(num_samples, geometry, drop_last):
    global_batch_size, ways = geometry
    expected = num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)
    if not expected:
        event("no step")
        for way in ways:
            with pytest.raises(ValueError, match=r"too few for one batch|global_batch_size must be at most"):
                Job(num_samples, global_batch_size, way, drop_last=drop_last)
        return
    jobs = [Job(num_samples, global_batch_size, way, drop_last=drop_last) for way in ways]
    assert {scheduler.steps_per_epoch for job in jobs for scheduler in job.schedulers} == {expected}
    jobs[1].resume(jobs[0].state())


@SETTINGS
@given(st.data(), geometries(2), st.booleans(), st.integers(0, 3))
def test_a_position_after_any_step_is_taken_up_by_any_number_of_ranks(data, geometry, drop_last, seed):
    global_batch_size, (before, after) = geometry
    num_samples = data.draw(st.integers(global_batch_size if drop_last else 1, 3 * global_batch_size + 2))

    def start(way):
        return Job(num_samples, global_batch_size, way, drop_last=drop_last, shuffle=True, seed=seed)

    whole = sample_sets(start((1, global_batch_size)).steps())
    interrupted = list(start(before).steps())
    assert sample_sets(interrupted) == whole
    handed_out = num_samples // global_batch_size * global_batch_size if drop_last else num_samples
    assert sum(len(samples) for _, _, samples in whole) == 2 * handed_out
    for step, _, _, state in interrupted:
        assert sample_sets(start(after).resume(state).steps()) == whole[step + 1 :]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_position_is_taken_up_with_other_workers(drop_last):
    def start(way, **arguments):
        return Job(15, 4, way, drop_last=drop_last, shuffle=True, seed=1, **arguments)

    whole = sample_sets(start((1, 4)).steps())
    assert len(whole) == (6 if drop_last else 8)
    interrupted = start((2, 1), num_workers=2)
    steps = interrupted.steps()
    states = [next(steps)[3] for _ in range(5)]
    steps.close()
    # In the first epoch, at its end, and in the second.
    for position in (0, 2, 3, 4):
        resumed = start((1, 2), num_workers=2, persistent_workers=True).resume(states[position])
        assert sample_sets(resumed.steps()) == whole[position + 1 :]
