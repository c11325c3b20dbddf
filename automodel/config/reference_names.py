"""The names that recipes of the reference system use, and ours."""

import importlib.util
import sys

__all__ = ["STAND_INS", "translate_name"]

_REFERENCE_PACKAGE = "nemo_automodel"

_TRANSLATIONS = {
    "nemo_automodel": "automodel",
    "nemo_automodel._transformers": "automodel",
    "nemo_automodel._transformers.auto_model": "automodel",
    "nemo_automodel.components": "automodel",
    "nemo_automodel.components._peft": "automodel.peft",
    "nemo_automodel.components.checkpoint": "automodel.checkpoint",
    "nemo_automodel.components.datasets": "automodel.data",
    "nemo_automodel.components.datasets.llm": "automodel.data",
    "nemo_automodel.components.datasets.llm.chat_dataset": "automodel.data.chat",
    "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset": "automodel.data.column_mapped",
    "nemo_automodel.components.datasets.llm.packed_sequence": "automodel.data.packing",
    "nemo_automodel.components.datasets.utils": "automodel.data.collate",
    "nemo_automodel.components.datasets.vlm": "automodel.data",
    "nemo_automodel.components.loss": "automodel.training.loss",
    "nemo_automodel.components.loss.masked_ce": "automodel.training.loss",
    "nemo_automodel.components.optim": "automodel.training.optim",
    "nemo_automodel.components.optim.scheduler": "automodel.training.optim",
    "nemo_automodel.recipes.llm.benchmark": "automodel.recipes.benchmark",
    "nemo_automodel.recipes.llm.train_ft": "automodel.recipes.llm",
    "nemo_automodel.recipes.vlm.finetune": "automodel.recipes.vlm",
}
"""Modules of the reference system and ours. What stands below a module keeps its name; the longest prefix counts."""

STAND_INS = {"torchdata.stateful_dataloader.StatefulDataLoader": "automodel.data.loader.StatefulDataLoader"}
"""Classes of other packages in whose place ours is used: the same role and arguments, but exact resumption."""


def translate_name(target: str) -> str | None:
    """Return our name for a name of the reference system; None for any other name, and where that is installed."""
    if target.partition(".")[0] != _REFERENCE_PACKAGE or _is_installed():
        return None
    theirs = target
    while theirs not in _TRANSLATIONS:
        theirs = theirs.rpartition(".")[0]
    return _TRANSLATIONS[theirs] + target.removeprefix(theirs)


def _is_installed() -> bool:
    return _REFERENCE_PACKAGE in sys.modules or importlib.util.find_spec(_REFERENCE_PACKAGE) is not None
