"""The package itself: light to import, with the two model classes on demand."""

import subprocess
import sys

import pytest

import automodel
from automodel._version import __version__


def test_version():
    assert automodel.__version__ == __version__


def test_import_loads_no_heavy_package():
    script = (
        "import sys, automodel\n"
        "dir(automodel), automodel.__version__\n"
        "heavy = {'torch', 'transformers', 'numpy', 'triton'} & set(sys.modules)\n"
        "raise SystemExit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lazy_names():
    from automodel.models.auto import NeMoAutoConfig, NeMoAutoModelForCausalLM

    assert automodel.NeMoAutoConfig is NeMoAutoConfig
    assert automodel.NeMoAutoModelForCausalLM is NeMoAutoModelForCausalLM
    assert {"NeMoAutoConfig", "NeMoAutoModelForCausalLM", "__version__"} <= set(dir(automodel))


def test_an_unknown_name():
    with pytest.raises(AttributeError, match=r"module 'automodel' has no attribute 'Nope'"):
        automodel.Nope  # noqa: B018
