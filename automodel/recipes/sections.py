"""A recipe's sections, checked: one function builds them all from a ConfigNode."""

import copy
import difflib
import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel.config.loader import ConfigNode, resolve_target
from automodel.config.names import did_you_mean
from automodel.config.notes import add_note
from automodel.config.origins import Origin
from automodel.config.printing import resolved
from automodel.config.sections import NotAvailableYetError, add_place, build_section, check_arguments, refuse
from automodel.recipes.planned_sections import PlannedSection
from automodel.recipes.reference_keys import MEGATRON_OPTIONS, REFERENCE_KEYS, REFERENCE_TARGETS
from automodel.recipes.schema import (
    RECIPE_CLASSES,
    SETTINGS_SECTIONS,
    TARGET_SECTIONS,
    TargetSection,
    find_section,
    is_metadata,
)

if TYPE_CHECKING:
    from automodel.checkpoint.store import CheckpointConfig
    from automodel.distributed.config import DistEnvConfig, DistributedConfig
    from automodel.models.kernels import KernelsConfig
    from automodel.training.embedding_row_repair import EmbeddingRowRepairConfig
    from automodel.training.optim import ClipGradNormConfig, LrSchedulerConfig
    from automodel.training.rng import RngConfig
    from automodel.training.step_scheduler import StepSchedulerConfig

__all__ = ["RecipeSections", "build_sections", "check_sections", "find_recipe_class"]

logger = logging.getLogger(__name__)

DEFAULT_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"
_METHODS = ("setup", "run_train_validation_loop")
_MISTAKES = (ValueError, TypeError, ImportError, KeyError, AttributeError)
_MANAGERS = {"FSDP2Manager": "fsdp2", "DDPManager": "ddp", "MegatronFSDPManager": "megatron_fsdp"}
"""Classes of the older form of `distributed`, and the strategy that each stands for."""


@dataclass(frozen=True, kw_only=True)
class RecipeSections:
    """A recipe, checked: schema sections as their dataclasses, `_target_` sections as nodes to instantiate."""

    recipe: Callable[..., Any]
    step_scheduler: "StepSchedulerConfig"
    distributed: "DistributedConfig"
    dist_env: "DistEnvConfig"
    checkpoint: "CheckpointConfig"
    rng: "RngConfig"
    lr_scheduler: "LrSchedulerConfig"
    clip_grad_norm: "ClipGradNormConfig"
    embedding_row_repair: "EmbeddingRowRepairConfig | None"
    kernels: "KernelsConfig"
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

    The error of the first mistake is raised; notes on it name the other ones.

    Raises:
        ValueError: an unknown section or key (with the nearest known one), a missing section, or a refused value.
        NotAvailableYetError: a known section or key that is not built yet and is switched on.
        TypeError: a section that must be a mapping is none.
        ImportError, InvalidFileTargetError: a `_target_` or `*_fn` cannot be resolved.
    """
    mistakes = _Mistakes(config)
    with config.hiding_values():
        _check_names(config, mistakes)
        recipe: Any = None
        with mistakes.collected("recipe"):
            recipe = find_recipe_class(config)
        built = _build_settings(config, mistakes)
        for name, section in TARGET_SECTIONS.items():
            with mistakes.collected(name):
                built[name] = _checked_target(config, section, needed=recipe is not None)
        with mistakes.collected("deterministic"):
            built["deterministic"] = _flag(config, "deterministic")
        mistakes.raise_first()
    return RecipeSections(recipe=recipe, **built)


def check_sections(config: ConfigNode, *, targets: Collection[str] = ()) -> None:
    """Check the names of all sections, and the contents of those with a fixed schema and of the named `targets`.

    The class of the recipe is checked by its name only: nothing is imported for it.

    Raises:
        ValueError, NotAvailableYetError, TypeError, ImportError: as `build_sections`.
    """
    mistakes = _Mistakes(config)
    with config.hiding_values():
        _check_names(config, mistakes)
        with mistakes.collected("recipe"):
            _recipe_target(config)
        _build_settings(config, mistakes)
        with mistakes.collected("deterministic"):
            _flag(config, "deterministic")
        for name in targets:
            with mistakes.collected(name):
                _checked_target(config, TARGET_SECTIONS[name], needed=False)
        mistakes.raise_first()


def _build_settings(config: ConfigNode, mistakes: "_Mistakes") -> dict[str, Any]:
    built: dict[str, Any] = {}
    for name, section in SETTINGS_SECTIONS.items():
        with mistakes.collected(name):
            node, also = _settings_node(config, name), REFERENCE_KEYS.get(name)
            if section.optional and (node is None or node is False):
                built[name] = None
                continue
            built[name] = build_section(section.section_class(), node, name, also=also)
    repair, distributed = built.get("embedding_row_repair"), built.get("distributed")
    if repair is not None and distributed is not None:
        with mistakes.collected("embedding_row_repair"):
            repair.check_pipeline(distributed.pp_size)
    return built


class _Mistakes:
    """Everything that is wrong with a recipe, so that one run tells it all."""

    def __init__(self, config: ConfigNode) -> None:
        self._config = config
        self._found: list[Exception] = []

    @contextmanager
    def collected(self, section: Any) -> Iterator[None]:
        """Keep an error about a section instead of raising it, with the place of the section."""
        try:
            yield
        except _MISTAKES as error:
            if section in self._config:
                add_place(error, self._origin(error, section))
            self._found.append(error)

    def _origin(self, error: Exception, section: Any) -> Origin:
        """Where the recipe holds what an error about a section names, or the section where it names nothing in it."""
        named = re.match(r"[\w-]+(?= is )", str(error))
        paths = [named[0]] if named is not None else []
        for text in (str(error), *getattr(error, "__notes__", ())):
            paths += re.findall(rf"(?<![\w.]){re.escape(str(section))}(?:\.[\w-]+)+", text)
        origins = [self._config.origin(path) for path in paths if path in self._config]
        overridden = (origin for origin in origins if origin.kind == "override")
        return next(overridden, self._config.origin(section))

    def raise_first(self) -> None:
        """Raise the first error, the others as notes on it."""
        if not self._found:
            return
        first, *others = self._found
        for other in others:
            add_note(first, "\n      ".join([f"also: {other}", *getattr(other, "__notes__", ())]))
        raise first


def _check_names(config: ConfigNode, mistakes: _Mistakes) -> None:
    passed_over = []
    for name in config:
        if is_metadata(name):
            passed_over.append(name)
            continue
        with mistakes.collected(name):
            section = find_section(name)
            if isinstance(section, PlannedSection) and section.asks_for_something(_plain(config, name)):
                off = f" (switched off by {section.off})" if section.off else ""
                raise NotAvailableYetError(f"section {name!r} is not available yet{off}")
    if passed_over:
        logger.info("sections passed over, which hold no settings: %s", ", ".join(passed_over))


def _plain(config: ConfigNode, name: str) -> Any:
    """A section's plain value; its targets are names, and are not imported."""
    return resolved(config.values_by_key()[name])


def _settings_node(config: ConfigNode, name: str) -> Any:
    """The mapping of a section with a fixed schema, older forms translated."""
    node = config.get(name)
    if name == "rng":
        node = _rng_node(config, node)
    if name == "distributed" and isinstance(node, ConfigNode):
        _warn_of_megatron_options(node)
    if not isinstance(node, ConfigNode) or "_target_" not in node:
        return node
    if name == "distributed":
        return _old_distributed_node(node)
    target = str(node.raw_config["_target_"])
    if target.rpartition(".")[2] != REFERENCE_TARGETS.get(name):
        raise NotAvailableYetError(f"{name}._target_: {target!r} is not available yet; {name} has keys of its own")
    return node


def _warn_of_megatron_options(node: ConfigNode) -> None:
    given = [option for option in MEGATRON_OPTIONS if node.get(option) is not None]
    if given:
        logger.warning(
            "no effect: distributed.%s (the adapter of strategy megatron_fsdp sets the options of megatron-fsdp)",
            ", distributed.".join(given),
        )


def _rng_node(config: ConfigNode, node: Any) -> Any:
    seed = config.get("seed")
    if seed is None or not (node is None or isinstance(node, ConfigNode)):
        return node
    if node is not None and node.get("seed", seed) != seed:
        raise ValueError(f"seed is {config.shown('seed')} but rng.seed is {node.shown('seed')}; keep one of them")
    merged = ConfigNode(path="rng") if node is None else copy.deepcopy(node)
    merged["seed"] = config.raw_config["seed"]
    return merged


def _old_distributed_node(node: ConfigNode) -> ConfigNode:
    """Translate the older form, whose `_target_` names a manager class, to the fixed schema."""
    manager = str(node.raw_config["_target_"]).rpartition(".")[2]
    if manager not in _MANAGERS:
        near = difflib.get_close_matches(manager, _MANAGERS, n=1)
        raise refuse(
            "distributed._target_", manager, f"absent (write strategy: {_MANAGERS[near[0]] if near else 'fsdp2'})"
        )
    logger.warning("distributed._target_ %s is an older form, read as strategy: %s", manager, _MANAGERS[manager])
    translated = copy.deepcopy(node)
    translated["strategy"] = _MANAGERS[manager]
    policy = translated.get("mp_policy")
    if isinstance(policy, ConfigNode):
        for key, value in list(policy.items()):
            if key != "_target_" and isinstance(value, str) and value.startswith("torch."):
                policy[key] = value.removeprefix("torch.")
    return translated


def _checked_target(config: ConfigNode, section: TargetSection, *, needed: bool) -> ConfigNode | None:
    """The node of a section with a `_target_`, its targets resolved and their arguments checked."""
    name = section.name
    node = config.get(name)
    if node is None:
        if section.required and needed:
            raise ValueError(f"the recipe needs a section {name}")
        return None
    if isinstance(node, list):
        raise NotAvailableYetError(f"{name}: a list of {len(node)} is not available yet; give one mapping")
    if not isinstance(node, ConfigNode):
        raise TypeError(f"{name} must be a mapping with a _target_, got {config.shown(name)}")
    if "_target_" not in node and section.default_target is not None:
        node["_target_"] = section.default_target
    if "_target_" not in node:
        raise ValueError(f"{name} needs a _target_, such as {', '.join(section.targets)}")
    node.resolve_targets()
    check_arguments(node, provided=section.provided)
    return node


def find_recipe_class(config: ConfigNode) -> Callable[..., Any]:
    """Return the class that runs a recipe, by its section `recipe`.

    Raises:
        ValueError: the name is unknown, or is that of no recipe class.
        NotAvailableYetError: the class is known but not built yet.
        ImportError, InvalidFileTargetError: its `_target_` cannot be resolved.
    """
    target = _recipe_target(config)
    found = resolve_target(target)
    # Statically, so that no code of the class runs.
    if not isinstance(found, type) or any(inspect.getattr_static(found, name, None) is None for name in _METHODS):
        raise ValueError(f"recipe {target!r} is no recipe class: it needs the methods {' and '.join(_METHODS)}")
    return found


def _recipe_target(config: ConfigNode) -> str:
    """The dotted name of the class that runs a recipe."""
    value = config.get("recipe")
    if value is None:
        value = DEFAULT_RECIPE
    if isinstance(value, ConfigNode):
        value = value.raw_config.get("_target_")
    if not isinstance(value, str):
        raise refuse("recipe", value, "the name of a recipe class or a mapping with a _target_")
    bare = value.rpartition(".")[2]
    if bare in RECIPE_CLASSES:
        target = RECIPE_CLASSES[bare]
        if target is None:
            raise NotAvailableYetError(f"recipe {bare} is not available yet")
        return target
    if "." not in value:
        raise ValueError(f"unknown recipe {value!r}{did_you_mean(value, RECIPE_CLASSES)}")
    return str(value)


def _flag(config: ConfigNode, name: str) -> bool:
    value = config.get(name, False)
    if isinstance(value, ConfigNode):
        value = value.get("enabled", False)
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value
