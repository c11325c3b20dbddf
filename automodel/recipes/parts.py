"""The parts of a training job, built from a recipe's sections."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel.config.loader import ConfigNode
from automodel.config.notes import note
from automodel.data.loader import StatefulDataLoader
from automodel.data.tokenizer import load_tokenizer
from automodel.recipes.sections import RecipeSections
from automodel.training.loss import MaskedCrossEntropy
from automodel.training.optim import parameter_groups

__all__ = [
    "Data",
    "build_data",
    "build_dataset",
    "build_loader",
    "build_loss",
    "build_model",
    "build_optimizer",
    "build_tokenizer",
    "check_vocabulary",
]

logger = logging.getLogger(__name__)


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


def build_model(sections: RecipeSections, *, device: torch.device) -> nn.Module:
    """Build the model on `device`.

    Raises:
        TypeError: the target gives no torch module.
    """
    model = sections.model.instantiate()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model._target_ must give a torch module, got a {type(model).__name__}")
    return model.to(device).train()


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data and, where the recipe has it, validation data."""

    dataset: Any
    loader: StatefulDataLoader
    validation_dataset: Any = None
    validation_loader: StatefulDataLoader | None = None


def build_data(sections: RecipeSections, tokenizer: Any) -> Data:
    """Build the datasets and their loaders."""
    batch_size, seed = sections.step_scheduler.local_batch_size, sections.rng.seed
    dataset = build_dataset(sections.dataset, tokenizer)
    loader = build_loader(sections.dataloader, dataset, batch_size=batch_size, seed=seed, training=True)
    if sections.validation_dataset is None:
        return Data(dataset=dataset, loader=loader)
    held_out = build_dataset(sections.validation_dataset, tokenizer)
    node = sections.validation_dataloader
    held_out_loader = build_loader(node, held_out, batch_size=batch_size, seed=seed, training=False)
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
    node: ConfigNode | None, dataset: Any, *, batch_size: int, seed: int, training: bool
) -> StatefulDataLoader:
    """Build a loader over `dataset`: shuffled and with whole batches only for training, unless the recipe differs.

    Raises:
        TypeError: the target is no loader whose position can be saved.
    """
    defaults: dict[str, Any] = {"batch_size": batch_size, "shuffle": training, "drop_last": training, "seed": seed}
    if node is None:
        return StatefulDataLoader(dataset, **defaults)
    given = {name: value for name, value in defaults.items() if name not in node or name == "batch_size"}
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


def build_loss(node: ConfigNode | None) -> Callable[..., torch.Tensor]:
    """Build the loss; `MaskedCrossEntropy` where the recipe names none.

    Raises:
        ValueError: the loss does not take the number of label tokens, without which micro-batches do not add up.
    """
    loss: Callable[..., torch.Tensor] = MaskedCrossEntropy() if node is None else node.instantiate()
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


def _accepted(target: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the offered arguments that the target's signature has."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if name in parameters or takes_any}
