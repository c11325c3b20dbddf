"""What the ranks of the tests with several ranks do: train a small model that they hold together, save and restore it.

Every function at module level that starts with `rank, world_size` is sent to a pool of ranks.
"""

import contextlib
import hashlib
import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel.checkpoint import tensors
from automodel.checkpoint.store import CheckpointConfig, Checkpointer, CheckpointSaveError, RunState
from automodel.data.loader import StatefulDataLoader
from automodel.distributed.rank_group import RankGroup
from automodel.training.optim import parameter_groups
from automodel.training.rng import StatefulRNG

VOCABULARY = 11
GLOBAL_BATCH = 12


class Odd(nn.Module):
    """A model whose dimensions (11, 6, 3 and 1) leave some of up to four ranks with fewer rows, or with none."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.narrow = nn.Linear(6, 3)
        self.wide = nn.Linear(3, 6)
        self.gate = nn.Linear(6, 1)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.register_buffer("counter", torch.tensor(0))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        return self.head(hidden + self.gate(hidden).sigmoid() * self.wide(self.narrow(hidden).tanh()))


def make_llama(*, tied: bool = False, width: int = 8) -> nn.Module:
    """A llama of a few thousand parameters, attention and all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 16}
    config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config)


def make_hybrid() -> nn.Module:
    """A hybrid with one Mamba-2, one attention and one MLP layer."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        layers_block_type=["mamba", "attention", "mlp"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    )
    return NemotronHForCausalLM(config)


MODELS = {
    "odd": Odd,
    "tied": lambda: Odd(tied=True),
    "llama": make_llama,
    "tied llama": lambda: make_llama(tied=True),
    "wide llama": lambda: make_llama(width=64),
    "hybrid": make_hybrid,
}


class Position:
    """A step number that is saved."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class ShardedRun:
    """A job on the ranks of the default group: `single` (a rank alone), `ddp`, `fsdp` or `hsdp` with two replicas."""

    def __init__(self, strategy: str, *, model: str = "odd", seed: int = 7, optimizer: str = "AdamW") -> None:
        world = 1 if strategy == "single" else dist.get_world_size()
        self.ranks = RankGroup() if strategy == "single" else RankGroup(dist.group.WORLD)
        torch.manual_seed(seed)
        self.model = MODELS[model]()
        self.trained = self.model
        match strategy:
            case "ddp":
                self.trained = DistributedDataParallel(self.model, broadcast_buffers=False)
            case "fsdp":
                self._shard(init_device_mesh("cpu", (world,)))
            case "hsdp":
                names = ("dp_replicate", "dp_shard")
                self._shard(init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names))
        make_optimizer = getattr(torch.optim, optimizer)
        self.optimizer = make_optimizer(parameter_groups(self.model, weight_decay=0.1), lr=0.05)
        samples = torch.randint(0, VOCABULARY, (96, 6), generator=torch.Generator().manual_seed(3))
        dataset = [{"input_ids": sample[:-1], "labels": sample[1:]} for sample in samples]
        place = {"rank": self.ranks.rank, "world_size": world}
        self.loader = StatefulDataLoader(dataset, GLOBAL_BATCH // world, shuffle=True, seed=5, **place)
        self._batches = None
        self.position = Position()
        # From here on every rank draws numbers of its own.
        self.rng = StatefulRNG(seed, ranked=True, rank=self.ranks.rank)

    def _shard(self, mesh) -> None:
        for layer in self.model.model.layers if hasattr(self.model, "model") else [self.model.narrow, self.model.wide]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @property
    def state(self) -> RunState:
        return RunState(
            model=self.model,
            optimizer=self.optimizer,
            step_scheduler=self.position,
            rng=self.rng,
            dataloader=self.loader,
        )

    def train(self, steps: int) -> None:
        """Run so many steps, one batch each."""
        if self._batches is None:
            self._batches = iter(self.loader)
        for _ in range(steps):
            batch = next(self._batches)
            output = self.trained(batch["input_ids"])
            logits = output if isinstance(output, torch.Tensor) else output.logits
            nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.position.step += 1

    def fingerprint(self) -> dict[str, str]:
        """A digest of every whole tensor and setting of model and optimizer; all ranks call it."""
        found = {name: _digest(tensor) for name, tensor in self.model.state_dict().items()}
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        for name, state in optimizer["state"].items():
            found |= {f"{name}/{key}": _digest(value) for key, value in state.items()}
        for number, group in enumerate(optimizer["param_groups"]):
            found[f"group {number}"] = repr(sorted(group.items()))
        return found


def _digest(value: torch.Tensor) -> str:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()}"


def make_store(run: ShardedRun, root: Path, **settings) -> Checkpointer:
    """Make the store of a run; no consolidated copy unless it is asked for."""
    config = CheckpointConfig(**{"save_consolidated": False, **settings})
    return Checkpointer(config, root=root, config_text="seed: 7\n", ranks=run.ranks)


def draw() -> list[float]:
    """Numbers from the generators of this rank."""
    return torch.rand(3).tolist()


def train_and_save(rank, world_size, strategy, root, settings=None, model="odd", saves=1):
    """Train two steps before each of the saves; returns the last one, what it holds, and what is drawn after it."""
    run = ShardedRun(strategy, model=model)
    store = make_store(run, root, **(settings or {}))
    store.open()
    for _ in range(saves):
        run.train(2)
        directory = store.save(run.state, losses={"val_loss": 1.0}, final=True)
    store.close()
    return {
        "directory": directory,
        "fingerprint": run.fingerprint(),
        "loader": run.loader.state_dict(),
        "draws": draw(),
        "next": next(run._batches)["sample_indices"],
    }


def restore_each(rank, world_size, strategy, roots, model="odd", optimizer="AdamW"):
    """Restore the newest checkpoint of each folder in turn, into objects of another seed; returns what they hold."""
    found = []
    for root in roots:
        run = ShardedRun(strategy, model=model, seed=99, optimizer=optimizer)
        store = make_store(run, root)
        directory = store.find_resumable(run.model)
        store.restore(directory, run.state)
        restored = {"directory": directory, "fingerprint": run.fingerprint(), "draws": draw()}
        found.append({**restored, "next": next(iter(run.loader))["sample_indices"], "step": run.position.step})
    return found


def train_on_alike(rank, world_size, strategy, root):
    """Restore, then go on training: the ranks must still agree on everything that they hold together."""
    run = ShardedRun(strategy, seed=99)
    store = make_store(run, root)
    store.restore(store.find_resumable(run.model), run.state)
    run.train(2)
    return run.fingerprint()


def consolidate(rank, world_size, strategy, root, model):
    """Save a model of known values with its copy for transformers; returns how many tensors this rank was given."""
    run = ShardedRun(strategy, model=model)
    run.position.step = 1
    make_store(run, root, save_consolidated="every").save(run.state, losses={}, final=False)
    return len(tensors.gather_model(run.model, ranks=run.ranks))


def save_with(run, store, trouble):
    """Save once without trouble and once with it, then once more; returns the error of the second save."""
    run.train(1)
    good = store.save(run.state, losses={}, final=False)
    run.train(1)
    message = None
    try:
        with trouble:
            store.save(run.state, losses={}, final=False)
    except CheckpointSaveError as error:
        message = str(error)
    failed = good.with_name("epoch_0_step_2")
    facts = {
        "message": message,
        "incomplete": (failed / ".incomplete").exists(),
        "latest": store.find_resumable(run.model),
        "good": good,
    }
    # The ranks are still in step with each other: the same save succeeds once the trouble is over.
    store.save(run.state, losses={}, final=False)
    return {**facts, "latest at last": store.find_resumable(run.model), "failed": failed}


@contextlib.contextmanager
def files_no_larger_than(size):
    """Let this process write no file beyond a size in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextlib.contextmanager
def as_nobody():
    """Be a user who may read everything and write nothing of root's."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def disk_filled(folder, left):
    """Fill the filesystem of a folder up to so many bytes."""
    space = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(bytes(max(space.f_bavail * space.f_frsize - left, 0)))
    try:
        yield
    finally:
        filler.unlink()


def save_beside_a_small_limit(rank, world_size, root, faulty, size, parts=None, settings=None):
    """One rank cannot write files beyond a size."""
    run = ShardedRun("fsdp", **(parts or {}))
    trouble = files_no_larger_than(size) if rank == faulty else contextlib.nullcontext()
    return save_with(run, make_store(run, root, **(settings or {})), trouble)


def save_over_beside_a_small_limit(rank, world_size, root, faulty, size):
    """One rank cannot write files beyond a size when the only checkpoint is saved anew; returns the error."""
    run = ShardedRun("fsdp")
    store = make_store(run, root)
    run.train(2)
    good = store.save(run.state, losses={"val_loss": 1.0}, final=False)
    held = run.fingerprint()
    run.train(1)
    run.position.step -= 1
    message = None
    try:
        with files_no_larger_than(size) if rank == faulty else contextlib.nullcontext():
            store.save(run.state, losses={"val_loss": 2.0}, final=False)
    except CheckpointSaveError as error:
        message = str(error)
    return message, store.find_resumable(run.model) == good, held


def add_losses(rank, world_size, root, size):
    """Add a metric to a checkpoint's losses, first while rank zero cannot write; returns the error of that."""
    run = ShardedRun("fsdp")
    store = make_store(run, root)
    run.train(1)
    directory = store.save(run.state, losses={"train_loss": 1.0}, final=False)
    message = None
    try:
        with files_no_larger_than(size) if rank == 0 else contextlib.nullcontext():
            store.update_losses(directory, {"val_loss": 2.0})
    except CheckpointSaveError as error:
        message = str(error)
    # What the other ranks see of the folder does not count.
    holds = store.holds(directory if rank == 0 else root / "elsewhere")
    store.update_losses(directory, {"val_loss": 3.0})
    return message, holds


def save_beside_a_locked_out_rank(rank, world_size, root, faulty):
    """One rank may not write in the folder."""
    run = ShardedRun("fsdp")
    return save_with(run, make_store(run, root), as_nobody() if rank == faulty else contextlib.nullcontext())


def save_on_a_full_disk(rank, world_size, disk, left):
    """Nobody can write more than the disk has left."""
    run = ShardedRun("fsdp", model="wide llama")
    trouble = disk_filled(disk, left) if rank == 0 else contextlib.nullcontext()
    return save_with(run, make_store(run, disk / "checkpoints"), trouble)


class Meddler:
    """Acts on this process just before its n-th change on the disk, counted from 1."""

    def __init__(self) -> None:
        self.left = 0
        self.act = None
        self.installed = False

    def before(self, number, act) -> None:
        self.left, self.act = number, act
        if not self.installed:
            self.installed = True
            sys.addaudithook(self._count)

    def _count(self, event, arguments) -> None:
        if self.left <= 0:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in {"os.mkdir", "os.rename", "os.remove", "os.symlink"}:
            self.left -= 1
            if self.left == 0:
                self.act()


def save_and_die(rank, world_size, root, victim, number):
    """One rank is killed before its n-th change on the disk."""
    run = ShardedRun("fsdp")
    if rank == victim:
        Meddler().before(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run.train(4)
    make_store(run, root).save(run.state, losses={}, final=False)


_MEDDLER = Meddler()


def save_and_interrupt(rank, world_size, root):
    """Ctrl-C reaches one rank while it writes its shard; returns what each rank raises."""
    run = ShardedRun("fsdp")
    run.train(1)
    store = make_store(run, root)
    store.save(run.state, losses={}, final=False)
    run.train(1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 1:
        _MEDDLER.before(2, lambda: signal.raise_signal(signal.SIGINT))
    try:
        store.save(run.state, losses={}, final=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        return type(error).__name__, store.find_resumable(run.model).name
    finally:
        _MEDDLER.left = 0
        signal.signal(signal.SIGINT, before)


def restore_damaged(rank, world_size, folders):
    """Try to restore each; returns the errors."""
    messages = []
    for folder in folders:
        run = ShardedRun("fsdp")
        try:
            make_store(run, folder.parent).restore(folder, run.state)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append(None)
    return messages


def disagree_about_the_folder(rank, world_size, roots):
    """Each rank is told another folder; returns how opening and saving end on it."""
    run = ShardedRun("fsdp")
    store = make_store(run, roots[rank])
    ends = []
    for act in (store.open, lambda: store.save(run.state, losses={}, final=False)):
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def open_store(rank, world_size, root):
    """Open the folder; returns how that ends."""
    store = make_store(ShardedRun("fsdp"), root)
    try:
        store.open()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        store.close()
    return None


def find(rank, world_size, root, restore_from):
    """Look for a checkpoint where rank zero alone is told the right folder; returns it, or the error."""
    run = ShardedRun("fsdp")
    store = make_store(run, root if rank == 0 else root / "elsewhere", restore_from=restore_from)
    try:
        return store.find_resumable(run.model)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        return f"{type(error).__name__}: {error}"
