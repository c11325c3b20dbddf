"""The parts of a training job, built from a recipe's sections."""

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel.config.loader import ConfigNode
from automodel.config.notes import note
from automodel.data.collate import IGNORE_INDEX
from automodel.data.loader import StatefulDataLoader
from automodel.data.tokenizer import load_tokenizer
from automodel.distributed.mesh import Mesh
from automodel.distributed.rank_group import RankGroup
from automodel.distributed.strategy import Strategy, prepare_blocks
from automodel.models.auto import build_on_meta
from automodel.models.resolution import switch_cache_off
from automodel.models.weights import PretrainedWeights, weight_source
from automodel.recipes.sections import RecipeSections
from automodel.training.loss import MaskedCrossEntropy
from automodel.training.optim import LearningRateSchedule, parameter_groups
from automodel.training.step import TrainStep
from automodel.training.step_scheduler import StepScheduler

__all__ = [
    "Data",
    "Loss",
    "Model",
    "Stepping",
    "build_data",
    "build_dataset",
    "build_loader",
    "build_loss",
    "build_model",
    "build_optimizer",
    "build_stepping",
    "build_tokenizer",
    "check_vocabulary",
    "repair_embeddings",
]

logger = logging.getLogger(__name__)

Loss = Callable[..., torch.Tensor]


def build_tokenizer(sections: RecipeSections) -> Any:
    """Build the tokenizer of the recipe, or the one that belongs to the pretrained model; None where there is none."""
    if sections.tokenizer is not None:
        return sections.tokenizer.instantiate()
    name = sections.model.get("pretrained_model_name_or_path")
    if name is None:
        return None
    options = ("revision", "cache_dir", "subfolder", "token", "local_files_only", "force_download", "trust_remote_code")
    with note(f"while loading the tokenizer of model.pretrained_model_name_or_path {str(name)!r}"):
        return load_tokenizer(str(name), **{key: sections.model[key] for key in options if key in sections.model})


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the ranks hold it.

    Args:
        inner: The model itself, whose names checkpoints use; its parameters are this rank's part.
        module: What to call in training: the model, or a wrapper around it.
    """

    inner: nn.Module
    module: nn.Module


def build_model(sections: RecipeSections, *, strategy: Strategy) -> Model:
    """Build the model, divide it among the ranks and give it its weights.

    Fresh weights are the same for every strategy and number of ranks, since each module's come from the seed and the
    module's name. A sharded pretrained model is never whole in memory: each rank reads its part of the files.

    Raises:
        TypeError: the target gives no torch module.
    """
    node, config = sections.model, sections.distributed
    with node.note_instantiation():
        factory, arguments = node["_target_"], node.arguments()
        source = weight_source(factory, arguments)
        whole = isinstance(source, PretrainedWeights) and not strategy.shards_parameters
        if source is None or whole:
            model = _checked_module(node.instantiate())
            marked = _without_weight_decay(model)
            prepare_blocks(model, config)
            module = strategy.shard(model)
        else:
            template = _checked_module(build_on_meta(factory, arguments))
            marked = _without_weight_decay(template)
            model = copy.deepcopy(template)
            prepare_blocks(model, config)
            module = strategy.shard(model) if strategy.shards_parameters else model
            strategy.materialize(model)
            source.fill(model, template, seed=sections.rng.seed)
            module = module if strategy.shards_parameters else strategy.shard(model)
    for name in marked:
        # Sharding and moving to a device make new parameters, without the model's marks.
        model.get_parameter(name)._no_weight_decay = True  # type: ignore[attr-defined]
    model.train()
    return Model(inner=model, module=module)


def _checked_module(model: Any) -> nn.Module:
    """The model that a factory gave, its generation cache switched off."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model._target_ must give a torch module, got a {type(model).__name__}")
    switch_cache_off(getattr(model, "config", None))
    return model


def _without_weight_decay(model: nn.Module) -> list[str]:
    """The parameters that the model marks as exempt from weight decay."""
    return [name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data and, where the recipe has it, validation data."""

    dataset: Any
    loader: StatefulDataLoader
    validation_dataset: Any = None
    validation_loader: StatefulDataLoader | None = None


def build_data(sections: RecipeSections, tokenizer: Any, *, ranks: RankGroup, ignore_index: int = IGNORE_INDEX) -> Data:
    """Build the datasets and their loaders.

    Args:
        sections: The recipe.
        tokenizer: For datasets that need one.
        ranks: The ranks that share each step's samples; every one of them gets its own part.
        ignore_index: The label that does not count in the loss.
    """
    options: dict[str, Any] = {
        "batch_size": sections.step_scheduler.local_batch_size,
        "seed": sections.rng.seed,
        "ranks": ranks,
        "ignore_index": ignore_index,
    }
    dataset = build_dataset(sections.dataset, tokenizer)
    loader = build_loader(sections.dataloader, dataset, training=True, **options)
    if sections.validation_dataset is None:
        return Data(dataset=dataset, loader=loader)
    held_out = build_dataset(sections.validation_dataset, tokenizer)
    node = sections.validation_dataloader
    held_out_loader = build_loader(node, held_out, training=False, **options)
    return Data(dataset=dataset, loader=loader, validation_dataset=held_out, validation_loader=held_out_loader)


def build_dataset(node: ConfigNode, tokenizer: Any) -> Any:
    """Build a dataset; the tokenizer is passed to a target that has an argument of that name.

    Raises:
        ValueError: the target needs a tokenizer and the recipe gives none.
    """
    tokenizer_argument = inspect.signature(node["_target_"]).parameters.get("tokenizer")
    if tokenizer is None and tokenizer_argument is not None and "tokenizer" not in node:
        if tokenizer_argument.default is inspect.Parameter.empty:
            raise ValueError(f"{node.path} needs a tokenizer: add a section tokenizer to the recipe")
        return node.instantiate()
    return node.instantiate(**_accepted(node["_target_"], tokenizer=tokenizer))


def build_loader(
    node: ConfigNode | None,
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    training: bool,
    ranks: RankGroup,
    ignore_index: int = IGNORE_INDEX,
) -> StatefulDataLoader:
    """Build a loader over `dataset`: shuffled and with whole batches only for training, unless the recipe differs.

    Raises:
        TypeError: the target is no loader whose position can be saved, or one that does not know about ranks where
            there are several.
    """
    place: dict[str, Any] = {"batch_size": batch_size, "rank": ranks.rank, "world_size": ranks.size}
    defaults: dict[str, Any] = {**place, "shuffle": training, "drop_last": training, "seed": seed}
    defaults["ignore_index"] = ignore_index
    if node is None:
        return StatefulDataLoader(dataset, **defaults)
    given = {name: value for name, value in defaults.items() if name not in node or name in place}
    if ranks.size > 1 and set(_accepted(node["_target_"], **place)) < set(place):
        raise TypeError(
            f"{node.path}._target_ must take rank and world_size, so that {ranks.size} ranks share the data"
        )
    if node.get("batch_size", batch_size) != batch_size:
        logger.warning("%s.batch_size is %s; local_batch_size %d holds", node.path, node.batch_size, batch_size)
    loader = node.instantiate(dataset, **_accepted(node["_target_"], **given))
    if not all(hasattr(loader, name) for name in ("set_epoch", "state_dict", "load_state_dict", "__len__")):
        raise TypeError(
            f"{node.path}._target_ must give a loader with set_epoch, state_dict and load_state_dict, such as "
            f"automodel.data.loader.StatefulDataLoader, got a {type(loader).__name__}"
        )
    typed: StatefulDataLoader = loader
    return typed


def build_loss(node: ConfigNode | None) -> Loss:
    """Build the loss; `MaskedCrossEntropy` where the recipe names none.

    Raises:
        ValueError: the loss does not take the number of label tokens, without which micro-batches do not add up.
    """
    loss: Loss = MaskedCrossEntropy() if node is None else node.instantiate()
    called = loss.forward if isinstance(loss, nn.Module) else loss
    if not _accepted(called, num_label_tokens=1):
        raise ValueError("loss_fn must be callable as loss_fn(logits, labels, num_label_tokens=n)")
    return loss


def build_optimizer(node: ConfigNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; vectors and scalars are exempt from weight decay."""
    decay = node.get("weight_decay")
    if decay is None:
        default = inspect.signature(node["_target_"]).parameters.get("weight_decay")
        decay = default.default if default is not None else 0.0
    optimizer: torch.optim.Optimizer = node.instantiate(parameter_groups(model, weight_decay=decay))
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """What runs the optimizer steps."""

    optimizer: torch.optim.Optimizer
    scheduler: StepScheduler
    train_step: TrainStep


def build_stepping(
    sections: RecipeSections,
    model: Model,
    data: Data,
    loss_fn: Loss,
    *,
    strategy: Strategy,
    mesh: Mesh,
    device: torch.device,
) -> Stepping:
    """Build the optimizer over this rank's part of the model, and what runs its steps.

    Raises:
        ValueError: the data hold no whole step, or a part refuses its settings.
    """
    optimizer = build_optimizer(sections.optimizer, model.inner)
    strategy.shard_optimizer(optimizer)
    scheduler = StepScheduler(
        sections.step_scheduler,
        batches_per_epoch=len(data.loader),
        dp_size=mesh.data.size,
        drop_last=getattr(data.loader, "drop_last", False),
        num_samples=len(data.dataset) if hasattr(data.dataset, "__len__") else None,
    )
    schedule = LearningRateSchedule(optimizer, sections.lr_scheduler, total_steps=scheduler.total_steps)
    train_step = TrainStep(
        model.module,
        loss_fn,
        optimizer,
        schedule,
        strategy=strategy,
        data_ranks=mesh.data,
        max_norm=sections.clip_grad_norm.max_norm,
        device=device,
    )
    return Stepping(optimizer=optimizer, scheduler=scheduler, train_step=train_step)


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Check that the model has a row for each token.

    Raises:
        ValueError: the tokenizer has more tokens than the model's vocabulary.
    """
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if tokenizer is None or vocab_size is None:
        return
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocab_size is {vocab_size}; "
            "model.config.vocab_size must be at least as large"
        )


def repair_embeddings(sections: RecipeSections, model: nn.Module, tokenizer: Any, *, ranks: RankGroup) -> None:
    """Repair damaged rows of the input embedding where the recipe asks for it; every rank calls it.

    Args:
        sections: The recipe.
        model: The model, loaded and sharded.
        tokenizer: Rows beyond its tokens may be zero; None: not known.
        ranks: The ranks that hold copies of what is not sharded.

    Raises:
        ValueError, RuntimeError: the rows cannot be repaired; see `repair_input_embedding_rows`.
    """
    if sections.embedding_row_repair is None:
        return
    # Ids may have gaps, so that the highest one says more than their number.
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    vocab_size = max(vocabulary.values()) + 1 if vocabulary else None
    sections.embedding_row_repair.apply(model, vocab_size=vocab_size, group=ranks.process_group)


def _accepted(target: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the offered arguments that the target's signature has."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if name in parameters or takes_any}
