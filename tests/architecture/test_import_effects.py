"""Importing a module of ours reads no environment, touches no GPU and opens no file; the watcher catches who does."""

import os
import subprocess
import sys

import import_effects
from house_rules import PACKAGES, REPOSITORY


def accesses(root, *packages):
    command = [sys.executable, import_effects.__file__, str(root), *packages]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_our_modules_has_no_effects():
    assert accesses(REPOSITORY, *PACKAGES) == []


def test_effects_at_import_are_caught(tmp_path):
    package = tmp_path / "naughty"
    files = {
        "__init__.py": "import os\nhome = os.environ.get('HOME')\n",
        "contains.py": "import os\nx = 'X' in os.environ\n",
        "getenv.py": "from os import getenv\nx = getenv('HOME')\n",
        "whole.py": "import os\nx = dict(os.environ)\n",
        "sets.py": "import os\nos.environ['NAUGHTY'] = '1'\n",
        "gpu.py": "import torch\nx = torch.cuda.is_available()\n",
        "starts.py": "import torch\ntry:\n    torch.zeros(1, device='cuda')\nexcept Exception:\n    pass\n",
        "driver.py": "import triton\ntry:\n    triton.runtime.driver.active\nexcept RuntimeError:\n    pass\n",
        "sub/__init__.py": "",
        "sub/reads.py": "from pathlib import Path\nx = Path(__file__).read_text()\n",
        "sub/kernel.py": "import triton\n\n\n@triton.jit\ndef k(x_ptr):\n    pass\n",
        "__main__.py": "raise SystemExit('is not imported')\n",
    }
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = accesses(tmp_path, "naughty")
    expected = {
        "__init__.py:2: reads the environment variable HOME",
        "contains.py:2: reads the environment variable X",
        "getenv.py:2: reads the environment variable HOME",
        "whole.py:2: reads the whole environment",
        "sets.py:2: sets the environment variable NAUGHTY",
        "gpu.py:2: calls torch.cuda.is_available",
        "driver.py:3: asks Triton for its active driver",
        f"sub/reads.py:2: open {str(package / 'sub/reads.py')!r}",
    }
    relative = {line.removeprefix(f"{package}{os.sep}") for line in found}
    assert expected <= relative
    assert any("calls torch.cuda._lazy_init" in line for line in found)
    assert not any("kernel.py" in line for line in relative)
