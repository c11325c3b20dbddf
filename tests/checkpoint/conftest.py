"""A tiny training job with everything that a checkpoint carries: model, AdamW, position in the data, random state."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from automodel.checkpoint.store import CheckpointConfig, Checkpointer, RunState
from automodel.data.loader import StatefulDataLoader
from automodel.training.optim import parameter_groups
from automodel.training.rng import StatefulRNG
from automodel.training.step_scheduler import StepScheduler, StepSchedulerConfig

VOCABULARY = 16


class TinyModel(nn.Module):
    """An embedding, a norm, a projection with dropout and a head: matrices and vectors, and a use of random numbers."""

    def __init__(self, width: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(input_ids))
        return self.head(self.dropout(torch.tanh(self.projection(hidden))))


class TinyRun:
    """A job over 40 random samples that trains on batches of 4 and can be saved after any step."""

    def __init__(self, model: nn.Module | None = None, *, seed: int = 7, optimizer_class=torch.optim.AdamW) -> None:
        self.rng = StatefulRNG(seed)
        self.model = TinyModel() if model is None else model
        samples = torch.randint(0, VOCABULARY, (40, 7), generator=torch.Generator().manual_seed(3))
        dataset = [{"input_ids": sample[:-1], "labels": sample[1:]} for sample in samples]
        self.loader = StatefulDataLoader(dataset, 4, shuffle=True, seed=seed)
        self.optimizer = optimizer_class(parameter_groups(self.model, weight_decay=0.1), lr=0.05)
        self.scheduler = StepScheduler(StepSchedulerConfig(num_epochs=3), batches_per_epoch=len(self.loader))
        self._steps = self.scheduler.steps(self.loader)

    @property
    def state(self) -> RunState:
        return RunState(
            model=self.model,
            optimizer=self.optimizer,
            step_scheduler=self.scheduler,
            rng=self.rng,
            dataloader=self.loader,
        )

    def train(self, steps: int) -> list[float]:
        """Run so many steps and return their losses."""
        losses = []
        for (batch,) in itertools.islice(self._steps, steps):
            output = self.model(batch["input_ids"])
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def sharded():
    """The module sharded_runs, whose functions are sent to ranks."""
    spec = importlib.util.spec_from_file_location("sharded_runs", Path(__file__).with_name("sharded_runs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny_model():
    return TinyModel


@pytest.fixture
def tiny_run():
    return TinyRun


@pytest.fixture
def checkpointer(tmp_path):
    """Make a Checkpointer over `tmp_path/checkpoints` from settings of the recipe section."""

    def make(*, root=tmp_path / "checkpoints", **settings) -> Checkpointer:
        settings = {"save_consolidated": False, **settings}
        return Checkpointer(CheckpointConfig(**settings), root=root, config_text="seed: 7\n")

    return make


@pytest.fixture
def save_at():
    """Save a run as if it had just run step `step`; its losses decide LOWEST_VAL."""

    def save(checkpointer: Checkpointer, run: TinyRun, step: int, **losses: float):
        run.scheduler.load_state_dict({**run.scheduler.state_dict(), "step": step, "epoch": 0})
        return checkpointer.save(run.state, losses=losses, final=False)

    return save
