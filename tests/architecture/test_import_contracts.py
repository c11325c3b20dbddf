"""The import contracts in pyproject.toml break where they should; `lint-imports` applies them to the real packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from house_rules import REPOSITORY

LINT_IMPORTS = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
LAYERS = ["cli", "recipes", "training", "checkpoint", "data", "observe", "models", "distributed", "caches", "config"]


@pytest.fixture
def tree(tmp_path):
    """A skeleton of both packages that keeps every contract."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    folders = [
        *(f"automodel/{layer}" for layer in LAYERS),
        "automodel",
        "automodel_kernels/tuning",
        "automodel_kernels",
    ]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "automodel_kernels" / "hardware.py").touch()
    (tmp_path / "automodel" / "models" / "auto.py").write_text("import transformers\n")
    (tmp_path / "automodel" / "models" / "__init__.py").write_text("import automodel.models.auto\n")
    (tmp_path / "automodel" / "data" / "tokenizer.py").write_text("import transformers\n")
    (tmp_path / "automodel" / "recipes" / "llm.py").write_text(
        "import automodel.models.auto, automodel.data.tokenizer\n"
    )
    return tmp_path


def lint(tree: Path):
    return subprocess.run([sys.executable, "-c", LINT_IMPORTS], cwd=tree, capture_output=True, text=True)


def test_the_skeleton_keeps_every_contract(tree):
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("automodel/config/bad.py", "import automodel.caches"),
        ("automodel/models/bad.py", "def f():\n    import automodel.training"),
        ("automodel/training/bad.py", "from automodel import checkpoint"),
        ("automodel/caches/bad.py", "import automodel.distributed"),
        ("automodel/utils/__init__.py", ""),
        ("automodel_kernels/bad.py", "import automodel.config"),
        ("automodel_kernels/bad.py", "from transformers import activations"),
        ("automodel_kernels/hardware.py", "import automodel_kernels.tuning"),
        ("automodel/data/bad.py", "from transformers import AutoTokenizer"),
    ],
)
def test_a_breach_is_caught(tree, module, text):
    path = tree / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n")
    done = lint(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 broken" in done.stdout or "utils" in done.stdout
