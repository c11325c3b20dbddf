"""What Slurm's variables mean: lists of nodes, tasks per node, and a port that the ranks of a job can agree on."""

import re
from itertools import product

__all__ = ["derive_port", "expand_nodelist", "tasks_on_node"]

_FIRST_PORT = 15_000
_PORTS = 15_000  # below 32768, where the ports begin that systems hand out by themselves


def expand_nodelist(text: str) -> list[str]:
    """Return the hosts of a list such as `login,node[001-003,7],rack[1-2]n[1-2]`, in its order.

    Raises:
        ValueError: a bracket does not close, or a range is none.
    """
    return [host for part in _split_outside_brackets(text) for host in _expand_name(part, text)]


def tasks_on_node(text: str, *, node: int) -> int | None:
    """Return the tasks of the node with number `node` in a list such as `4(x2),3`; None where it has none.

    Raises:
        ValueError: the text is no such list.
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE must be like 4(x2),3, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def derive_port(job: int, *, step: int) -> int:
    """Return a port that follows from the numbers of a job and of its step, so that the ranks need not agree on one."""
    return _FIRST_PORT + (job + 7 * step) % _PORTS


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _expand_name(name: str, text: str) -> list[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", name)
    if any("[" in piece or "]" in piece for piece in pieces):
        raise ValueError(f"the list of nodes {text!r} has a bracket without its partner")
    # Literal text and the contents of brackets alternate.
    choices = [_expand_ranges(piece, text) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(parts) for parts in product(*choices)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"the list of nodes {text!r} holds {item!r}, which is no number and no range")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
