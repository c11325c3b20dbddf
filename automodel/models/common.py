"""Options of the reference system's own model classes, accepted so that its recipes load."""

from typing import Any

__all__ = ["BackendConfig"]


class BackendConfig:
    """The choice of kernels inside the reference system's custom models, kept for the log only.

    Models here are those of transformers, which take no such options; the model classes say so when they are given.
    """

    def __init__(self, **options: Any) -> None:
        """Keep the options, whatever they are."""
        self.options = options

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"BackendConfig({settings})"
