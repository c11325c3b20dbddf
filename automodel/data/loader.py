"""A data loader whose position can be saved and taken up again exactly."""

import hashlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from automodel.data.collate import IGNORE_INDEX, default_collater

__all__ = ["StatefulDataLoader"]

_STATE_VERSION = 1

Collate = Callable[[list[Any]], Mapping[str, Any]]


class StatefulDataLoader:
    """Hands out the batches of a map-style dataset, one epoch per iteration, and remembers where it is.

    Order: with `shuffle`, epoch e has its own permutation, drawn from `seed` and e alone; no global random state is
    read or advanced. The epoch's samples are cut into global batches of `batch_size * world_size` consecutive samples,
    and rank r gets the r-th of `world_size` consecutive parts of each. So the samples of a global batch do not depend
    on how many ranks share it, and all ranks have equally many batches. With `drop_last` an incomplete last global
    batch is left out. Without, every sample is handed out: the last global batch is divided as evenly as possible, and
    a rank for which no sample is left gets a stand-in, made of one sample of that global batch, whose `labels` are all
    `ignore_index`. So that rank takes part in every forward pass and adds nothing to a sum over label tokens.

    Epochs: an iteration always runs the epoch that `set_epoch` or `load_state_dict` chose last (0 at first), from its
    beginning. Only the first iteration after `load_state_dict` starts where the state says. Nothing but `set_epoch`
    moves on to the next epoch; a trainer calls it before each one. Iterate one iterator at a time.

    A batch is the mapping that `collate_fn` returns, as a dict, with `sample_indices` added: the list of the dataset
    indices that it was made of, which is empty for a stand-in.

    Attributes:
        dataset: the dataset.
        batch_size: samples per batch on this rank.
        drop_last: whether an incomplete last global batch is left out.
        epoch: the epoch that an iteration runs.
        batches_seen: batches of that epoch that were handed out so far, those skipped by a resume included.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        rank: int = 0,
        world_size: int = 1,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        """Prepare the loader; workers start with the first iteration.

        `ignore_index` is the label that does not count in the loss, for batches that stand in. `collate_fn` is
        `collate.default_collater` by default. `num_workers`, `pin_memory`, `prefetch_factor` and `persistent_workers`
        are those of torch's DataLoader.

        Raises:
            ValueError: the dataset is an iterable one (not available yet), empty, or with `drop_last` too small for a
                single global batch; an argument is out of range, or torch's DataLoader refuses the combination.
        """
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise ValueError(
                f"dataset must have a length and take indices, got {type(dataset).__name__}; an iterable dataset is "
                "not available yet"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._ignore_index = ignore_index
        self.epoch = 0
        self.batches_seen = 0
        self._start = 0
        self._sampler = _GlobalBatchSampler(
            len(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self._generator = torch.Generator()
        # The sampler yields whole batches, which torch's loader takes for single indices: batching is ours alone.
        self._loader: DataLoader[tuple[list[int], Mapping[str, Any]]] = DataLoader(
            _BatchDataset(dataset, default_collater if collate_fn is None else collate_fn),
            batch_size=None,
            sampler=cast("Sampler[int]", self._sampler),
            collate_fn=_unchanged,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=_leave_stop_signals_to_the_trainer,
            generator=self._generator,
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank; it is the same on every rank."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate the epoch that is set, from its beginning or, once after `load_state_dict`, from the saved position.

        Raises:
            TypeError: `collate_fn` returned something other than a mapping.
            ValueError: the last global batch has fewer samples than there are ranks, and `collate_fn` returned no
                tensor `labels` for it. All ranks find that at the same batch, those with samples included.
        """
        start, self._start = self._start, 0
        self.batches_seen = start
        self._sampler.epoch = self.epoch
        self._sampler.start = start
        # Torch's loader draws the seeds of its workers from this generator.
        self._generator.manual_seed(_mix(self._sampler.seed, self.epoch, self._sampler.rank))
        return self._hand_out(iter(self._loader), start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration runs; choosing the present one again keeps a loaded position.

        Raises:
            ValueError: `epoch` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches_seen = 0
            self._start = 0

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position: the batches handed out, however many are prefetched. It is the same on every rank."""
        sampler = self._sampler
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "batches_seen": self.batches_seen,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "num_samples": sampler.num_samples,
            "batch_size": sampler.batch_size,
            "world_size": sampler.world_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position that `state_dict` returned: the next iteration goes on with the batch after it.

        The number of workers may differ; so may batch size and number of ranks if the samples that were handed out are
        whole global batches here, too. They are after each step of a run whose samples per step are a multiple of
        `batch_size * world_size` before and now.

        Raises:
            ValueError: the state is not one of this loader, or it belongs to another dataset, seed or order. Nothing
                is changed then.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"dataloader state: version must be {_STATE_VERSION}, got {state.get('version')!r}")
        expected = self.state_dict()
        if missing := sorted(set(expected).difference(state)):
            raise ValueError(f"dataloader state: {', '.join(missing)} missing")
        for key in ("num_samples", "seed", "shuffle"):
            if state[key] != expected[key]:
                raise ValueError(f"dataloader state: {key} is {state[key]!r} in the state but {expected[key]!r} here")
        epoch, batches, batch_size, world_size = (
            _whole_number(state, key) for key in ("epoch", "batches_seen", "batch_size", "world_size")
        )
        start = self._sampler.batches_of(batches * batch_size * world_size)
        if start is None:
            raise ValueError(
                f"dataloader state: {batches} batches of {batch_size} samples on {world_size} ranks are not a whole "
                f"number of batches of {self.batch_size} samples on {self._sampler.world_size} ranks"
            )
        self.epoch = epoch
        self._start = start
        self.batches_seen = start

    def _hand_out(self, batches: Iterator[tuple[list[int], Mapping[str, Any]]], start: int) -> Iterator[dict[str, Any]]:
        """Yield the batches with their sample indices, counting each one before it is handed out."""
        for position, (indices, batch) in enumerate(batches, start + 1):
            if not isinstance(batch, Mapping):
                raise TypeError(f"collate_fn must return a mapping, got {type(batch).__name__}")
            handed_out = {**batch, "sample_indices": indices}
            if self._sampler.idle_ranks and position == len(self):
                # Ranks with samples check, too: one that went on alone would wait for the others' collectives.
                ignored = _ignored_labels(batch, self._sampler, ignore_index=self._ignore_index)
                if not indices:
                    handed_out["labels"] = ignored
            self.batches_seen = position
            yield handed_out


class _Part(NamedTuple):
    """This rank's samples of a global batch, and the sample that stands in where it has none."""

    samples: list[int]
    stand_in: int


class _GlobalBatchSampler(Sampler[_Part]):
    """Yields this rank's part of each global batch of one epoch; see StatefulDataLoader for the order."""

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if world_size < 1:
            raise ValueError(f"world_size must be positive, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be at least 0 and below world_size {world_size}, got {rank}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.start = 0
        self._global_batch = batch_size * world_size
        full, rest = divmod(num_samples, self._global_batch)
        keep_rest = rest > 0 and not drop_last
        self._num_batches = full + 1 if keep_rest else full
        # Of the last batch; in all others every rank has samples.
        self.idle_ranks = max(0, world_size - rest) if keep_rest else 0
        if not self._num_batches:
            raise ValueError(
                f"dataset has {num_samples} samples, too few for one batch: batch_size {batch_size}, "
                f"world_size {world_size}, drop_last {drop_last}"
            )

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[_Part]:
        return self._batches(self._order(), self.start)

    def batches_of(self, samples: int) -> int | None:
        """Return how many batches the first `samples` samples of an epoch are, None if not a whole number."""
        if samples >= min(self.num_samples, self._num_batches * self._global_batch):
            return self._num_batches
        batches, rest = divmod(samples, self._global_batch)
        return None if rest else batches

    def _order(self) -> torch.Tensor:
        """Return the epoch's order of all samples, int64 [num_samples]."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def _batches(self, order: torch.Tensor, start: int) -> Iterator[_Part]:
        for batch in range(start, self._num_batches):
            samples = order[batch * self._global_batch : (batch + 1) * self._global_batch].tolist()
            first, end = (len(samples) * part // self.world_size for part in (self.rank, self.rank + 1))
            yield _Part(samples[first:end], samples[0])


class _BatchDataset(Dataset[tuple[list[int], Mapping[str, Any]]]):
    """A dataset whose index is a rank's part and whose item is the list of its samples and the collated batch."""

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, part: _Part) -> tuple[list[int], Mapping[str, Any]]:
        return part.samples, self._collate([self._dataset[index] for index in part.samples or [part.stand_in]])


def _ignored_labels(batch: Mapping[str, Any], sampler: _GlobalBatchSampler, *, ignore_index: int) -> torch.Tensor:
    """Return labels like those of the batch, of which none counts.

    Raises:
        ValueError: the batch has no tensor `labels`.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        got = f"a {type(labels).__name__}" if "labels" in batch else f"only {list(batch)}"
        raise ValueError(
            f"collate_fn must return a tensor `labels`, got {got}: "
            f"{sampler.idle_ranks} of {sampler.world_size} ranks have no sample of the last global batch "
            f"({sampler.num_samples} samples, batch_size {sampler.batch_size}) and need labels to mask; "
            "drop_last leaves that batch out"
        )
    return torch.full_like(labels, ignore_index)


def _leave_stop_signals_to_the_trainer(worker: int) -> None:
    """Ignore what asks the job to save and stop: sent to a whole process group, it must not take the data away."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def _mix(*numbers: int) -> int:
    """Return a seed of 63 bits in which close numbers lie far apart."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _whole_number(state: Mapping[str, Any], key: str) -> int:
    """Return a count from a state.

    Raises:
        ValueError: it is no whole number, or negative.
    """
    value = state[key]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"dataloader state: {key} must be a whole number from 0, got {value!r}")
    return value
