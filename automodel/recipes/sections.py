"""Every section that a recipe may hold, who owns it, and the function that builds them all from a ConfigNode."""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from automodel.checkpoint.store import CheckpointConfig
from automodel.config.loader import ConfigNode, resolve_target
from automodel.config.names import did_you_mean
from automodel.config.sections import NotAvailableYetError, build_section, check_arguments, refuse
from automodel.distributed.config import DistEnvConfig, DistributedConfig
from automodel.training.optim import ClipGradNormConfig, LrSchedulerConfig
from automodel.training.rng import RngConfig
from automodel.training.step_scheduler import StepSchedulerConfig

__all__ = ["RecipeSections", "build_sections", "find_recipe_class"]

logger = logging.getLogger(__name__)

DEFAULT_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"

RECIPES: dict[str, str | None] = {
    "TrainFinetuneRecipeForNextTokenPrediction": "automodel.recipes.llm.TrainFinetuneRecipeForNextTokenPrediction",
    "BenchmarkingRecipeForNextTokenPrediction": None,
    "FinetuneRecipeForVLM": None,
    "KnowledgeDistillationRecipeForNextTokenPrediction": None,
    "TrainFinetuneRecipeForSequenceClassification": None,
}
"""Recipe classes by their bare names; None: known, not built yet."""

_SCHEMA_SECTIONS: dict[str, type[Any]] = {
    "step_scheduler": StepSchedulerConfig,
    "distributed": DistributedConfig,
    "dist_env": DistEnvConfig,
    "checkpoint": CheckpointConfig,
    "rng": RngConfig,
    "lr_scheduler": LrSchedulerConfig,
    "clip_grad_norm": ClipGradNormConfig,
}
_TARGET_SECTIONS: dict[str, tuple[str, ...]] = {
    "model": (),
    "tokenizer": (),
    "dataset": ("tokenizer",),
    "dataloader": ("dataset", "batch_size"),
    "validation_dataset": ("tokenizer",),
    "validation_dataloader": ("dataset", "batch_size"),
    "loss_fn": (),
    "optimizer": ("params",),
}
"""Sections with a `_target_`, and the arguments that the recipe passes to the target itself."""

_OTHER_SECTIONS = frozenset({"recipe", "seed", "deterministic"})
_METADATA_SECTIONS = frozenset({"ci"})
_SECTIONS_NOT_BUILT = frozenset(
    {"packed_sequence", "peft", "freeze_config", "processor", "benchmark", "compile", "wandb", "fp8", "parallelizer"}
    | {"nvtx", "quantization", "prewarm", "embedding_row_repair", "neftune", "qat", "skypilot", "mfu", "kernels"}
    | {"kernel_cache", "teacher_model", "kd_ratio", "kd_loss_fn", "offload_teacher_model", "slurm", "autopipeline"}
    | {"mlflow", "comet", "autonvtx"}
)
_KNOWN = frozenset({*_SCHEMA_SECTIONS, *_TARGET_SECTIONS} | _OTHER_SECTIONS | _METADATA_SECTIONS | _SECTIONS_NOT_BUILT)
_SWITCHES = ("enabled", "enable")
_OFF_UNLESS_SWITCHED = frozenset({"compile", "fp8"})
_OFF_VALUES_ONLY = frozenset({"prewarm", "nvtx", "mfu", "kernels", "kernel_cache", "packed_sequence"})


@dataclass(frozen=True, kw_only=True)
class RecipeSections:
    """A recipe, checked: schema sections as their dataclasses, `_target_` sections as nodes to instantiate."""

    recipe: Callable[..., Any]
    step_scheduler: StepSchedulerConfig
    distributed: DistributedConfig
    dist_env: DistEnvConfig
    checkpoint: CheckpointConfig
    rng: RngConfig
    lr_scheduler: LrSchedulerConfig
    clip_grad_norm: ClipGradNormConfig
    deterministic: bool
    model: ConfigNode
    tokenizer: ConfigNode | None
    dataset: ConfigNode
    dataloader: ConfigNode | None
    validation_dataset: ConfigNode | None
    validation_dataloader: ConfigNode | None
    loss_fn: ConfigNode | None
    optimizer: ConfigNode


def build_sections(config: ConfigNode) -> RecipeSections:
    """Check a whole recipe and build its sections; this is where its targets are imported.

    Raises:
        ValueError: an unknown section or key (with the nearest known one), a missing section, or a refused value.
        NotAvailableYetError: a known section or key that is not built yet and is switched on.
        TypeError: a section that must be a mapping is none.
        ImportError, InvalidFileTargetError: a `_target_` or `*_fn` cannot be resolved.
    """
    _check_names(config)
    schema = {
        name: build_section(section_class, _schema_node(config, name), name)
        for name, section_class in _SCHEMA_SECTIONS.items()
    }
    targets: dict[str, Any] = {name: _target_node(config, name) for name in _TARGET_SECTIONS}
    for name in ("model", "dataset", "optimizer"):
        if targets[name] is None:
            raise ValueError(f"the recipe needs a section {name}")
    for name, node in targets.items():
        if node is not None:
            node.resolve_targets()
            check_arguments(node, provided=_TARGET_SECTIONS[name])
    return RecipeSections(
        recipe=find_recipe_class(config),
        deterministic=_flag(config, "deterministic"),
        **schema,
        **targets,
    )


def find_recipe_class(config: ConfigNode) -> Callable[..., Any]:
    """Return the class that runs a recipe, by its section `recipe`.

    Raises:
        ValueError: the name is unknown.
        NotAvailableYetError: the class is known but not built yet.
        ImportError, InvalidFileTargetError: its `_target_` cannot be resolved.
    """
    return _resolve_recipe(config.get("recipe", DEFAULT_RECIPE))


def _check_names(config: ConfigNode) -> None:
    passed_over = []
    for name in config:
        if isinstance(name, str) and (name.startswith("_") or name in _METADATA_SECTIONS):
            passed_over.append(name)
        elif name not in _KNOWN:
            raise ValueError(f"unknown section {name!r}{did_you_mean(str(name), _KNOWN)}")
        elif name in _SECTIONS_NOT_BUILT and not _is_off(name, config.to_dict()[name]):
            raise NotAvailableYetError(f"section {name!r} is not available yet")
    if passed_over:
        logger.info("sections passed over, which hold no settings: %s", ", ".join(passed_over))


def _is_off(name: str, value: object) -> bool:
    """Whether a section that is not built yet asks for nothing."""
    if value is None or value is False:
        return True
    if not isinstance(value, Mapping):
        return False
    switches = [value[key] for key in _SWITCHES if key in value]
    if switches:
        return not any(switches)
    if name == "packed_sequence" and "packed_sequence_size" in value:
        return value["packed_sequence_size"] in (0, None)
    return name in _OFF_UNLESS_SWITCHED or (name in _OFF_VALUES_ONLY and not any(value.values()))


def _schema_node(config: ConfigNode, name: str) -> Any:
    """The mapping of a schema section, older forms translated."""
    node = config.get(name)
    if name == "rng":
        return _rng_node(config, node)
    if name == "distributed" and isinstance(node, ConfigNode) and "_target_" in node:
        return _old_distributed_node(node)
    return node


def _rng_node(config: ConfigNode, node: Any) -> Any:
    seed = config.get("seed")
    if seed is None or not (node is None or isinstance(node, ConfigNode)):
        return node
    if node is not None and node.get("seed", seed) != seed:
        raise ValueError(f"seed is {seed!r} but rng.seed is {node.get('seed')!r}; keep one of them")
    return {**(node.to_dict() if node is not None else {}), "seed": seed}


def _old_distributed_node(node: ConfigNode) -> dict[str, Any]:
    """Translate the older form, whose `_target_` names a manager class, to the fixed schema."""
    values = node.to_dict()
    manager = str(values.pop("_target_")).rpartition(".")[2]
    strategies = {"FSDP2Manager": "fsdp2", "DDPManager": "ddp", "MegatronFSDPManager": "megatron_fsdp"}
    if manager not in strategies:
        near = difflib.get_close_matches(manager, strategies, n=1)
        raise refuse(
            "distributed._target_", manager, f"absent (write strategy: {strategies[near[0]] if near else 'fsdp2'})"
        )
    logger.warning("distributed._target_ %s is an older form, read as strategy: %s", manager, strategies[manager])
    for name in ("mp_policy", "offload_policy"):
        if isinstance(values.get(name), dict):
            values[name] = {key: _dtype_name(value) for key, value in values[name].items() if key != "_target_"}
    if values.get("offload_policy", 0) is None:
        del values["offload_policy"]
    return {**values, "strategy": strategies[manager]}


def _dtype_name(value: object) -> object:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _target_node(config: ConfigNode, name: str) -> ConfigNode | None:
    node = config.get(name)
    if node is None:
        return None
    if not isinstance(node, ConfigNode):
        raise TypeError(f"{name} must be a mapping with a _target_, got {node!r}")
    return node


def _resolve_recipe(value: object) -> Callable[..., Any]:
    if isinstance(value, ConfigNode):
        value = value.to_dict().get("_target_")
    if not isinstance(value, str):
        raise refuse("recipe", value, "the name of a recipe class or a mapping with a _target_")
    bare = value.rpartition(".")[2]
    if bare in RECIPES:
        target = RECIPES[bare]
        if target is None:
            raise NotAvailableYetError(f"recipe {bare} is not available yet")
        return resolve_target(target)
    if "." not in value:
        raise ValueError(f"unknown recipe {value!r}{did_you_mean(value, RECIPES)}")
    return resolve_target(value)


def _flag(config: ConfigNode, name: str) -> bool:
    value = config.get(name, False)
    if isinstance(value, ConfigNode):
        value = value.get("enabled", False)
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value
