import json
import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from automodel.data.loader import StatefulDataLoader


class Numbers(Dataset):
    """Sample i holds the number i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"input_ids": torch.full((3,), index), "labels": torch.full((3,), index)}


class Noise(Numbers):
    """Each sample is drawn from the random state of the process that makes it."""

    def __getitem__(self, index):
        return {"input_ids": torch.randint(1000, (3,))}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def run(loader):
    return [batch["sample_indices"] for batch in loader]


def take(loader, count):
    iterator = iter(loader)
    return [next(iterator)["sample_indices"] for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_the_samples_they_name(num_workers):
    loader = StatefulDataLoader(Numbers(11), 4, shuffle=True, num_workers=num_workers)
    batches = list(loader)
    assert [len(batch["sample_indices"]) for batch in batches] == [4, 4, 3]
    assert sorted(i for batch in batches for i in batch["sample_indices"]) == list(range(11))
    for batch in batches:
        assert set(batch) == {"input_ids", "labels", "sample_indices"}
        assert batch["input_ids"].tolist() == [[index] * 3 for index in batch["sample_indices"]]


def test_without_shuffle_the_order_is_that_of_the_dataset():
    assert run(StatefulDataLoader(Numbers(5), 2)) == [[0, 1], [2, 3], [4]]
    assert run(StatefulDataLoader(Numbers(5), 2, drop_last=True)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("size", "drop_last"), [(10, False), (10, True), (12, False), (3, False)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_length_is_the_number_of_batches(size, drop_last, world_size):
    loaders = [
        StatefulDataLoader(Numbers(size), 1, drop_last=drop_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert {len(run(loader)) for loader in loaders} == {len(loaders[0])}


def test_epochs_have_orders_of_their_own_that_seed_and_epoch_determine():
    loader = StatefulDataLoader(Numbers(50), 5, shuffle=True, seed=3)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append(run(loader))
    assert len({str(order) for order in orders}) == 3
    again = StatefulDataLoader(Numbers(50), 5, shuffle=True, seed=3)
    again.set_epoch(2)
    assert run(again) == orders[2]
    # Seed and epoch are mixed, not added: the next seed does not repeat the next epoch.
    assert run(StatefulDataLoader(Numbers(50), 5, shuffle=True, seed=4)) not in orders


def test_order_is_the_one_that_saved_positions_were_made_with():
    # Recorded once: a change of the order would resume old checkpoints on other samples.
    assert run(StatefulDataLoader(Numbers(8), 8, shuffle=True, seed=1)) == [[7, 2, 3, 5, 4, 6, 0, 1]]


def test_iterating_runs_the_epoch_that_is_set_from_its_beginning():
    loader = StatefulDataLoader(Numbers(12), 2, shuffle=True)
    loader.set_epoch(4)
    order = run(loader)
    assert run(loader) == order
    take(loader, 2)
    assert run(loader) == order
    assert loader.epoch == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_state_is_neither_read_nor_advanced(num_workers):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    torch.manual_seed(1)
    before = states()
    orders = [run(StatefulDataLoader(Numbers(12), 2, shuffle=True, num_workers=num_workers))]
    assert states() == before
    torch.manual_seed(2)
    orders.append(run(StatefulDataLoader(Numbers(12), 2, shuffle=True, num_workers=num_workers)))
    assert orders[0] == orders[1]


def test_random_samples_made_by_workers_depend_on_seed_and_epoch():
    def draw(*, seed, epoch):
        loader = StatefulDataLoader(Noise(4), 2, num_workers=1, seed=seed)
        loader.set_epoch(epoch)
        return [batch["input_ids"].tolist() for batch in loader]

    assert draw(seed=1, epoch=0) == draw(seed=1, epoch=0)
    assert draw(seed=1, epoch=0) != draw(seed=1, epoch=1)


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}]
)
def test_resume_at_every_position_equals_the_uninterrupted_run(workers):
    def make(**settings):
        return StatefulDataLoader(Numbers(9), 2, shuffle=True, seed=7, **settings)

    whole = []
    uninterrupted = make()
    for epoch in (0, 1):
        uninterrupted.set_epoch(epoch)
        whole.append(run(uninterrupted))
    for position in range(6):
        interrupted = make(**workers)
        interrupted.set_epoch(1)
        head = take(interrupted, position)
        state = json.loads(json.dumps(interrupted.state_dict()))
        assert (state["epoch"], state["batches_seen"]) == (1, position)
        resumed = make(**workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert head + run(resumed) == whole[1]
        assert resumed.batches_seen == 5
        # The position holds for one iteration; the epoch then runs from its beginning.
        assert run(resumed) == whole[1]


def test_choosing_the_loaded_epoch_again_keeps_the_position_and_another_drops_it():
    loader = StatefulDataLoader(Numbers(6), 2)
    take(loader, 1)
    state = loader.state_dict()
    resumed = StatefulDataLoader(Numbers(6), 2)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert run(resumed) == [[2, 3], [4, 5]]
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert resumed.state_dict()["batches_seen"] == 0
    assert run(resumed) == [[0, 1], [2, 3], [4, 5]]


def test_state_of_a_finished_epoch_has_nothing_left():
    loader = StatefulDataLoader(Numbers(5), 2)
    run(loader)
    resumed = StatefulDataLoader(Numbers(5), 2)
    resumed.load_state_dict(loader.state_dict())
    assert run(resumed) == []
    resumed.set_epoch(1)
    assert len(run(resumed)) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_persistent_workers_start_over_after_an_iteration_that_was_left(num_workers):
    loader = StatefulDataLoader(Numbers(20), 2, num_workers=num_workers, persistent_workers=num_workers > 0)
    take(loader, 3)
    assert run(loader) == [[i, i + 1] for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("size", "drop_last"),
    [(1, False), *((size, drop_last) for size in (24, 25, 27, 30) for drop_last in (False, True))],
)
def test_ranks_share_each_global_batch(size, drop_last):
    def parts(world_size):
        settings = {"shuffle": True, "drop_last": drop_last, "seed": 5, "world_size": world_size}
        return [run(StatefulDataLoader(Numbers(size), 8 // world_size, rank=r, **settings)) for r in range(world_size)]

    alone = parts(1)[0]
    for world_size in (2, 4):
        ranks = parts(world_size)
        assert len({len(batches) for batches in ranks}) == 1
        joined = [list(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]
        assert joined == alone
        seen = list(chain.from_iterable(joined))
        assert len(seen) == len(set(seen)) == (size // 8 * 8 if drop_last else size)
        for step in zip(*ranks, strict=True):
            lengths = [len(part) for part in step]
            assert max(lengths) - min(lengths) <= 1
            assert not drop_last or set(lengths) == {8 // world_size}


def test_position_can_be_taken_up_by_another_number_of_ranks():
    alone = StatefulDataLoader(Numbers(24), 2, shuffle=True)
    order = run(alone)
    take(alone, 4)
    ranks = [StatefulDataLoader(Numbers(24), 2, shuffle=True, rank=rank, world_size=2) for rank in (0, 1)]
    for loader in ranks:
        loader.load_state_dict(alone.state_dict())
        assert loader.batches_seen == 2
    assert [part for step in zip(*map(run, ranks), strict=True) for part in step] == order[4:]
    take(alone, 3)
    with pytest.raises(ValueError, match="3 batches of 2 samples on 1 ranks are not a whole number"):
        ranks[0].load_state_dict(alone.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 11}, "num_samples is 11 in the state but 10 here"),
        ({"seed": 1}, "seed is 1 in the state but 0 here"),
        ({"shuffle": True}, "shuffle is True in the state but False here"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"batches_seen": -1}, "batches_seen must be a whole number from 0, got -1"),
        ({"epoch": "x"}, "epoch must be a whole number from 0, got 'x'"),
    ],
)
def test_state_of_another_loader_is_refused_and_changes_nothing(change, message):
    loader = StatefulDataLoader(Numbers(10), 2)
    take(loader, 2)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**before, "epoch": 3, "batches_seen": 1, **change})
    assert loader.state_dict() == before


def test_incomplete_state_names_what_is_missing():
    loader = StatefulDataLoader(Numbers(10), 2)
    with pytest.raises(ValueError, match="batches_seen, epoch"):
        loader.load_state_dict({k: v for k, v in loader.state_dict().items() if k not in ("epoch", "batches_seen")})


def test_collate_fn_of_the_caller():
    loader = StatefulDataLoader([1, 2, 3], 2, collate_fn=lambda samples: {"total": sum(samples)})
    assert [batch["total"] for batch in loader] == [3, 3]
    assert next(iter(loader)) == {"total": 3, "sample_indices": [0, 1]}
    with pytest.raises(TypeError, match="collate_fn must return a mapping, got list"):
        next(iter(StatefulDataLoader([1, 2], collate_fn=list)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"world_size": 0}, "world_size must be positive, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be at least 0 and below world_size 2, got 2"),
        ({"rank": -1}, "rank must be .*, got -1"),
        ({"batch_size": 5, "drop_last": True}, "dataset has 4 samples, too few for one batch"),
        ({"world_size": 5, "drop_last": True}, "too few for one batch"),
        ({"dataset": []}, "dataset has 0 samples"),
        ({"dataset": Stream()}, "iterable dataset is not available yet"),
        ({"dataset": iter([])}, "iterable dataset is not available yet"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        StatefulDataLoader(**{"dataset": Numbers(4), **settings})


def test_epoch_must_not_be_negative():
    with pytest.raises(ValueError, match="epoch must not be negative, got -1"):
        StatefulDataLoader(Numbers(4)).set_epoch(-1)
