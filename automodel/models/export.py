"""Writing a model as the folder that transformers' `from_pretrained` reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging as transformers_logging

__all__ = ["save_for_transformers"]


def save_for_transformers(
    model: Any, tokenizer: Any, directory: Path, *, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write configuration, generation configuration, weights and, where there is one, the tokenizer.

    Training switches `use_cache` off; the written configuration has it on, since generating needs it.

    Args:
        model: A transformers model; it is not changed. One that is sharded over several ranks is written by rank zero.
        tokenizer: A transformers tokenizer, or None.
        directory: The folder; made where it does not exist.
        state_dict: The model's state, whole tensors under all of their names; None: the model's own.

    Raises:
        OSError: a file cannot be written.
    """
    text_config = model.config.get_text_config()
    use_cache = getattr(text_config, "use_cache", None)
    had_bar = transformers_logging.is_progress_bar_enabled()
    # The bar would be drawn over the line that shows the training's progress.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        if use_cache is not None:
            text_config.use_cache = True
        # A copy, since it is emptied while it is written.
        model.save_pretrained(directory, state_dict=None if state_dict is None else dict(state_dict))
    finally:
        if use_cache is not None:
            text_config.use_cache = use_cache
        if had_bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
