import math
import re

import pytest
import torch
from torch import nn

from automodel.config.loader import ConfigNode
from automodel.config.sections import build_section
from automodel.training.optim import (
    ClipGradNormConfig,
    LearningRateSchedule,
    LrSchedulerConfig,
    clip_grad_norm,
    learning_rate_factor,
    parameter_groups,
)

TOTAL = 20


def rates(steps, *, peaks=(1.0,), total_steps=TOTAL, **settings):
    """The rate of each group at each of `steps`."""
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks])
    schedule = LearningRateSchedule(optimizer, LrSchedulerConfig(**settings), total_steps=total_steps)
    result = []
    for step in steps:
        assert schedule.set_step(step) == optimizer.param_groups[0]["lr"]
        result.append([group["lr"] for group in optimizer.param_groups])
    return result


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        # Steps 0 and 3 (warm-up of 4), 4 (peak), 12 (half-way), 20 (end), 100 (past it).
        ("constant", [0.2, 0.8, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.2, 0.8, 1.0, 0.5, 0.0, 0.0]),
        ("cosine", [0.2, 0.8, 1.0, 0.5, 0.0, 0.0]),
        ("inverse-square-root", [0.2, 0.8, 1.0, math.sqrt(4 / 12), math.sqrt(4 / 20), math.sqrt(4 / 100)]),
    ],
)
def test_shapes_at_their_borders(style, expected):
    config = LrSchedulerConfig(lr_decay_style=style, lr_warmup_steps=4)
    factors = [learning_rate_factor(config, step, total_steps=TOTAL) for step in (0, 3, 4, 12, 20, 100)]
    assert factors == pytest.approx(expected, abs=1e-12)


def test_cosine_between_the_borders():
    config = LrSchedulerConfig(lr_decay_style="cosine")
    for step in range(TOTAL + 1):
        expected = (1 + math.cos(math.pi * step / TOTAL)) / 2
        assert learning_rate_factor(config, step, total_steps=TOTAL) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_without_warm_up_the_first_step_has_the_peak(style):
    assert rates([0], lr_decay_style=style, peaks=(0.3,)) == [[pytest.approx(0.3)]]


def test_an_explicit_end_of_the_decay():
    settings = {"lr_decay_style": "linear", "lr_decay_steps": 10, "min_lr": 0.1}
    assert rates([0, 5, 9, 10, 19], **settings) == [[pytest.approx(x)] for x in (1.0, 0.55, 0.19, 0.1, 0.1)]


def test_the_lowest_rate_holds_for_the_decay_not_for_the_warm_up():
    settings = {"lr_decay_style": "cosine", "lr_warmup_steps": 4, "min_lr": 0.5}
    assert rates([0, 3, 4, 20, 50], **settings) == [[pytest.approx(x)] for x in (0.2, 0.8, 1.0, 0.5, 0.5)]


def test_a_lowest_rate_above_the_peak_is_the_peak():
    assert rates([0, 10, 20], lr_decay_style="linear", min_lr=5.0) == [[1.0], [1.0], [1.0]]


def test_every_group_keeps_its_own_peak():
    settings = {"lr_decay_style": "linear", "lr_warmup_steps": 4, "peaks": (1.0, 0.1)}
    assert rates([0, 4, 12], **settings) == [[pytest.approx(x), pytest.approx(x / 10)] for x in (0.2, 1.0, 0.5)]


def test_a_step_needs_no_history():
    settings = {"lr_decay_style": "cosine", "lr_warmup_steps": 4, "min_lr": 0.05}
    assert rates([13, 2, 13], **settings) == [rates([step], **settings)[0] for step in (13, 2, 13)]


@pytest.mark.parametrize("settings", [{"lr_warmup_steps": 20}, {"lr_warmup_steps": 30}, {"lr_decay_steps": 1}])
@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_degenerate_schedules_stay_between_zero_and_the_peak(style, settings):
    for step in range(2 * TOTAL):
        factor = learning_rate_factor(LrSchedulerConfig(lr_decay_style=style, **settings), step, total_steps=TOTAL)
        assert 0.0 <= factor <= 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_decay_style": "cosin"}, "lr_scheduler.lr_decay_style must be one of 'constant', 'linear', 'cosine'"),
        ({"lr_warmup_steps": -1}, "lr_scheduler.lr_warmup_steps must be zero or positive, got -1"),
        ({"lr_decay_steps": 0}, "lr_scheduler.lr_decay_steps must be positive or null, got 0"),
        ({"min_lr": -0.1}, "lr_scheduler.min_lr must be zero or positive, got -0.1"),
        ({"min_lr": math.nan}, "lr_scheduler.min_lr must be zero or positive, got nan"),
        ({"warmup": 3}, "unknown key lr_scheduler.warmup"),
    ],
)
def test_a_refused_schedule_is_named(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_section(LrSchedulerConfig, ConfigNode(values), "lr_scheduler")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_refused_norm_is_named(value):
    with pytest.raises(ValueError, match=re.escape(f"clip_grad_norm.max_norm must be positive or null, got {value}")):
        build_section(ClipGradNormConfig, ConfigNode({"max_norm": value}), "clip_grad_norm")
    assert build_section(ClipGradNormConfig, ConfigNode({"max_norm": None}), "clip_grad_norm").max_norm is None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.scalar = nn.Parameter(torch.zeros(()))
        self.marked = nn.Parameter(torch.zeros(3, 3))
        self.marked._no_weight_decay = True
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def names_in(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_only_matrices_decay():
    model = Tied()
    decays, kept = parameter_groups(model, weight_decay=0.1)
    assert (decays["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert names_in(model, decays) == {"embedding.weight"}
    assert names_in(model, kept) == {"norm.weight", "norm.bias", "head.bias", "scalar", "marked"}
    assert len(decays["params"]) == 1


def test_without_weight_decay_there_is_one_group():
    (group,) = parameter_groups(Tied(), weight_decay=0.0)
    assert len(group["params"]) == 6
    assert "weight_decay" not in group


def test_an_empty_group_is_left_out():
    (group,) = parameter_groups(nn.LayerNorm(3), weight_decay=0.1)
    assert group["weight_decay"] == 0.0


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), weight_decay=0.1)


def parameters_with(*gradients):
    parameters = [nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    return [nn.Parameter(torch.zeros(2)), *parameters]


@pytest.mark.parametrize(("max_norm", "scale"), [(None, 1.0), (20.0, 1.0), (13.0, 1.0), (6.5, 0.5), (1.3, 0.1)])
def test_clipping_scales_all_gradients_together(max_norm, scale):
    parameters = parameters_with([3.0, 4.0], [12.0])
    # A generator: the parameters are needed twice.
    assert clip_grad_norm((p for p in parameters), max_norm) == pytest.approx(13.0)
    assert parameters[0].grad is None
    assert parameters[1].grad.tolist() == pytest.approx([3.0 * scale, 4.0 * scale], rel=1e-6)
    assert parameters[2].grad.tolist() == pytest.approx([12.0 * scale], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_leaves_the_gradients(bad):
    parameters = parameters_with([3.0, bad], [12.0])
    assert not math.isfinite(clip_grad_norm(parameters, 1.0))
    assert parameters[1].grad[0] == 3.0
    assert parameters[2].grad.tolist() == [12.0]


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0.0
    assert clip_grad_norm([], 1.0) == 0.0
