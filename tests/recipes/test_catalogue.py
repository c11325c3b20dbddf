"""Recipes by name or path."""

import pytest

from automodel.config.loader import load_yaml_config
from automodel.recipes.catalogue import find_recipe, list_shipped
from automodel.recipes.sections import build_sections


def test_the_shipped_recipes_have_a_summary_each():
    shipped = {recipe.name: recipe for recipe in list_shipped()}
    assert list(shipped) == sorted(shipped)
    assert {"hybrid_tiny", "gdn_tiny"} <= shipped.keys()
    assert all(recipe.path.is_file() and len(recipe.summary) > 20 for recipe in shipped.values())
    assert not any(recipe.summary.startswith("#") for recipe in shipped.values())


@pytest.mark.parametrize("name", [recipe.name for recipe in list_shipped()])
def test_a_shipped_recipe_is_found_by_its_name_and_is_right(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_sections(load_yaml_config(find_recipe(name)))


def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n")
    monkeypatch.chdir(tmp_path)
    assert find_recipe(str(file)) == file
    assert find_recipe("mine.yaml").samefile(file)
    (tmp_path / "hybrid_tiny").mkdir()
    assert find_recipe("hybrid_tiny").is_file(), "a folder of that name is no recipe"


@pytest.mark.parametrize("name", ["hybrid_tinny", "hybrid-tiny", "hybrid_tiny.yaml", "configs/hybrid_tiny.yml"])
def test_a_near_miss_gets_the_nearest_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        find_recipe(name)
    assert repr(name) in str(error.value)
    assert "did you mean 'hybrid_tiny'?" in str(error.value)


def test_a_name_that_is_far_from_all_gets_no_advice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        find_recipe("zzz")
    assert "did you mean" not in str(error.value)
