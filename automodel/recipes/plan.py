"""What a recipe would do, found out without reading weights or data: the model is built on the meta device."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automodel.checkpoint.directories import resolve_restore_from_to_checkpoint_dir
from automodel.config.loader import ConfigNode
from automodel.distributed.activation_checkpointing import checkpoint_blocks
from automodel.distributed.config import DistributedConfig, ParallelSizes, describe_ranks
from automodel.distributed.device import choose_device
from automodel.distributed.env import read_launch_environment
from automodel.distributed.strategy import check_strategy
from automodel.distributed.units import Unit, bytes_per_rank, describe_units, find_blocks, find_units
from automodel.models.auto import build_on_meta
from automodel.models.inspection import ParameterSummary, saved_activation_bytes, summarize_parameters
from automodel.recipes import parts
from automodel.recipes.listing import list_values
from automodel.recipes.sections import RecipeSections, build_sections
from automodel.training.precision import compute_dtype

__all__ = ["MemoryEstimate", "Plan", "make_plan"]

logger = logging.getLogger(__name__)

_CONTEXT_LENGTH_KEYS = ("context_length", "seq_length", "seq_len", "max_length")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes at the peak of a step on the rank that holds most, part by part; None where a part cannot be estimated.

    `gathered` is what a sharded model holds of whole units while it computes, `unreduced` the whole gradients that it
    keeps between the forward passes of a step.
    """

    parameters: int
    gradients: int
    optimizer_state: int | None
    activations: int | None
    gathered: int = 0
    unreduced: int = 0

    @property
    def total(self) -> int:
        """The sum of the parts that are known."""
        known = self.parameters + self.gradients + self.gathered + self.unreduced
        return known + (self.optimizer_state or 0) + (self.activations or 0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a dry run."""

    recipe: str
    model: str
    parameters: ParameterSummary
    memory: MemoryEstimate
    device: torch.device
    dtype: torch.dtype
    ranks: str
    units: list[str]
    samples_per_step: int
    accumulation_steps: int
    tokens_per_step: int | None
    max_steps: int | None
    num_epochs: int
    sections: dict[str, str]

    def lines(self) -> Iterator[str]:
        """The plan as lines for a terminal."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self.parameters.by_group.items() if count)
        tokens = "unknown" if self.tokens_per_step is None else f"{self.tokens_per_step:,}"
        samples = f"{self.samples_per_step} samples in {self.accumulation_steps} forward pass(es)"
        epochs = f"{self.num_epochs} epoch(s)"
        steps = epochs if self.max_steps is None else f"{self.max_steps} steps, or {epochs} if that is less"
        memory = self.memory
        rows = {
            "recipe": self.recipe,
            "model": self.model,
            "parameters": f"{self.parameters.total:,} ({self.parameters.trainable:,} trainable): {counts}",
            "device": f"{self.device}, computing in {str(self.dtype).removeprefix('torch.')}",
            "processes": self.ranks,
            "tokens per step": f"{tokens} ({samples})",
            "length": steps,
            f"memory{' per rank' if self.units else ''}": f"about {_mib(memory.total)}: "
            f"parameters {_mib(memory.parameters)}, gradients {_mib(memory.gradients)}, "
            f"optimizer {_mib(memory.optimizer_state)}, "
            + (f"gathered units {_mib(memory.gathered)}, " if memory.gathered else "")
            + (f"whole gradients until a step ends {_mib(memory.unreduced)}, " if memory.unreduced else "")
            + f"activations of one forward pass {_mib(memory.activations)} (estimates)",
        }
        width = max(map(len, rows))
        yield from (f"{name:<{width}}  {value}" for name, value in rows.items())
        if memory.unreduced:
            yield "distributed.defer_fsdp_grad_sync: false reduces gradients after every pass, and keeps no whole ones"
        if self.units:
            yield "units, each gathered as a whole while it computes"
            yield from (f"  {line}" for line in self.units)
        yield "sections"
        width = max(map(len, self.sections))
        yield from (f"  {name:<{width}}  {value}" for name, value in self.sections.items())


def make_plan(config: ConfigNode, *, run_dir: Path | None = None, world_size: int | None = None) -> Plan:
    """Check everything in a recipe that can be checked without weights and data, and say what it would do.

    Args:
        config: The recipe.
        run_dir: Folder of the run, for the plan's text.
        world_size: Number of processes; None: that of the launch environment.

    Raises:
        ValueError, TypeError, ImportError: as `build_sections`, and where a target refuses its arguments.
        RuntimeError: the strategy needs a device that is not here.
    """
    sections = build_sections(config)
    launch = read_launch_environment()
    world_size = world_size or launch.world_size
    check_strategy(sections.distributed, world_size=world_size)
    sizes = sections.distributed.sizes(world_size)
    accumulation_steps = sections.step_scheduler.accumulation_steps(sizes.data)
    device = choose_device(launch)
    dtype = compute_dtype(sections.distributed.mp_policy.param_dtype, device=device)
    scheduler = sections.step_scheduler
    context_length = _context_length(sections.dataset)
    _check_data(sections)
    parts.build_loss(sections.loss_fn)
    with sections.model.note_instantiation():
        model: nn.Module = build_on_meta(sections.model["_target_"], sections.model.arguments())
    _check_vocabulary(sections, model)
    return Plan(
        recipe=getattr(sections.recipe, "__name__", str(sections.recipe)),
        model=type(model).__name__,
        parameters=summarize_parameters(model),
        memory=_estimate_memory(
            sections, model, sizes=sizes, passes=accumulation_steps, context_length=context_length, dtype=dtype
        ),
        device=device,
        dtype=dtype,
        ranks=describe_ranks(sizes, sections.distributed),
        units=describe_units(find_units(model), shards=sizes.dp_shard) if sizes.dp_shard > 1 else [],
        samples_per_step=scheduler.global_batch_size,
        accumulation_steps=accumulation_steps,
        tokens_per_step=None if context_length is None else scheduler.global_batch_size * context_length,
        max_steps=scheduler.max_steps,
        num_epochs=scheduler.num_epochs,
        sections=_describe_sections(config, sections, run_dir=run_dir),
    )


def _check_data(sections: RecipeSections) -> None:
    """Check what data sets can check of their arguments without reading the data, and the checkpoint to start from."""
    for node in (sections.dataset, sections.validation_dataset):
        check = None if node is None else getattr(node["_target_"], "check_arguments", None)
        if node is not None and check is not None:
            with node.note_instantiation():
                check(**node.arguments())
    checkpoint = sections.checkpoint
    if checkpoint.enabled and checkpoint.restore_from is not None and checkpoint.checkpoint_dir is not None:
        resolve_restore_from_to_checkpoint_dir(checkpoint.checkpoint_dir, checkpoint.restore_from)


def _check_vocabulary(sections: RecipeSections, model: nn.Module) -> None:
    """Compare the vocabulary that the tokenizer's section asks for with the model's, where both are known."""
    asked = sections.tokenizer.get("vocab_size") if sections.tokenizer is not None else None
    available = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(asked, int) and isinstance(available, int) and asked > available:
        raise ValueError(f"tokenizer.vocab_size is {asked}, but the model's vocab_size only {available}")


def _context_length(dataset: ConfigNode) -> int | None:
    for key in _CONTEXT_LENGTH_KEYS:
        value = dataset.get(key)
        if isinstance(value, int):
            return value
    return None


def _estimate_memory(
    sections: RecipeSections,
    model: nn.Module,
    *,
    sizes: ParallelSizes,
    passes: int,
    context_length: int | None,
    dtype: torch.dtype,
) -> MemoryEstimate:
    """Estimate the peak of a step; afterwards the model may recompute its activations."""
    summary = summarize_parameters(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
    optimizer_state = _optimizer_state_bytes(sections.optimizer, model)
    parameters, gathered, unreduced = summary.num_bytes, 0, 0
    if sizes.dp_shard > 1:
        units = find_units(model)
        parameters = sum(bytes_per_rank(unit, shards=sizes.dp_shard) for unit in units)
        share = parameters / max(summary.num_bytes, 1)
        gradients = round(gradients * share)
        optimizer_state = None if optimizer_state is None else round(optimizer_state * share)
        gathered = _gathered_bytes(units, sections.distributed, dtype=dtype)
        if passes > 1 and sections.distributed.defer_fsdp_grad_sync is not False:
            # FSDP2 adds gradients up in float32, the default of reduce_dtype, before it reduces them.
            unreduced = 4 * summary.trainable
    activations = None
    if context_length is not None:
        if sections.distributed.checkpointing_mode is not None:
            checkpoint_blocks(find_blocks(model), mode=sections.distributed.checkpointing_mode)
        activations = saved_activation_bytes(
            model,
            batch_size=sections.step_scheduler.local_batch_size,
            context_length=context_length,
            autocast_dtype=None if dtype == torch.float32 else dtype,
        )
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=optimizer_state,
        activations=activations,
        gathered=gathered,
        unreduced=unreduced,
    )


def _gathered_bytes(units: Sequence[Unit], config: DistributedConfig, *, dtype: torch.dtype) -> int:
    """Bytes of the whole units that a rank holds at once: the root, and the largest of the others with its gradients.

    One more block with prefetching; all blocks where they are not freed after their forward pass.
    """
    width = None if dtype == torch.float32 else dtype.itemsize
    sizes = {unit.name: unit.num_bytes if width is None else unit.num_parameters * width for unit in units}
    root = sum(sizes[unit.name] for unit in units if unit.kind == "root")
    others = [sizes[unit.name] for unit in units if unit.kind != "root"]
    blocks = [sizes[unit.name] for unit in units if unit.kind == "block"]
    if config.reshard_after_forward is False:
        return root + sum(blocks) + max(others, default=0)
    ahead = max(blocks, default=0) if config.enable_fsdp2_prefetch else 0
    return root + 2 * max(others, default=0) + ahead


def _optimizer_state_bytes(node: ConfigNode, model: nn.Module) -> int | None:
    """Bytes that the optimizer holds after a step, found by a step over meta tensors."""
    optimizer = parts.build_optimizer(node, model)
    for group in optimizer.param_groups:
        # Fused kernels hold the same state, but do not run without a device.
        group["fused"] = False
    try:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        logger.info("the optimizer's memory is not estimated: %s", error)
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))


def _describe_sections(config: ConfigNode, sections: RecipeSections, *, run_dir: Path | None) -> dict[str, str]:
    """What each section resolves to, a line each; placeholders of the environment stay as they are."""
    described = {}
    for name in ("model", "tokenizer", "dataset", "dataloader", "validation_dataset", "validation_dataloader"):
        described[name] = _describe_target(getattr(sections, name), absent="default")
    described["loss_fn"] = _describe_target(sections.loss_fn, absent="MaskedCrossEntropy()")
    described["optimizer"] = _describe_target(sections.optimizer, absent="")
    given = {value.dotted: value.value for value in list_values(config, with_defaults=False)}
    given.setdefault("rng.seed", given.get("seed"))
    for name in ("lr_scheduler", "clip_grad_norm", "step_scheduler", "rng", "kernels", "distributed", "checkpoint"):
        described[name] = ", ".join(_changed_settings(getattr(sections, name), given, path=name)) or "defaults"
    if sections.checkpoint.enabled:
        folder = given.get("checkpoint.checkpoint_dir") or f"{run_dir or 'the run folder'}/checkpoints"
        described["checkpoint"] += f" -> {folder}"
    described["deterministic"] = str(sections.deterministic).lower()
    return described


def _describe_target(node: ConfigNode | None, *, absent: str) -> str:
    if node is None:
        return absent
    values = node.to_yaml_dict()
    target = values.pop("_target_")
    return f"{target}({', '.join(f'{key}={_short(value)}' for key, value in values.items())})"


def _changed_settings(section: Any, given: Mapping[str, Any], *, path: str) -> Iterator[str]:
    """The settings that differ from their defaults, as the recipe may print them."""
    for setting in dataclasses.fields(section):
        value, place = getattr(section, setting.name), f"{path}.{setting.name}"
        default = setting.default_factory() if callable(setting.default_factory) else setting.default
        if dataclasses.is_dataclass(value):
            yield from (f"{setting.name}.{changed}" for changed in _changed_settings(value, given, path=place))
        elif value != default:
            yield f"{setting.name}={given.get(place) or value}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _mib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 2**20:,.0f} MiB"
