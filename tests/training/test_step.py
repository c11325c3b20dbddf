import copy
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from automodel.distributed.rank_group import RankGroup
from automodel.distributed.single import Single
from automodel.training.loss import IGNORE_INDEX, MaskedCrossEntropy
from automodel.training.optim import LearningRateSchedule, LrSchedulerConfig
from automodel.training.step import TrainStep, evaluate

VOCAB = 13
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Model(nn.Module):
    """Logits of each position from its token; with `as_output`, inside an object as transformers' models do."""

    def __init__(self, *, as_output=False, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, 8, dtype=dtype)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, VOCAB, dtype=dtype)
        self.as_output = as_output
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, input_ids, attention_mask=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return SimpleNamespace(logits=logits) if self.as_output else logits


def make_batch(size, *, length=6, seed=0, ignored=0):
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": torch.randint(VOCAB, (size, length), generator=generator),
        "labels": torch.randint(VOCAB, (size, length), generator=generator),
        "sample_indices": list(range(size)),
    }
    batch["labels"].view(-1)[:ignored] = IGNORE_INDEX
    return batch


def parts_of(batch, sizes):
    """`batch` cut into micro-batches."""
    columns = {name: batch[name].split(sizes) for name in ("input_ids", "labels")}
    return [{name: columns[name][index] for name in columns} for index in range(len(sizes))]


class Recorder:
    """Opens phases and notes their names."""

    def __init__(self):
        self.phases = []

    @contextmanager
    def __call__(self, name):
        self.phases.append(name)
        yield


def make_step(model, *, max_norm=None, optimizer=None, dtype=torch.float32, loss_fn=None, **schedule):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainStep(
        model,
        loss_fn or MaskedCrossEntropy(fp32_upcast=False),
        optimizer,
        LearningRateSchedule(optimizer, LrSchedulerConfig(**schedule), total_steps=10),
        strategy=Single(device=CPU, dtype=dtype),
        data_ranks=RankGroup(),
        max_norm=max_norm,
        device=CPU,
    )


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [3, 1], [1, 3]])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_micro_batches_make_the_step_of_one_big_batch(sizes, max_norm):
    batch = make_batch(4, ignored=9)
    model, expected = Model(), Model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    runner = make_step(model, max_norm=max_norm)
    for step in range(3):
        logits = expected(batch["input_ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        norm = float(torch.cat([p.grad.flatten() for p in expected.parameters()]).norm())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        result = runner.run(parts_of(batch, sizes), step=step, phase=Recorder())
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        assert (result.num_tokens, result.num_label_tokens, result.applied) == (24, 15, True)
        torch.testing.assert_close(values(model), values(expected), rtol=1e-9, atol=1e-12)


def test_accumulated_gradients_are_those_of_the_big_batch():
    batch = make_batch(4, ignored=9)
    model = Model()
    loss = MaskedCrossEntropy(fp32_upcast=False)(model(batch["input_ids"]), batch["labels"])
    expected = torch.autograd.grad(loss, list(model.parameters()))

    class Kept(torch.optim.SGD):
        def step(self):
            self.seen = [parameter.grad.clone() for parameter in model.parameters()]

    optimizer = Kept(model.parameters(), lr=1.0)
    make_step(model, optimizer=optimizer).run(parts_of(batch, [1, 2, 1]), step=0, phase=Recorder())
    torch.testing.assert_close(optimizer.seen, list(expected), rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_phases_and_outputs():
    batch = make_batch(2)
    recorder = Recorder()
    plain = make_step(Model()).run([batch, batch], step=0, phase=recorder)
    wrapped = make_step(Model(as_output=True)).run([batch, batch], step=0, phase=Recorder())
    assert recorder.phases == ["forward", "backward", "forward", "backward", "optimizer"]
    assert plain == wrapped


def test_the_step_decides_the_rate():
    model = Model()
    runner = make_step(model, lr_decay_style="linear", lr_warmup_steps=4)
    assert runner.run([make_batch(1)], step=0, phase=Recorder()).lr == pytest.approx(0.01 / 5)
    assert runner.run([make_batch(1)], step=4, phase=Recorder()).lr == pytest.approx(0.01)
    assert runner.run([make_batch(1)], step=7, phase=Recorder()).lr == pytest.approx(0.01 / 2)


def bad_gradient(logits, labels, *, num_label_tokens):
    """A finite loss of 0 whose gradient is not: the derivative of a square root at 0."""
    return torch.sqrt((logits - logits.detach()).square().sum())


def nan_in_second_batch():
    calls = []

    def loss_fn(logits, labels, *, num_label_tokens):
        calls.append(1)
        loss = MaskedCrossEntropy(fp32_upcast=False)(logits, labels, num_label_tokens=num_label_tokens)
        return loss * math.nan if len(calls) == 2 else loss

    return loss_fn


def infinite_loss(logits, labels, *, num_label_tokens):
    """An infinite loss whose gradient is finite."""
    return logits.sum() + math.inf


@pytest.mark.parametrize("make_loss", [lambda: bad_gradient, nan_in_second_batch, lambda: infinite_loss])
def test_a_step_that_is_not_finite_changes_nothing(make_loss):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [make_batch(2, seed=seed) for seed in (1, 2)]
    make_step(model, optimizer=optimizer, max_norm=1.0).run(batches, step=0, phase=Recorder())
    before = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    assert before[1]
    result = make_step(model, optimizer=optimizer, max_norm=1.0, loss_fn=make_loss()).run(
        batches, step=1, phase=Recorder()
    )
    assert not result.applied
    assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    after = values(model), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    # The next step starts from clean gradients.
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_without_label_tokens_has_no_loss():
    batch = make_batch(2, ignored=12)
    result = make_step(Model()).run([batch], step=0, phase=Recorder())
    assert (result.loss, result.grad_norm, result.num_label_tokens, result.num_tokens) == (0.0, 0.0, 0, 12)


def test_autocast_reaches_the_model_and_not_the_parameters():
    seen = []

    def loss_fn(logits, labels, *, num_label_tokens):
        seen.append(logits.dtype)
        return MaskedCrossEntropy()(logits, labels, num_label_tokens=num_label_tokens)

    model = Model(dtype=torch.float32)
    result = make_step(model, dtype=torch.bfloat16, loss_fn=loss_fn).run([make_batch(2)], step=0, phase=Recorder())
    assert seen == [torch.bfloat16]
    assert result.applied
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def run_evaluate(model, batches, **options):
    loss_fn = MaskedCrossEntropy(fp32_upcast=False)
    strategy = Single(device=CPU, dtype=torch.float32)
    return evaluate(model, loss_fn, batches, strategy=strategy, data_ranks=RankGroup(), device=CPU, **options)


def test_evaluation_is_the_mean_over_all_label_tokens():
    model = Model()
    batches = [make_batch(3, seed=1, ignored=11), make_batch(1, seed=2), make_batch(2, seed=3, ignored=12)]
    logits = torch.cat([model(batch["input_ids"]).flatten(0, 1) for batch in batches])
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    result = run_evaluate(model, batches)
    assert result.loss == pytest.approx(expected.item(), rel=1e-12)
    assert result.num_label_tokens == 7 + 6
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_evaluation_of_nothing():
    result = run_evaluate(Model(), [])
    assert (result.loss, result.num_label_tokens) == (0.0, 0)


def modes(model):
    return [module.training for module in model.modules()]


def watched(model, seen):
    """Batches that note the model's mode while they are handed out."""
    for seed in range(3):
        seen.append((modes(model), torch.is_grad_enabled()))
        yield make_batch(1, seed=seed)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_of_every_module(training):
    model = Model().train(training)
    # A frozen part that its owner keeps in evaluation mode.
    model.dropout.eval()
    before, seen = modes(model), []
    run_evaluate(model, watched(model, seen))
    assert seen == [([False] * 4, True)] * 3
    assert modes(model) == before


def test_evaluation_restores_the_mode_after_an_error():
    model = Model()
    with pytest.raises(KeyError, match="labels"):
        run_evaluate(model, [{"input_ids": torch.zeros(1, 2, dtype=torch.int64)}])
    assert all(modes(model))


def test_evaluation_stops_when_asked():
    model, seen, answers = Model(), [], iter([False, True])
    assert run_evaluate(model, watched(model, seen), should_stop=lambda: next(answers)) is None
    assert len(seen) == 2
    assert all(modes(model))
