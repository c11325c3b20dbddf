"""Loading a recipe, and everything about the ConfigNode that it becomes under one name."""

from pathlib import Path

from automodel.config.env import resolve_yaml_env_vars
from automodel.config.node import ConfigList, ConfigNode, EnvironmentString
from automodel.config.origins import Origin
from automodel.config.scalars import translate_value
from automodel.config.targets import load_module_from_file, resolve_target, set_enable_user_modules
from automodel.config.yaml_file import read_yaml_mapping

__all__ = [
    "ConfigList",
    "ConfigNode",
    "EnvironmentString",
    "Origin",
    "load_module_from_file",
    "load_yaml_config",
    "resolve_target",
    "resolve_yaml_env_vars",
    "set_enable_user_modules",
    "translate_value",
]

_resolve_target = resolve_target
"""The name under which callers of the reference system know `resolve_target`."""


def load_yaml_config(path: str | Path) -> ConfigNode:
    """Read a recipe file into a ConfigNode: scalars translated, environment placeholders resolved, nothing imported.

    Raises:
        FileNotFoundError: there is no such file.
        YamlFileError: the file is no readable YAML mapping.
        KeyError: a placeholder names a variable that is not set and has no default.
    """
    return ConfigNode(read_yaml_mapping(path))
