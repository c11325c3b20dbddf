"""One optimizer step of each shipped recipe, on the path that this machine takes; extra_info gives tokens a second."""

from contextlib import nullcontext

import pytest
import torch

from automodel.config.loader import load_yaml_config
from automodel.distributed.rank_group import RankGroup
from automodel.distributed.single import Single
from automodel.models.auto import quiet_kernel_fallbacks
from automodel.recipes.catalogue import list_shipped
from automodel.recipes.parts import build_loss, build_model, build_optimizer
from automodel.recipes.sections import build_sections
from automodel.training.optim import LearningRateSchedule
from automodel.training.precision import compute_dtype
from automodel.training.step import TrainStep


@pytest.mark.benchmark(group="training step")
@pytest.mark.parametrize("recipe", list_shipped(), ids=lambda recipe: recipe.name)
def test_training_step(benchmark, recipe):
    sections = build_sections(load_yaml_config(recipe.path))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = compute_dtype(None, device=device)
    strategy = Single(device=device, dtype=dtype)
    model = build_model(sections, strategy=strategy).inner
    optimizer = build_optimizer(sections.optimizer, model)
    schedule = LearningRateSchedule(optimizer, sections.lr_scheduler, total_steps=100)
    step = TrainStep(
        model,
        build_loss(sections.loss_fn),
        optimizer,
        schedule,
        strategy=strategy,
        data_ranks=RankGroup(),
        max_norm=1.0,
        device=device,
    )
    scheduler = sections.step_scheduler
    shape = (scheduler.local_batch_size, sections.dataset["context_length"])
    batches = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(0, model.config.vocab_size, (scheduler.accumulation_steps(1), *shape))
    ]

    def run():
        return step.run(batches, step=50, phase=lambda name: nullcontext())

    with quiet_kernel_fallbacks():
        result = benchmark.pedantic(run, rounds=5, iterations=1, warmup_rounds=1)
    path = f"{str(dtype).removeprefix('torch.')}, transformers' torch layers"
    tokens_per_second = result.num_tokens / benchmark.stats.stats.median
    benchmark.extra_info.update(device=device.type, path=path, tokens_per_second=round(tokens_per_second))
