"""The facts that a bug report needs: versions, devices, CPU features, cache roots and redacted variables.

Nothing here imports torch, transformers or numpy: versions come from package metadata, devices from the vendor's
tool, CPU features from the kernel.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["collect_environment", "flatten_environment"]

_REQUIRED_PACKAGES = ("automodel", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyyaml")
_OPTIONAL_PACKAGES = (
    "huggingface-hub",
    "torchdata",
    "torchao",
    "flash-attn",
    "flash-linear-attention",
    "mamba-ssm",
    "causal-conv1d",
    "deep-ep",
    "liger-kernel",
    "transformer-engine",
    "nemo-automodel",
    "wandb",
    "matplotlib",
)
_CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
)
_BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
_VARIABLE_PREFIXES = (
    "AUTOMODEL_",
    "NEMO_",
    "HF_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "TRITON_",
    "TORCH",
    "PYTORCH_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "CUBLAS_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "OMP_",
    "KMP_",
    "MKL_",
    "SLURM_",
    "HYBRID_EP_",
)
_VARIABLE_NAMES = (
    "XDG_CACHE_HOME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "MALLOC_ARENA_MAX",
)
_SECRET_WORDS = frozenset(
    {"TOKEN", "TOKENS", "KEY", "KEYS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"}
    | {"AUTH", "JWT", "COOKIE"}
)
# In https://ghp_abc@host the user is the secret.
_LONE_URL_USER = re.compile(r"(?<=://)[^\s/@:]+(?=@)")
_TOOL_SECONDS = 5.0


def collect_environment() -> dict[str, dict[str, str]]:
    """Gather what a bug report needs, by section.

    The sections are versions, python, platform, devices, cpu, caches and environment. Whatever cannot be found out is
    a line that says so, never an exception. Values of variables whose names look secret are replaced, and passwords
    inside URLs are masked.
    """
    return {
        "versions": _collect_versions(),
        "python": _collect_python(),
        "platform": _collect_platform(),
        "devices": _collect_devices(),
        "cpu": _collect_cpu(),
        "caches": _collect_caches(),
        "environment": _collect_variables(),
    }


def flatten_environment(sections: dict[str, dict[str, str]]) -> dict[str, str]:
    """The sections as one table, each name led by its section: "versions: torch", "cpu: model"."""
    return {f"{section}: {name}": value for section, values in sections.items() for name, value in values.items()}


def _collect_versions() -> dict[str, str]:
    """Versions of our packages and of those that matter to them, without importing them."""
    versions: dict[str, str] = {}
    for name in _REQUIRED_PACKAGES:
        versions[name] = _version(name) or "not installed"
        if name == "torch":
            versions["torch built for"] = _torch_build()
    for name in _OPTIONAL_PACKAGES:
        version = _version(name)
        if version is not None:
            versions[name] = version
    return versions


def _version(package: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    """Which accelerator torch was built for, read from the text of torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "unknown: torch is not installed"
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    text = _read_text(path)
    if text is None:
        return f"unknown: {path} cannot be read"
    builds = []
    for label, variable in (("CUDA", "cuda"), ("ROCm", "hip"), ("XPU", "xpu")):
        match = re.search(rf"^{variable}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match is not None:
            builds.append(f"{label} {match.group(1)}")
    return ", ".join(builds) or "CPU"


def _collect_python() -> dict[str, str]:
    """The interpreter and where it lives."""
    return {
        "version": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable or "unknown",
        "prefix": sys.prefix,
    }


def _collect_platform() -> dict[str, str]:
    """Operating system, kernel, architecture and C library."""
    library, library_version = platform.libc_ver()
    return {
        "system": _distribution_name() or platform.system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": f"{library} {library_version}".strip() or "unknown",
    }


def _distribution_name() -> str | None:
    """The pretty name of the Linux distribution."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _collect_devices() -> dict[str, str]:
    """The GPUs that the vendors' tools list."""
    devices: dict[str, str] = {}
    nvidia = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    for command in (nvidia, ["rocm-smi", "--showproductname", "--csv"]):
        if shutil.which(command[0]) is None:
            continue
        lines, problem = _run_tool(command)
        if problem is not None:
            devices[command[0]] = problem
        elif command is nvidia:
            for index, line in enumerate(lines):
                devices[f"gpu {index}"] = _describe_nvidia(line)
        else:
            # The first line of the CSV names the columns.
            for index, line in enumerate(lines[1:]):
                devices[f"amd gpu {index}"] = line.replace(",", ", ")
    return devices or {"gpu": "none found (neither nvidia-smi nor rocm-smi lists one)"}


def _describe_nvidia(line: str) -> str:
    """Name, memory and driver from a line of nvidia-smi."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3:
        return line
    name, driver, memory = parts
    return f"{name}, {memory}, driver {driver}"


def _run_tool(command: list[str]) -> tuple[list[str], str | None]:
    """The lines a program prints, or what went wrong."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"gave no answer within {_TOOL_SECONDS:.0f} s"
    except OSError as error:
        return [], f"cannot be run: {error}"
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if result.returncode != 0:
        said = (result.stderr.strip().splitlines() or lines or ["nothing"])[0]
        return [], f"failed with status {result.returncode}: {said}"
    return lines, None


def _collect_cpu() -> dict[str, str]:
    """Model, cores, memory and the instruction sets that matter here."""
    text = _read_text(Path("/proc/cpuinfo")) or ""
    flags = _cpu_flags(text)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "model": _cpu_model(text),
        "cores": f"{os.cpu_count() or 'unknown'} logical, {usable or 'unknown'} usable by this process",
        "memory": _describe_memory(),
    }
    limits = _control_group_limits()
    if limits:
        facts["container limits"] = limits
    facts["features"] = " ".join(name for name in _CPU_FEATURES if name in flags) or "unknown"
    bf16 = [name for name in _BF16_FEATURES if name in flags]
    facts["bf16 in hardware"] = f"yes ({', '.join(bf16)})" if bf16 else "no" if flags else "unknown"
    return facts


def _cpu_model(text: str) -> str:
    """The CPU's name from the text of /proc/cpuinfo, else what the platform says."""
    match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine() or "unknown"


def _cpu_flags(text: str) -> frozenset[str]:
    """The feature flags of the first CPU in the text of /proc/cpuinfo (x86 says flags, Arm says Features)."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def _describe_memory() -> str:
    """Total and available RAM."""
    text = _read_text(Path("/proc/meminfo")) or ""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" not in sizes:
        return "unknown"
    available = f", {_gib(sizes['MemAvailable'])} available" if "MemAvailable" in sizes else ""
    return f"{_gib(sizes['MemTotal'])}{available}"


def _control_group_limits() -> str:
    """CPU and memory limits that a container sets, empty when there are none."""
    limits = []
    quota = (_read_text(Path("/sys/fs/cgroup/cpu.max")) or "").split()
    if len(quota) == 2 and all(part.isdigit() for part in quota):
        limits.append(f"{int(quota[0]) / int(quota[1]):.3g} CPUs")
    memory = (_read_text(Path("/sys/fs/cgroup/memory.max")) or "").strip()
    if memory.isdigit():
        limits.append(f"{_gib(int(memory))} memory")
    return ", ".join(limits)


def _collect_caches() -> dict[str, str]:
    """Where this project and the tools below it keep their caches, by their documented variables and defaults."""
    from automodel.caches.roots import cache_root

    home = Path("~").expanduser()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hugging_face = Path(os.environ.get("HF_HOME") or user_cache / "huggingface")
    roots = {
        "automodel": cache_root(),
        "triton": Path(
            os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache"
        ),
        "torch inductor": Path(
            os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{_user_name()}"
        ),
        "hugging face hub": Path(os.environ.get("HF_HUB_CACHE") or hugging_face / "hub"),
    }
    if os.environ.get("NEMO_HYBRIDEP_JIT_CACHE"):
        roots["hybrid ep"] = Path(os.environ["NEMO_HYBRIDEP_JIT_CACHE"])
    return {name: _describe_root(path.expanduser()) for name, path in roots.items()}


def _user_name() -> str:
    """The user's login name, as torch writes it into its cache path."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


def _describe_root(path: Path) -> str:
    """A cache folder, whether it exists and can be written, and the room left where it lies."""
    if not path.is_dir():
        return f"{path} (not there yet)"
    access = "" if os.access(path, os.W_OK) else "read-only, "
    try:
        return f"{path} ({access}{_gib(shutil.disk_usage(path).free)} free)"
    except OSError as error:
        return f"{path} ({access}free space unknown: {error})"


def _collect_variables() -> dict[str, str]:
    """The environment variables that change what a run does, secrets redacted."""
    from automodel.config.redact import REDACTED, is_sensitive_key, redact_text

    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES
    }
    return {
        name: REDACTED
        if _is_secret(name) or is_sensitive_key(name)
        else _LONE_URL_USER.sub(REDACTED, redact_text(value))
        for name, value in variables.items()
    }


def _is_secret(name: str) -> bool:
    """Whether the name of a variable alone is reason enough to hide its value.

    Stricter than the rule for recipe keys: here nothing is lost when a harmless value is hidden.
    """
    return not _SECRET_WORDS.isdisjoint(name.upper().split("_"))


def _gib(size: int) -> str:
    """Bytes as GiB with one decimal."""
    return f"{size / 2**30:.1f} GiB"


def _read_text(path: Path) -> str | None:
    """The text of a file, None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
