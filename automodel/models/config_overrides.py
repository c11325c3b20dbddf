"""Changing a model's configuration by name, and finding the names that do nothing.

transformers passes over a configuration key that it does not know, so that a misspelt `hiden_size` silently builds a
model of the default size. Here it is an error.
"""

import dataclasses
import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

__all__ = ["apply_overrides", "build_config", "known_names", "refuse_misspelt", "report_unknown"]

logger = logging.getLogger(__name__)

# How alike two names must be (0 to 1) for the unknown one to count as a typing error and not as a key of another model.
_ALIKE = 0.85

# Keys that transformers reads from a configuration without declaring them.
_UNDECLARED = frozenset({"auto_map", "quantization_config"})


def build_config(mapping: Mapping[str, Any]) -> PreTrainedConfig:
    """Build a configuration from its keys, `model_type` among them.

    Raises:
        ValueError: `model_type` is missing or unknown, or a key is a known one misspelt.
    """
    keys = dict(mapping)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"config.model_type must name an architecture, such as 'llama', got {model_type!r}")
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **keys)
    # transformers converts or drops the older names that it still understands, and only stores what it does not know.
    known = _declared_names(type(config))
    stored = (key for key in keys if key in vars(config) and key not in known and not key.startswith("_"))
    report_unknown(stored, known=known - keys.keys())
    return config


def apply_overrides(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Set the overrides that name an attribute of the configuration, in place; a mapping updates a sub-configuration.

    Returns:
        The overrides that name no attribute.
    """
    unused: dict[str, Any] = {}
    for key, value in overrides.items():
        if not hasattr(config, key):
            unused[key] = value
            continue
        current = getattr(config, key)
        if isinstance(current, PreTrainedConfig) and isinstance(value, Mapping):
            unknown = apply_overrides(current, value)
            report_unknown(unknown, known=known_names(current), prefix=f"{key}.")
        else:
            setattr(config, key, value)
    return unused


def refuse_misspelt(unknown: Iterable[str], *, known: Iterable[str], prefix: str = "") -> None:
    """Refuse unknown names that are close to a known one.

    Args:
        unknown: The names that a recipe uses and the configuration does not have.
        known: The names that it has and the recipe leaves alone.
        prefix: What stands before a name in messages, such as "text_config.".

    Raises:
        ValueError: naming the first such key and the known name it is close to.
    """
    names = sorted(known)
    for key in unknown:
        close = difflib.get_close_matches(key, names, n=1, cutoff=_ALIKE)
        if close:
            raise ValueError(f"{prefix}{key} is not a key of this model's configuration (did you mean {close[0]!r}?)")


def report_unknown(unknown: Iterable[str], *, known: Iterable[str], prefix: str = "") -> None:
    """As `refuse_misspelt`, and warn about the other unknown names: they have no effect."""
    without_effect = list(unknown)
    refuse_misspelt(without_effect, known=known, prefix=prefix)
    if without_effect:
        names = ", ".join(prefix + key for key in without_effect)
        logger.warning("this model's configuration does not use these keys: %s", names)


def known_names(config: PreTrainedConfig) -> set[str]:
    """The keys that a configuration has, under every name that reaches them."""
    return _declared_names(type(config)) | {name for name in vars(config) if not name.startswith("_")}


def _declared_names(config_class: type[PreTrainedConfig]) -> set[str]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    # Older and user-written classes declare their keys as arguments of __init__.
    parameters = inspect.signature(config_class.__init__).parameters.keys()
    attributes = {name for name in dir(config_class) if not callable(getattr(config_class, name, None))}
    names = fields | parameters | attributes | config_class.attribute_map.keys() | _UNDECLARED
    return {name for name in names if not name.startswith("_")}
