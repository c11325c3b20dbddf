"""Loading a recipe: reading, typing and wrapping it; nothing is imported or resolved."""

from automodel.config.loader import load_yaml_config
from automodel.recipes.catalogue import find_recipe


def test_load_recipe(benchmark):
    benchmark.extra_info.update(device="cpu", path="yaml")
    benchmark.pedantic(load_yaml_config, args=(find_recipe("hybrid_tiny"),), rounds=50, warmup_rounds=2)
