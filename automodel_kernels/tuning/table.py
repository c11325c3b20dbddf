"""The tuned winners that ship: data in the folder `autotune_cache`, beside the package; its README has the schema.

Reading is strict, and what is wrong is passed over with a warning: a table saves time and must never stop a launch.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from automodel_kernels.hardware import Device
    from automodel_kernels.tuning.keys import KeyValue

__all__ = ["SCHEMA", "Entry", "read_table", "shipped_tables", "table_name", "write_table"]

logger = logging.getLogger(__name__)

SCHEMA = 1

_ENTRY_TYPES: Mapping[str, tuple[type, ...]] = {
    "key": (dict,),
    "config": (str,),
    "milliseconds": (int, float),
    "static_milliseconds": (int, float, type(None)),
    "bit_exact": (bool,),
    "date": (str,),
    "torch": (str,),
    "triton": (str,),
    "driver": (str,),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One winner.

    Attributes:
        key: the launch's key, as it stands in files.
        config: the configuration's label.
        milliseconds: median time of a launch.
        static_milliseconds: that of the static choice; None if it does not run there.
        bit_exact: whether the outputs have the bits of the static choice's.
        date: of the measurement, as 2026-01-31.
        torch: its version.
        triton: its version.
        driver: version of the GPU's driver.
    """

    key: Mapping[str, KeyValue]
    config: str
    milliseconds: float
    static_milliseconds: float | None
    bit_exact: bool
    date: str
    torch: str
    triton: str
    driver: str


def shipped_tables() -> Path:
    """The folder with one sub-folder per device, which holds one JSON file per kernel.

    It lies beside the package `automodel_kernels`, both in a checkout and in an installed wheel.

    Raises:
        FileNotFoundError: the folder is not there; names the path.
    """
    folder = Path(__file__).resolve().parents[2] / "autotune_cache"
    if not folder.is_dir():
        raise FileNotFoundError(f"the shipped tuning tables are missing: {folder} is not a folder")
    return folder


def table_name(kernel: str) -> str:
    """The file of a kernel in a device's folder: `row_squared_norms.json` for `...:row_squared_norms_kernel`.

    Args:
        kernel: `module:name` of the function.
    """
    return f"{kernel.rpartition(':')[2].removesuffix('_kernel')}.json"


def read_table(
    folder: Path, *, device: Device, kernel: str, problem: Callable[[Mapping[str, KeyValue], str], str]
) -> list[Entry]:
    """The winners of a kernel on a device; what is wrong is left out, each with a warning that names the file.

    Args:
        folder: with one sub-folder per device.
        device: the GPU; a table of one with other limits under the same name does not count.
        kernel: `module:name` of the function.
        problem: in a line what is wrong with a key and a configuration's label for the live kernel; empty if nothing.
    """
    path = folder / device.slug / table_name(kernel)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _check_header(content, device=device, kernel=kernel)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        logger.warning("the tuned configurations in %s are ignored: %s", path, error)
        return []
    entries = []
    for number, fields in enumerate(content["entries"]):
        try:
            entry = _entry(fields)
            wrong = problem(entry.key, entry.config)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            logger.warning("entry %d in %s is ignored: %s", number, path, wrong)
        else:
            entries.append(entry)
    return entries


def _check_header(content: Any, *, device: Device, kernel: str) -> None:
    if not isinstance(content, dict) or content.keys() != {"schema", "device", "kernel", "entries"}:
        raise ValueError("it must hold schema, device, kernel and entries")
    if content["schema"] != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {content['schema']!r}")
    want = _device_fields(device)
    if content["device"] != want:
        raise ValueError(f"device must be {want}, got {content['device']!r}")
    if content["kernel"] != kernel:
        raise ValueError(f"kernel must be {kernel!r}, got {content['kernel']!r}")
    if not isinstance(content["entries"], list):
        raise ValueError(f"entries must be a list, got {content['entries']!r}")


def _entry(fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_TYPES.keys():
        raise ValueError(f"it must hold {', '.join(_ENTRY_TYPES)}, got {fields!r}")
    for name, types in _ENTRY_TYPES.items():
        value = fields[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{name} has the wrong type, got {value!r}")
    for name in ("milliseconds", "static_milliseconds"):
        if fields[name] is not None and not fields[name] > 0:
            raise ValueError(f"{name} must be positive, got {fields[name]!r}")
    return Entry(**fields)


def _device_fields(device: Device) -> dict[str, Any]:
    return {"name": device.name, "sm_count": device.sm_count, "shared_memory": device.shared_memory}


def write_table(folder: Path, *, device: Device, kernel: str, entries: Sequence[Entry]) -> Path:
    """Writes the table of a kernel on a device in place of a former one; returns its path.

    Args:
        folder: with one sub-folder per device; made if it is not there.
        device: the GPU that the winners were measured on.
        kernel: `module:name` of the function.
        entries: one per key.

    Raises:
        ValueError: two entries have the same key.
        OSError: the file could not be written; a former one is as it was.
    """
    lines = sorted(json.dumps(asdict(entry)) for entry in entries)
    keys = [json.dumps(dict(entry.key), sort_keys=True) for entry in entries]
    if len(set(keys)) < len(keys):
        raise ValueError(f"entries must have different keys, got {sorted(keys)}")
    path = folder / device.slug / table_name(kernel)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"schema": SCHEMA, "device": _device_fields(device), "kernel": kernel}
    text = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in header.items())
    text = "{\n" + text + ' "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n ]\n}\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
