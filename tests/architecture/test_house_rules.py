"""The house rules hold, and every rule catches what it forbids."""

import pytest

import house_rules
from house_rules import PACKAGES, REPOSITORY, load_sources

EVERYTHING = (*PACKAGES, "tests", "bench")


@pytest.fixture(scope="module")
def packages():
    return load_sources(REPOSITORY, PACKAGES)


@pytest.fixture(scope="module")
def everything():
    return load_sources(REPOSITORY, EVERYTHING)


@pytest.fixture
def write_sources(tmp_path):
    """Writes {path: text} into a temporary tree and parses what lies under its top folders."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return load_sources(tmp_path, sorted({name.split("/")[0] for name in files}))

    return write


def test_there_are_sources(packages):
    assert {"automodel", "automodel_kernels", "automodel_kernels.tuning.table"} <= {each.module for each in packages}


RULES = ["import_cycles", "long_functions", "environment_reads", "prints", "misnamed_modules", "missing_docstrings"]


@pytest.mark.parametrize("rule", [*RULES, "missing_exports", "missing_annotations"])
def test_the_packages_keep_the_rule(packages, rule):
    assert getattr(house_rules, rule)(packages) == []


@pytest.mark.parametrize("rule", ["long_files", "misnamed_modules"])
def test_packages_tests_and_benches_keep_the_rule(everything, rule):
    assert getattr(house_rules, rule)(everything) == []


def test_kernels_import_neither_automodel_nor_transformers(packages):
    kernels = [each for each in packages if each.module.split(".")[0] == "automodel_kernels"]
    assert house_rules.forbidden_imports(kernels, names=["automodel", "transformers"]) == []


def test_only_models_and_the_tokenizer_import_transformers(packages):
    others = [
        each
        for each in packages
        if not f"{each.module}.".startswith("automodel.models.") and each.module != "automodel.data.tokenizer"
    ]
    assert house_rules.forbidden_imports(others, names=["transformers"]) == []


def test_every_kernel_has_a_test_and_a_bench():
    assert house_rules.kernels_without_proof(REPOSITORY) == []


def test_import_cycles_are_caught(write_sources):
    sources = write_sources(
        {
            "p/__init__.py": "",
            "p/a.py": "from p.b import x\n",
            "p/b.py": "try:\n    from . import c\nexcept ImportError:\n    pass\n",
            "p/c.py": "import p.a\n",
            "p/lazy.py": "def f():\n    from p import typed\n",
            "p/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.lazy\nimport p.lazy\n",
        }
    )
    assert house_rules.import_cycles(sources) == ["import cycle: p.a -> p.b -> p.c -> p.a"]


@pytest.mark.parametrize(
    "line",
    [
        "import transformers",
        "from transformers.models import mamba2",
        "def f():\n    import automodel.cli",
        "from automodel import config",
    ],
)
def test_forbidden_imports_are_caught(write_sources, line):
    sources = write_sources({"automodel_kernels/bad.py": f"import automodel_kernels\n{line}\n"})
    assert len(house_rules.forbidden_imports(sources, names=["automodel", "transformers"])) == 1


def test_long_files_are_caught(write_sources):
    sources = write_sources({"p/long.py": "x = 1\n" * 501, "p/short.py": "x = 1\n" * 500})
    assert house_rules.long_files(sources) == ["p/long.py:1: 501 lines"]


def test_long_functions_are_caught_and_neither_signatures_nor_docstrings_count(write_sources):
    body = "    x = 1\n"
    text = "def long():\n" + body * 61
    text += 'class C:\n    def fits(\n        self,\n    ):\n        """Says\n\n        much.\n        """\n'
    text += ("    " + body) * 60
    text += 'def empty():\n    """Says much."""\n'
    text += "@triton.jit\ndef kernel(x_ptr):\n" + body * 120
    text += "@triton.jit(noinline=True)\ndef long_kernel(x_ptr):\n" + body * 121
    found = house_rules.long_functions(write_sources({"p/a.py": text}))
    assert [line.split(": ")[1] for line in found] == ["long has 61 lines", "long_kernel has 121 lines"]


@pytest.mark.parametrize(
    "line",
    [
        "import os\nx = os.environ['HOME']",
        "import os\nx = os.getenv('HOME')",
        "import os\nx = 'HOME' in os.environ",
        "from os import environ",
        "import os\nos.environ['X'] = '1'",
        "def f():\n    import os\n    return os.environ.get('HOME')",
    ],
)
def test_environment_reads_are_caught(write_sources, line):
    sources = write_sources({"automodel/bad.py": line, "automodel/config/env.py": line})
    found = house_rules.environment_reads(sources)
    assert len(found) == 1
    assert found[0].startswith("automodel/bad.py:")


def test_the_seeding_module_may_write_the_environment_but_not_read_it(write_sources):
    write = "import os\nos.environ['X'] = '1'\nos.environ.setdefault('Y', '2')\n"
    sources = write_sources({"automodel/training/rng.py": write})
    assert house_rules.environment_reads(sources) == []
    sources = write_sources({"automodel/training/rng.py": write + "y = os.environ['X']\n"})
    assert house_rules.environment_reads(sources) == ["automodel/training/rng.py:4: uses os.environ"]


def test_prints_are_caught(write_sources):
    sources = write_sources({"automodel/data/a.py": "print(1)\n", "automodel/cli/main.py": "print(1)\n"})
    assert house_rules.prints(sources) == ["automodel/data/a.py:1: calls print"]


def test_vague_names_are_caught(write_sources):
    names = [
        "automodel/checkpoint/utils.py",
        "automodel/data/utils.py",
        "automodel/helpers/a.py",
        "automodel/_utils.py",
    ]
    found = house_rules.misnamed_modules(write_sources(dict.fromkeys(names, "")))
    assert sorted(line.split(":")[0] for line in found) == sorted(names[1:])


def test_missing_docstrings_and_exports_are_caught(write_sources):
    good = '"""Says what."""\n__all__ = ["x"]\nx = 1\n'
    bad = '"""Says what."""\nx = 1\n'
    names = {"p/__init__.py": bad, "p/__main__.py": bad, "p/_private.py": bad, "p/good.py": good, "p/bad.py": bad}
    sources = write_sources({**names, "p/silent.py": '__all__: list[str] = []\n"""Too late."""\n'})
    assert house_rules.missing_exports(sources) == ["p/bad.py:1: has no __all__"]
    assert house_rules.missing_docstrings(sources) == ["p/silent.py:1: has no docstring"]


def test_missing_annotations_are_caught_outside_jit_bodies(write_sources):
    text = """
@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    pass

class C:
    def __init__(self, x: int):
        pass

    def good(self, *args: int, y: int) -> None:
        pass

    def no_result(self):
        pass

def bare(x, *, y: int, **more) -> None:
    pass
"""
    found = house_rules.missing_annotations(write_sources({"p/a.py": text}))
    assert sorted(line.split(": ", 1)[1] for line in found) == [
        "bare lacks annotations: x, more",
        "no_result lacks annotations: its result",
    ]


def test_kernels_without_proof_are_caught(write_sources, tmp_path):
    jit = "import triton\n\n@triton.jit\ndef {}(x_ptr):\n    pass\n"
    kernel, part = jit.format("a_kernel"), jit.format("part")
    write_sources({"automodel_kernels/parts.py": part, "automodel_kernels/ssd/parts.py": part})
    assert house_rules.kernels_without_proof(tmp_path) == []
    write_sources({"automodel_kernels/norm.py": kernel, "automodel_kernels/ssd/scan.py": kernel})
    assert house_rules.kernels_without_proof(tmp_path) == [
        "automodel_kernels/norm.py:1: has no tests/kernels/**/test_norm*.py",
        "automodel_kernels/norm.py:1: has no bench/**/bench_norm*.py",
        "automodel_kernels/ssd/scan.py:1: has no tests/kernels/**/test_ssd*.py",
        "automodel_kernels/ssd/scan.py:1: has no bench/**/bench_ssd*.py",
    ]
    write_sources({f"tests/kernels/{name}.py": "" for name in ("test_norm", "test_ssd_op")})
    write_sources({f"bench/{name}.py": "" for name in ("bench_norm", "bench_ssd")})
    assert house_rules.kernels_without_proof(tmp_path) == []
