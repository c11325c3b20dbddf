"""Train hybrid language models from a YAML recipe.

The two model classes are imported on first use, so that `import automodel` loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from automodel._version import __version__

if TYPE_CHECKING:
    from automodel.models.auto import NeMoAutoConfig, NeMoAutoModelForCausalLM

__all__ = ["NeMoAutoConfig", "NeMoAutoModelForCausalLM", "__version__"]

_LAZY = {
    "NeMoAutoConfig": "automodel.models.auto",
    "NeMoAutoModelForCausalLM": "automodel.models.auto",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
