import subprocess
import sys

import pytest
import yaml

from automodel.config import loader, targets
from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.config.yaml_file import YamlFileError
from automodel.recipes.catalogue import find_recipe, list_shipped


def test_a_path_may_be_a_text(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("a: {b: '10'}\n")
    assert load_yaml_config(str(file)) == load_yaml_config(file) == ConfigNode({"a": {"b": 10}})


def test_what_is_no_recipe_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_yaml_config(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    with pytest.raises(YamlFileError, match=r"bad\.yaml:2"):
        load_yaml_config(tmp_path / "bad.yaml")


def test_loading_a_shipped_recipe_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from automodel.config.loader import load_yaml_config\n"
        "from automodel.recipes.catalogue import find_recipe\n"
        "config = load_yaml_config(find_recipe('hybrid_tiny'))\n"
        "assert config.model.config.vocab_size == 4096\n"
        "str(config), config.to_dict()\n"
        "print(*sorted({'torch', 'transformers', 'numpy', 'triton'}.intersection(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", [recipe.name for recipe in list_shipped()])
def test_the_shipped_recipes_load_and_print(name):
    config = load_yaml_config(find_recipe(name))
    assert ConfigNode(yaml.safe_load(str(config))) == config
    assert isinstance(config.step_scheduler.global_batch_size, int)
    assert isinstance(config.optimizer.lr, float)


def test_the_documented_names_are_exported():
    for name in ("load_yaml_config", "ConfigNode", "translate_value", "resolve_yaml_env_vars", "load_module_from_file"):
        assert name in loader.__all__
    assert loader.set_enable_user_modules is targets.set_enable_user_modules
    assert loader._resolve_target is targets.resolve_target
