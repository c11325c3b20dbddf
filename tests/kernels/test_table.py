import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import automodel_kernels
from automodel_kernels.tuning.table import shipped_tables

FIND_TABLES = "from automodel_kernels.tuning.table import shipped_tables; print(shipped_tables())"


def test_the_tables_lie_beside_the_package():
    folder = shipped_tables()
    assert folder.parent == Path(automodel_kernels.__file__).parents[1]
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("present", [True, False])
def test_a_copy_of_the_package_finds_its_own_tables_or_names_the_missing_folder(tmp_path, present):
    shutil.copytree(Path(automodel_kernels.__file__).parent, tmp_path / "automodel_kernels")
    if present:
        (tmp_path / "autotune_cache").mkdir()
    found = subprocess.run([sys.executable, "-c", FIND_TABLES], cwd=tmp_path, capture_output=True, text=True)
    expected = str(tmp_path / "autotune_cache")
    if present:
        assert found.stdout.strip() == expected, found.stderr
    else:
        assert found.returncode != 0
        assert f"FileNotFoundError: the shipped tuning tables are missing: {expected}" in found.stderr
