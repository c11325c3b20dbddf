"""A corpus and a recipe that are small enough to train in a second."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from tiny_recipe import TinyRecipe


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small matrices: more threads only wait for each other. Subprocesses get the same through the environment."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with the sources of the standard library's json and email packages."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for package in ("json", "email"):
        for file in (library / package).glob("*.py"):
            shutil.copy(file, folder / f"{package}_{file.name}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache_root(tmp_path_factory):
    """One cache root for these tests, and none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setenv("AUTOMODEL_CACHE", str(root))
        yield root


@pytest.fixture
def recipe(corpus, tmp_path):
    """The tiny recipe, to be changed by section; `recipe.write()` writes it and returns the file's path."""
    return TinyRecipe(corpus, tmp_path / "tiny.yaml")
