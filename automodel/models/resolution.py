"""Which configuration, and which commit, a model is loaded with."""

import copy
import logging
from collections.abc import Mapping
from os import PathLike
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from automodel.models.commit import carried_commit, is_commit, select_commit
from automodel.models.config_overrides import (
    apply_overrides,
    build_config,
    known_names,
    refuse_misspelt,
    report_unknown,
)

__all__ = ["ConfigSource", "as_config", "config_for_weights", "load_config", "set_for_training", "switch_cache_off"]

logger = logging.getLogger(__name__)

ConfigSource = PreTrainedConfig | Mapping[str, Any] | str | PathLike[str]

# Options of transformers' loader that must not reach the configuration: it would store or copy them.
_NOT_FOR_CONFIG = ("quantization_config", "state_dict")


def load_config(
    name_or_path: str | PathLike[str],
    *,
    hub: Mapping[str, Any],
    code: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Read a configuration at the commit that the download selects; also return the overrides it does not know."""
    commit = select_commit(name_or_path, filename=overrides.get("gguf_file") or "config.json", hub_options=hub)
    pinned = dict(hub) if commit is None else {**hub, "revision": commit}
    config, unused = AutoConfig.from_pretrained(
        name_or_path, return_unused_kwargs=True, **pinned, **code, **copy.deepcopy(dict(overrides))
    )
    if commit is not None:
        config._commit_hash = commit
    return config, unused


def as_config(
    source: ConfigSource, *, hub: Mapping[str, Any], code: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Turn what a recipe gives as `config` into a configuration of our own; also return the unknown overrides."""
    match source:
        case str() | PathLike():
            return load_config(source, hub=hub, code=code, overrides=overrides)
        case PreTrainedConfig():
            config: PreTrainedConfig = copy.deepcopy(source)
        case Mapping():
            config = build_config(source)
        case _:
            raise ValueError(
                "config must be a transformers configuration, a mapping with model_type, a Hub repository or a path, "
                f"got {type(source).__name__}"
            )
    return config, apply_overrides(config, overrides)


def config_for_weights(
    name_or_path: str | PathLike[str],
    *,
    config: ConfigSource | None,
    hub: Mapping[str, Any],
    code: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> tuple[PreTrainedConfig, str | None, dict[str, Any]]:
    """Find the configuration, the commit of the weights, and the options that are left for transformers' loader."""
    for_config = {key: value for key, value in overrides.items() if key not in _NOT_FOR_CONFIG}
    held_back = {key: overrides[key] for key in _NOT_FOR_CONFIG if key in overrides}
    if config is None:
        resolved, options = load_config(name_or_path, hub=hub, code=code, overrides=for_config)
        commit = carried_commit(resolved, name_or_path)
    else:
        resolved, options = as_config(config, hub=hub, code=code, overrides=for_config)
        commit = _commit_beside_config(name_or_path, resolved, filename=for_config.get("gguf_file"), hub=hub)
        if commit is not None:
            resolved._commit_hash = commit
    refuse_misspelt(options, known=known_names(resolved))
    return resolved, commit, options | held_back


def _commit_beside_config(
    name_or_path: str | PathLike[str], config: PreTrainedConfig, *, filename: str | None, hub: Mapping[str, Any]
) -> str | None:
    """The commit of the weights where the caller brings the configuration, which may carry its own."""
    carried = carried_commit(config, name_or_path)
    revision = hub.get("revision")
    if carried is not None and is_commit(revision) and revision != carried:
        raise ValueError(f"revision is commit {revision}, but config was read at commit {carried} of {name_or_path}")
    if carried is not None and revision in (None, carried):
        return carried
    selected = select_commit(name_or_path, filename=filename or "config.json", hub_options=hub)
    if carried is None:
        return selected
    if selected != carried:
        logger.warning(
            "revision %s of %s is now commit %s; the weights are read at commit %s, where the configuration was read",
            revision,
            name_or_path,
            selected,
            carried,
        )
    return carried


def switch_cache_off(config: object) -> None:
    """Let a model keep no generation cache, in place: it costs memory, and training never reads it.

    Args:
        config: A transformers configuration; anything else is left as it is.
    """
    if isinstance(config, PreTrainedConfig):
        for part in (config, config.get_text_config()):
            if hasattr(part, "use_cache"):
                part.use_cache = False


def set_for_training(
    config: PreTrainedConfig,
    overrides: Mapping[str, Any],
    text_config: Mapping[str, Any] | None,
    output_hidden_states: bool | None,
) -> None:
    """Apply, in place, what a training run wants of a configuration and of the language model inside it."""
    if "use_cache" not in overrides:
        switch_cache_off(config)
    text = config.get_text_config()
    for part in (config, text):
        if output_hidden_states is not None:
            part.output_hidden_states = output_hidden_states
    if text_config:
        unknown = apply_overrides(text, text_config)
        report_unknown(unknown, known=known_names(text), prefix="text_config.")
