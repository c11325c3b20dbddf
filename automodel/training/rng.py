"""Random state: one seed for Python, NumPy and torch, saved and restored with every checkpoint."""

import hashlib
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from automodel.config.sections import refuse, setting

__all__ = ["RngConfig", "StatefulRNG", "enable_determinism"]

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RngConfig:
    """Recipe section `rng`; the older top-level key `seed` sets `rng.seed`."""

    seed: int = setting(42, "seed of model initialisation, dropout and data order")
    ranked: bool = setting(False, "add the rank to the seed, so that ranks draw different numbers")

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise refuse("rng.seed", self.seed, "between 0 and 4294967295")


class StatefulRNG:
    """Seeds the global generators of Python, NumPy and torch, and carries their state (of devices: the one in use)."""

    def __init__(self, seed: int = 42, ranked: bool = False, *, rank: int = 0) -> None:
        """Seed the generators with `seed`, or with `seed + rank` when `ranked`."""
        _seed_all((seed + rank if ranked else seed) % 2**32)

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator, as tensors and plain Python values only."""
        version, internal, gauss = random.getstate()
        numpy_state = numpy.random.get_state(legacy=False)
        return {
            "version": STATE_VERSION,
            "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
            "numpy": {
                "name": str(numpy_state["bit_generator"]),
                "keys": torch.from_numpy(numpy_state["state"]["key"].astype(numpy.int64)),
                "position": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "gauss": float(numpy_state["gauss"]),
            },
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators.

        Raises:
            ValueError: the state is of a newer version.
        """
        _check_version(state)
        python, np_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
        keys = np_state["keys"].numpy().astype(numpy.uint32)
        numpy.random.set_state((np_state["name"], keys, np_state["position"], np_state["has_gauss"], np_state["gauss"]))
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            # One state, of the device in use, whatever its number is now; older checkpoints hold those of all devices.
            states, device = state["cuda"], torch.cuda.current_device()
            torch.cuda.set_rng_state(states[device if device < len(states) else 0])

    def load_state_of_rank_zero(self, state: dict[str, Any], *, rank: int) -> None:
        """Seed the generators of a rank that has no saved state, from that of rank zero and its own number.

        What it draws is decided by the two alone, and differs from what rank zero and other such ranks draw.

        Raises:
            ValueError: the state is of a newer version.
        """
        _check_version(state)
        digest = hashlib.sha256(rank.to_bytes(8, "little"))
        for generator in (state["torch"], *state["cuda"]):
            digest.update(generator.numpy().tobytes())
        _seed_all(int.from_bytes(digest.digest()[:4], "little"))


def enable_determinism() -> None:
    """Allow deterministic algorithms only; an operation that has none raises RuntimeError when it runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _seed_all(value: int) -> None:
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


def _check_version(state: dict[str, Any]) -> None:
    if state["version"] > STATE_VERSION:
        raise ValueError(f"the random state has version {state['version']}, newer than {STATE_VERSION}")
