"""What `automodel env` collects and prints, in real processes with real tools on PATH."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from automodel.observe.environment import collect_environment, flatten_environment

RUN_ENV = (
    "import argparse, json, sys\n"
    "from automodel.cli.env import add_arguments, run\n"
    "parser = argparse.ArgumentParser()\n"
    "add_arguments(parser)\n"
    "status = run(parser.parse_args(sys.argv[1:]))\n"
    "heavy = {'torch', 'transformers', 'numpy', 'triton'} & set(sys.modules)\n"
    "assert not heavy, heavy\n"
    "sys.exit(status)\n"
)
SECTIONS = ["versions", "python", "platform", "devices", "cpu", "caches", "environment"]


def run_env(*arguments: str, **variables: str) -> str:
    """What `automodel env` prints in a fresh process with these variables; the process checks what it imported."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | variables
    result = subprocess.run(
        [sys.executable, "-c", RUN_ENV, *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def collect(**variables: str) -> dict[str, dict[str, str]]:
    return json.loads(run_env("--json", **variables))


@pytest.fixture
def tool(tmp_path):
    """Puts a program of some name, written in sh, first on PATH; returns that PATH."""

    def install(name: str, script: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return f"{folder}:/usr/bin:/bin"

    return install


def test_sections_and_versions_without_heavy_imports():
    sections = collect()
    assert list(sections) == SECTIONS
    assert sections["versions"]["torch"] == version("torch")
    assert sections["versions"]["transformers"] == version("transformers")
    assert sections["python"]["version"].startswith(platform.python_version())
    assert sections["platform"]["architecture"] == platform.machine()
    assert all(isinstance(value, str) for values in sections.values() for value in values.values())


def test_the_build_of_the_installed_torch_is_known():
    build = collect()["versions"]["torch built for"]
    assert build.startswith(("CPU", "CUDA ", "ROCm ", "XPU "))
    assert build == "CPU" or not version("torch").endswith("+cpu")


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0"),
        ("cuda = None\nhip = '7.1.2'\n", "ROCm 7.1.2"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
    ],
)
def test_builds_of_torch(tmp_path, text, build):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    assert collect(PYTHONPATH=str(tmp_path))["versions"]["torch built for"] == build


def test_gpus_are_listed_by_nvidia_smi(tool):
    path = tool("nvidia-smi", 'echo "NVIDIA H200, 570.86.15, 143771 MiB"; echo "NVIDIA H200, 570.86.15, 143771 MiB"')
    gpu = "NVIDIA H200, 143771 MiB, driver 570.86.15"
    assert collect(PATH=path)["devices"] == {"gpu 0": gpu, "gpu 1": gpu}


def test_gpus_are_listed_by_rocm_smi(tool):
    path = tool("rocm-smi", 'echo "device,Card Series"; echo "card0,AMD Instinct MI300X"')
    assert collect(PATH=path)["devices"]["amd gpu 0"] == "card0, AMD Instinct MI300X"


def test_a_failing_tool_is_a_line(tool):
    path = tool("nvidia-smi", 'echo "NVIDIA-SMI has failed: no driver" >&2; exit 9')
    assert collect(PATH=path)["devices"] == {"nvidia-smi": "failed with status 9: NVIDIA-SMI has failed: no driver"}
    program = Path(path.split(":")[0]) / "nvidia-smi"
    program.write_text("#!/no/such/interpreter\n")
    assert collect(PATH=path)["devices"]["nvidia-smi"].startswith("cannot be run: ")


def test_a_machine_without_gpus_says_so(tmp_path):
    assert list(collect(PATH=str(tmp_path))["devices"]) == ["gpu"]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_cpu_facts():
    cpu = collect()["cpu"]
    assert f"{len(os.sched_getaffinity(0))} usable" in cpu["cores"]
    assert "GiB" in cpu["memory"]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert set(cpu["features"].split()) - {"unknown"} <= flags
    assert ("avx2" in cpu["features"].split()) == ("avx2" in flags)


def test_cache_roots_follow_the_documented_variables(tmp_path):
    (tmp_path / "triton").mkdir()
    caches = collect(
        AUTOMODEL_CACHE=str(tmp_path / "ours"),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        HF_HOME=str(tmp_path / "hf"),
    )["caches"]
    assert caches["automodel"] == f"{tmp_path}/ours (not there yet)"
    assert caches["triton"].startswith(f"{tmp_path}/triton (")
    assert caches["triton"].endswith(" GiB free)")
    assert caches["torch inductor"].startswith(f"{tmp_path}/inductor ")
    assert caches["hugging face hub"].startswith(f"{tmp_path}/hf/hub ")
    assert not (tmp_path / "ours").exists()


def test_cache_roots_have_the_documented_defaults(tmp_path):
    caches = collect(HOME=str(tmp_path), USER="me/you", TMPDIR="/tmp")["caches"]
    assert caches["triton"] == f"{tmp_path}/.triton/cache (not there yet)"
    assert caches["hugging face hub"] == f"{tmp_path}/.cache/huggingface/hub (not there yet)"
    assert caches["torch inductor"].startswith("/tmp/torchinductor_me_you")


def test_variables_that_matter_are_shown_and_secrets_are_not():
    secrets = {
        "HF_TOKEN": "hunter-1",
        "HUGGING_FACE_HUB_TOKEN": "hunter-2",
        "SLURM_JWT": "hunter-3",
        "AUTOMODEL_DB_PASSWORD": "hunter-4",
        "NEMO_API_KEY": "hunter-5",
        "HF_ENDPOINT": "https://me:hunter-6@hub.example/x",
        "AUTOMODEL_REMOTE": "https://hunter-7@git.example",
        "TORCHX_AUTH": "hunter-8",
        "AWS_SECRET_ACCESS_KEY": "hunter-9",
    }
    plain = {"TOKENIZERS_PARALLELISM": "false", "RANK": "3", "NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "x:True"}
    output = run_env("--json", **secrets, **plain)
    assert "hunter" not in output
    assert "hunter" not in run_env(**secrets, **plain)
    shown = json.loads(output)["environment"]
    assert plain.items() <= shown.items()
    assert shown["HF_TOKEN"] == "<redacted>"
    assert shown["HF_ENDPOINT"] == "https://me:<redacted>@hub.example/x"
    assert "AWS_SECRET_ACCESS_KEY" not in shown
    assert "HOME" not in shown


def test_the_table_is_aligned_and_survives_control_characters():
    output = run_env(NCCL_DEBUG="INFO\n\x1b[31mred", SLURM_JOB_ID="7")
    lines = output.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == SECTIONS
    assert "  NCCL_DEBUG    INFO\\n\\x1b[31mred" in lines
    assert "  SLURM_JOB_ID  7" in lines


def test_an_empty_environment_section_says_so():
    assert run_env().rstrip().endswith("environment\n  (nothing)")


def test_flattening_names_the_section():
    assert flatten_environment({"cpu": {"model": "x"}, "python": {"version": "3"}}) == {
        "cpu: model": "x",
        "python: version": "3",
    }
    assert list(collect_environment()) == SECTIONS
