"""Every section that a recipe may hold: what it is for, who owns it, and a description of it for people.

The owners of sections are named and imported when they are needed, since some of them import torch.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_type_hints

from automodel.config.descriptions import SettingDescription, describe_settings, spell_type
from automodel.config.loader import resolve_target
from automodel.config.names import did_you_mean
from automodel.config.printing import printable_keys
from automodel.recipes.planned_sections import PLANNED_SECTIONS, PlannedSection
from automodel.recipes.reference_keys import REFERENCE_KEYS

__all__ = [
    "KNOWN_SECTIONS",
    "METADATA_SECTIONS",
    "RECIPE_CLASSES",
    "SETTINGS_SECTIONS",
    "TARGET_SECTIONS",
    "VALUE_SECTIONS",
    "SectionDescription",
    "SettingsSection",
    "TargetDescription",
    "TargetSection",
    "describe_section",
    "find_section",
    "is_metadata",
]

RECIPE_CLASSES: dict[str, str | None] = {
    "TrainFinetuneRecipeForNextTokenPrediction": "automodel.recipes.llm.TrainFinetuneRecipeForNextTokenPrediction",
    "BenchmarkingRecipeForNextTokenPrediction": None,
    "FinetuneRecipeForVLM": None,
    "KnowledgeDistillationRecipeForNextTokenPrediction": None,
    "TrainFinetuneRecipeForSequenceClassification": None,
    "TrainBiEncoderRecipe": None,
    "TrainBiencoderRecipe": None,
    "TrainCrossEncoderRecipe": None,
}
"""Recipe classes by their bare names; None: known, not built yet."""


@dataclass(frozen=True, kw_only=True)
class SettingsSection:
    """A section with a fixed schema.

    Attributes:
        name: Its name.
        help: One line.
        owner: The dotted name of its dataclass.
        optional: Whether it does nothing where the recipe leaves it out, or has null or false for it; otherwise a
            section that is left out has its defaults.
    """

    name: str
    help: str
    owner: str
    optional: bool = False

    def section_class(self) -> type[Any]:
        """Import the dataclass."""
        module, _, name = self.owner.rpartition(".")
        found: type[Any] = getattr(import_module(module), name)
        return found


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    """A section whose `_target_` names what to call; its other keys are the arguments.

    Attributes:
        name: Its name.
        help: One line.
        targets: The targets that are shipped, and a line on each; any other callable may be named as well.
        provided: Arguments that the recipe passes to the target itself.
        required: Whether a recipe needs the section.
        default_target: What a section without a `_target_` calls; None: it needs one.
    """

    name: str
    help: str
    targets: Mapping[str, str]
    provided: tuple[str, ...] = ()
    required: bool = False
    default_target: str | None = None


_SETTINGS = (
    SettingsSection(
        name="step_scheduler",
        help="batch sizes, length of the run, and when to validate and save",
        owner="automodel.training.step_scheduler.StepSchedulerConfig",
    ),
    SettingsSection(
        name="distributed",
        help="how processes share the work",
        owner="automodel.distributed.config.DistributedConfig",
    ),
    SettingsSection(name="dist_env", help="the process group", owner="automodel.distributed.config.DistEnvConfig"),
    SettingsSection(
        name="checkpoint",
        help="where checkpoints go, which are kept, and which one a run starts from",
        owner="automodel.checkpoint.store.CheckpointConfig",
    ),
    SettingsSection(name="rng", help="random numbers", owner="automodel.training.rng.RngConfig"),
    SettingsSection(
        name="lr_scheduler",
        help="the learning rate over time: a linear warm-up to optimizer.lr, then a decay to min_lr",
        owner="automodel.training.optim.LrSchedulerConfig",
    ),
    SettingsSection(
        name="clip_grad_norm", help="clipping of gradients", owner="automodel.training.optim.ClipGradNormConfig"
    ),
    SettingsSection(
        name="embedding_row_repair",
        help="repair of near-zero and non-finite rows of the input embedding; left out, there is none",
        owner="automodel.training.embedding_row_repair.EmbeddingRowRepairConfig",
        optional=True,
    ),
    SettingsSection(
        name="kernels",
        help="how the model's kernels get their configurations",
        owner="automodel.models.kernels.KernelsConfig",
    ),
)
_DATASETS = {"automodel.data.text.TextFilesDataset": "text files of a folder, cut into sequences of equal length"}
_LOADERS = {"automodel.data.loader.StatefulDataLoader": "a loader whose position is saved and restored exactly"}
_TARGETS = (
    TargetSection(
        name="model",
        help="the model",
        targets={
            "automodel.NeMoAutoModelForCausalLM.from_pretrained": "a model of transformers with its weights",
            "automodel.NeMoAutoModelForCausalLM.from_config": "a model of transformers from scratch",
        },
        required=True,
    ),
    TargetSection(
        name="tokenizer",
        help="the tokenizer; left out, the one of model.pretrained_model_name_or_path",
        targets={
            "automodel.data.tokenizer.load_tokenizer": "the tokenizer of a pretrained model",
            "automodel.data.tokenizer.train_byte_level_bpe": "a byte-level BPE, trained on the corpus",
        },
    ),
    TargetSection(name="dataset", help="the training data", targets=_DATASETS, provided=("tokenizer",), required=True),
    TargetSection(
        name="dataloader",
        help="how training samples become batches; left out, a shuffling loader with the defaults",
        targets=_LOADERS,
        provided=("dataset", "batch_size"),
        default_target="automodel.data.loader.StatefulDataLoader",
    ),
    TargetSection(
        name="validation_dataset",
        help="the data that val_loss is measured on; left out, there is no validation",
        targets=_DATASETS,
        provided=("tokenizer",),
    ),
    TargetSection(
        name="validation_dataloader",
        help="how validation samples become batches",
        targets=_LOADERS,
        provided=("dataset", "batch_size"),
        default_target="automodel.data.loader.StatefulDataLoader",
    ),
    TargetSection(
        name="loss_fn",
        help="the loss; left out, MaskedCrossEntropy",
        targets={"automodel.training.loss.MaskedCrossEntropy": "cross-entropy over the positions that have a label"},
    ),
    TargetSection(
        name="optimizer",
        help="the optimizer",
        targets={"torch.optim.AdamW": "AdamW of PyTorch", "torch.optim.Adam": "Adam of PyTorch"},
        provided=("params",),
        required=True,
    ),
)

SETTINGS_SECTIONS: dict[str, SettingsSection] = {section.name: section for section in _SETTINGS}
"""Sections with a fixed schema, by name."""

TARGET_SECTIONS: dict[str, TargetSection] = {section.name: section for section in _TARGETS}
"""Sections with a `_target_`, by name."""

VALUE_SECTIONS: dict[str, SettingDescription] = {
    "recipe": SettingDescription(
        key="recipe",
        type="text or mapping",
        default="TrainFinetuneRecipeForNextTokenPrediction",
        help="the class that runs the recipe: its bare name, its dotted path, or a mapping with a _target_",
    ),
    "seed": SettingDescription(
        key="seed", type="integer or null", default=None, help="older form of rng.seed; the two must not differ"
    ),
    "deterministic": SettingDescription(
        key="deterministic",
        type="true or false",
        default=False,
        help="allow only algorithms that give the same bits every time",
    ),
}
"""Sections that are one value."""

METADATA_SECTIONS: dict[str, str] = {"ci": "metadata of the reference system's own tests"}
"""Sections that hold no settings."""

KNOWN_SECTIONS = frozenset(
    {*SETTINGS_SECTIONS, *TARGET_SECTIONS, *VALUE_SECTIONS, *METADATA_SECTIONS, *PLANNED_SECTIONS}
)
"""The names of all sections."""
_VALIDATION_DATASET = "validation_dataset_"
_ARGUMENT = re.compile(r"(?P<names>\w+(?:,\s*\w+)*)\s*(?:\([^)]*\))?:\s*(?P<text>.*)")


def find_section(name: object) -> SettingsSection | TargetSection | PlannedSection | SettingDescription | str:
    """Return what is known of a section.

    Raises:
        ValueError: there is no section of that name; the message gives the nearest one.
    """
    for table in (SETTINGS_SECTIONS, TARGET_SECTIONS, VALUE_SECTIONS, METADATA_SECTIONS, PLANNED_SECTIONS):
        if name in table:
            found: Any = table[name]  # type: ignore[index]
            return found  # type: ignore[no-any-return]
    if isinstance(name, str) and name.startswith(_VALIDATION_DATASET):
        return PlannedSection(name=name, help="a further validation dataset")
    raise ValueError(f"unknown section {printable_keys([name])[0]!r}{did_you_mean(str(name), KNOWN_SECTIONS)}")


def is_metadata(name: object) -> bool:
    """Whether a section holds no settings: an anchor of YAML (`_name`), or metadata."""
    return isinstance(name, str) and (name.startswith("_") or name in METADATA_SECTIONS)


@dataclass(frozen=True, kw_only=True)
class TargetDescription:
    """A target that is shipped; `arguments` are those that a recipe may give, None where they were not asked for."""

    target: str
    help: str
    arguments: tuple[SettingDescription, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SectionDescription:
    """A section for people.

    Attributes:
        name: Its name.
        kind: settings (a fixed schema), target (a `_target_` and its arguments), value, metadata, or planned (known,
            not available yet).
        help: One line.
        required: Whether a recipe needs it.
        off: What leaves a planned section switched off, besides leaving it out, null and false.
        settings: Its keys; for a value, the section itself.
        passed_over: Keys that recipes of the reference system hold besides, and that nothing reads.
        targets: The targets that are shipped.
    """

    name: str
    kind: Literal["settings", "target", "value", "metadata", "planned"]
    help: str
    required: bool = False
    off: str = ""
    settings: tuple[SettingDescription, ...] = ()
    passed_over: tuple[SettingDescription, ...] = ()
    targets: tuple[TargetDescription, ...] = ()


def describe_section(name: str, *, with_arguments: bool) -> SectionDescription:
    """Describe a section.

    Args:
        name: Its name.
        with_arguments: Import the targets that are shipped and describe their arguments too.

    Raises:
        ValueError: there is no section of that name; the message gives the nearest one.
    """
    section = find_section(name)
    match section:
        case SettingsSection():
            foreign = REFERENCE_KEYS.get(name)
            return SectionDescription(
                name=name,
                kind="settings",
                help=section.help,
                settings=tuple(describe_settings(section.section_class())),
                passed_over=tuple(describe_settings(foreign)) if foreign is not None else (),
            )
        case TargetSection():
            targets = tuple(
                TargetDescription(
                    target=target,
                    help=text,
                    arguments=tuple(_describe_arguments(target, section.provided)) if with_arguments else None,
                )
                for target, text in section.targets.items()
            )
            return SectionDescription(
                name=name, kind="target", help=section.help, required=section.required, targets=targets
            )
        case PlannedSection():
            keys = tuple(
                SettingDescription(key=k, type="", default=None, help=text) for k, text in section.keys.items()
            )
            return SectionDescription(name=name, kind="planned", help=section.help, off=section.off, settings=keys)
        case SettingDescription():
            return SectionDescription(name=name, kind="value", help=section.help, settings=(section,))
        case _:
            return SectionDescription(name=name, kind="metadata", help=section)


def _describe_arguments(target: str, provided: Sequence[str]) -> Iterator[SettingDescription]:
    """The arguments of a target that a recipe may give: those that can be given by name and are not provided."""
    called = resolve_target(target)
    function = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        hints = {}
    helps = {**_argument_helps(called), **_argument_helps(function)}
    for name, parameter in inspect.signature(called).parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and name not in provided:
            required = parameter.default is parameter.empty
            yield SettingDescription(
                key=name,
                type=spell_type(hints.get(name, parameter.annotation)),
                default=None if required else parameter.default,
                help=helps.get(name, ""),
                required=required,
            )


def _argument_helps(documented: object) -> dict[str, str]:
    """The first sentence on each argument, from the block `Args:` of a docstring."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    starts = [index for index, line in enumerate(lines) if line.strip() == "Args:"]
    if not starts:
        return {}
    entries: list[str] = []
    margin = ""
    for line in lines[starts[0] + 1 :]:
        indent = line[: len(line) - len(line.lstrip())]
        if not line.strip() or not indent:
            break
        margin = margin or indent
        if indent == margin:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    helps: dict[str, str] = {}
    for entry in entries:
        found = _ARGUMENT.match(entry)
        if found is not None:
            sentence = re.split(r"(?<=[.;])\s", found["text"], maxsplit=1)[0].rstrip(".;")
            helps.update(dict.fromkeys(re.findall(r"\w+", found["names"]), sentence))
    return helps
