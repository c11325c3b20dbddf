"""Weights into a model that is there already, whole or sharded: fresh ones, or those of a pretrained model.

A model is built on the meta device, sharded there, given memory, and then filled by one of the sources here. Every rank
fills its own part.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from automodel.models.auto import NeMoAutoModelForCausalLM, is_transformers_class
from automodel.models.checkpoint_files import model_names, read_checkpoint
from automodel.models.commit import carried_commit, hub_options, select_commit
from automodel.models.initialization import initialize
from automodel.models.safetensors_files import StoredTensor, open_safetensors
from automodel.models.slots import Slot, copy_part, is_sharded, local_part, model_slots, slots_to_fill
from automodel.models.tied_weights import tied_parameters

__all__ = ["FreshWeights", "LoadReport", "PretrainedWeights", "WeightSource", "weight_source"]

logger = logging.getLogger(__name__)

_HUB_OPTIONS = ("revision", "cache_dir", "subfolder", "token", "local_files_only", "force_download", "proxies")

# Options of transformers' loader that change which tensors a model gets, or where: it loads the model itself then.
_LEFT_TO_TRANSFORMERS = (
    "adapter_kwargs",
    "adapter_name",
    "device_map",
    "device_mesh",
    "distributed_config",
    "fusion_config",
    "gguf_file",
    "ignore_mismatched_sizes",
    "kernel_config",
    "key_mapping",
    "quantization_config",
    "state_dict",
    "tp_plan",
    "use_kernels",
)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What filling a model did on this rank.

    Args:
        how: "fresh" values; "slices": this rank read its parts from the files; "whole": transformers loaded the model,
            where it is sharded on rank zero alone.
        missing: Parameters and buffers that the files lack, which got fresh values; sorted.
        unexpected: Tensors of the files that the model does not have, by their names there; sorted.
        bytes_read: Bytes of tensors that this rank read from files itself.
        seconds: Wall-clock time.
    """

    how: Literal["fresh", "slices", "whole"]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float


@dataclass(frozen=True)
class FreshWeights:
    """Initial values as the model's class makes them, by a seed; see `initialization.initialize`."""

    def fill(self, model: nn.Module, template: nn.Module, *, seed: int) -> LoadReport:
        """Set every parameter and buffer of `model`.

        Args:
            model: The model, whole or sharded, with memory.
            template: The same model on the meta device, whole; it is not changed.
            seed: The same on all ranks.

        Returns:
            The report.

        Raises:
            ValueError: the models differ, or the class cannot initialise itself on a model that exists.
        """
        started = time.monotonic()
        slots = slots_to_fill(model, template)
        initialize(template, seed=seed, store=_into(slots))
        return LoadReport(how="fresh", seconds=time.monotonic() - started)


@dataclass(frozen=True, kw_only=True)
class PretrainedWeights:
    """The weights of a local folder or a Hub repository, at the commit where the configuration was read.

    Args:
        factory: The `from_pretrained` of a class.
        arguments: Its keyword arguments.
    """

    factory: Callable[..., Any]
    arguments: Mapping[str, Any]

    def fill(self, model: nn.Module, template: nn.Module, *, seed: int) -> LoadReport:
        """Set every parameter and buffer of `model` as transformers' `from_pretrained` would.

        The model's dtypes hold. What the files lack is initialised and warned of; what the model does not have is
        warned of. Of a sharded model every rank of the default process group calls this; each reads its slices alone,
        or rank zero loads the model through transformers and sends the tensors, where transformers has to compute them
        from those in the files.

        Args:
            model: The model, whole or sharded, with memory.
            template: The same model on the meta device, whole; it is not changed.
            seed: Of the values that the files lack; the same on all ranks.

        Returns:
            The report.

        Raises:
            OSError: the repository or a file cannot be found.
            ValueError: a file is damaged, a shape differs, tied tensors differ, or the ranks found different weights.
            RuntimeError: another rank failed.
        """
        started = time.monotonic()
        slots = slots_to_fill(model, template)
        assert isinstance(template, PreTrainedModel)
        sharded = is_sharded(model)
        commit: str | None = None
        plan: _Plan | None = None
        failure: Exception | None = None
        try:
            commit = self._commit(template)
            plan = self._plan(template, slots, commit=commit)
        except Exception as error:  # noqa: BLE001 - a border: it is raised again when the other ranks know of it
            failure = error
        if sharded:
            found = None if plan is None else (plan.missing, plan.unexpected)
            _compare_ranks(failure, (commit, found))
        if failure is not None:
            raise failure
        if plan is None:
            report = self._load_whole(slots, template, seed=seed, commit=commit, sharded=sharded, started=started)
        else:
            read = _read_slices(plan, slots)
            initialize(template, seed=seed, store=_into(slots), names=plan.to_initialize)
            report = LoadReport(
                how="slices",
                missing=plan.missing,
                unexpected=plan.unexpected,
                bytes_read=read,
                seconds=time.monotonic() - started,
            )
            self._warn(report)
        self._read_generation_config(model, commit=commit)
        return report

    @property
    def _name(self) -> str | PathLike[str]:
        name: str | PathLike[str] = self.arguments["pretrained_model_name_or_path"]
        return name

    def _commit(self, template: PreTrainedModel) -> str | None:
        """The commit of the weights; None for a local path."""
        if Path(self._name).exists():
            return None
        owner = getattr(self.factory, "__self__", None)
        # Our own class notes the commit of the weights, also in a configuration that came from elsewhere.
        ours = isinstance(owner, type) and issubclass(owner, NeMoAutoModelForCausalLM)
        noted = getattr(template.config, "_commit_hash", None) if ours else carried_commit(template.config, self._name)
        return noted or select_commit(self._name, hub_options=self._hub(None))

    def _hub(self, commit: str | None) -> dict[str, Any]:
        given = {name: self.arguments.get(name) for name in _HUB_OPTIONS}
        if commit is not None:
            given["revision"] = commit
        if dist.is_initialized() and dist.get_rank() > 0:
            # One download is enough, and the others may be reading it.
            given["force_download"] = None
        return hub_options(**given)

    def _plan(self, template: PreTrainedModel, slots: Mapping[str, Slot], *, commit: str | None) -> "_Plan | None":
        """Which tensor of the files goes where; None where transformers has to load the model."""
        if self._is_left_to_transformers(template):
            return None
        stored = read_checkpoint(self._name, variant=self.arguments.get("variant"), hub=self._hub(commit))
        if stored is None:
            return None
        names = model_names(list(stored), template)
        if names is None:
            return None
        return _make_plan({names[key]: tensor for key, tensor in stored.items()}, template, slots)

    def _is_left_to_transformers(self, template: PreTrainedModel) -> bool:
        if any(self.arguments.get(name) for name in _LEFT_TO_TRANSFORMERS):
            return True
        config, path = template.config, Path(self._name)
        return (
            self.arguments.get("use_safetensors") is False
            or getattr(config, "quantization_config", None) is not None
            or getattr(config, "transformers_weights", None) is not None
            or bool(getattr(type(config), "extra_files", ()))
            or path.is_file()
            or (path / "adapter_config.json").is_file()
        )

    def _load_whole(
        self,
        slots: Mapping[str, Slot],
        template: PreTrainedModel,
        *,
        seed: int,
        commit: str | None,
        sharded: bool,
        started: float,
    ) -> LoadReport:
        """Let transformers load the model: on every rank, or on rank zero, which sends it to the others."""
        state: dict[str, torch.Tensor] = {}
        reader = not sharded or dist.get_rank() == 0
        outcome: _Outcome = _Outcome()
        if reader:
            logger.info(
                "%s: transformers loads the model whole, since its weights cannot be read in slices", self._name
            )
            try:
                state, outcome = self._load_through_transformers(slots, template, seed=seed, commit=commit)
            except Exception as error:
                if not sharded:
                    raise
                _broadcast_object(_Outcome(failure=f"{type(error).__name__}: {error}"))
                raise
        if sharded:
            outcome = _broadcast_object(outcome)
            if outcome.failure is not None:
                raise RuntimeError(f"rank 0 could not load {self._name}: {outcome.failure}")
        for name, slot in slots.items():
            _copy_from_main(slot.tensor, state.pop(name, None), sharded=sharded)
        return LoadReport(
            how="whole",
            missing=outcome.missing,
            unexpected=outcome.unexpected,
            bytes_read=outcome.num_bytes if reader else 0,
            seconds=time.monotonic() - started,
        )

    def _load_through_transformers(
        self, slots: Mapping[str, Slot], template: PreTrainedModel, *, seed: int, commit: str | None
    ) -> tuple[dict[str, torch.Tensor], "_Outcome"]:
        arguments = {**self.arguments, "output_loading_info": True}
        if commit is not None:
            arguments["revision"] = commit
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            loaded, info = self.factory(**arguments)
        state = {name: slot.tensor for name, slot in model_slots(loaded).items()}
        for name, kept in tied_parameters(template).items():
            if state.get(name) is not state.get(kept):
                raise _differing_ties(name, kept, str(self._name))
        for name, slot in slots.items():
            if name not in state or state[name].shape != slot.tensor.shape:
                raise ValueError(
                    f"{self._name}: transformers loads a model of other tensors than its configuration describes, "
                    f"first {name}"
                )
        outcome = _Outcome(
            missing=tuple(sorted(info["missing_keys"])),
            unexpected=tuple(sorted(info["unexpected_keys"])),
            num_bytes=sum(state[name].nbytes for name in slots),
        )
        return {name: state[name].detach() for name in slots}, outcome

    def _warn(self, report: LoadReport) -> None:
        if report.missing:
            logger.warning(
                "%s lacks %d tensors of the model, which start from fresh values: %s",
                self._name,
                len(report.missing),
                ", ".join(report.missing),
            )
        if report.unexpected:
            logger.warning(
                "%s holds %d tensors that the model does not have: %s",
                self._name,
                len(report.unexpected),
                ", ".join(report.unexpected),
            )

    def _read_generation_config(self, model: nn.Module, *, commit: str | None) -> None:
        """Give the model the generation settings that belong to it, for those who load what training saves."""
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            return
        try:
            settings = GenerationConfig.from_pretrained(self._name, **self._hub(commit))
        except OSError:
            return
        model.generation_config = settings


WeightSource = FreshWeights | PretrainedWeights


def weight_source(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> WeightSource | None:
    """Find out where the weights of the model come from that a recipe asks for.

    Args:
        factory: What the recipe names as the model's target.
        arguments: Its keyword arguments.

    Returns:
        The source; None where the weights exist only once `factory` is called.
    """
    if isinstance(factory, type) and issubclass(factory, PreTrainedModel):
        return FreshWeights()
    owner = getattr(factory, "__self__", None)
    ours = isinstance(owner, type) and issubclass(owner, NeMoAutoModelForCausalLM)
    if not ours and not is_transformers_class(owner):
        return None
    match getattr(factory, "__name__", ""):
        case "from_config" | "_from_config":
            return FreshWeights()
        case "from_pretrained":
            return PretrainedWeights(factory=factory, arguments=arguments)
        case _:
            return None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which tensors of the files a model takes, by the names of the model's tensors."""

    reads: Mapping[str, StoredTensor]
    # Other names of a tied tensor that the files hold too, and the tensors they must equal.
    copies: Sequence[tuple[str, str, StoredTensor]]
    to_initialize: Collection[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What rank zero tells the others about its loading of a whole model."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_bytes: int = 0
    failure: str | None = None


def _make_plan(stored: Mapping[str, StoredTensor], template: PreTrainedModel, slots: Mapping[str, Slot]) -> _Plan:
    """Match the tensors of the files, by the model's names, to the model.

    Raises:
        ValueError: a tensor has another shape in the model.
    """
    state = template.state_dict()
    tied = tied_parameters(template)
    reads: dict[str, StoredTensor] = {}
    copies = []
    # Kept names first: of a tied tensor that is stored twice, the kept name decides.
    for name in sorted(state, key=lambda name: name in tied):
        tensor = stored.get(name)
        if tensor is None:
            continue
        kept = tied.get(name, name)
        if tensor.shape != tuple(state[name].shape):
            raise ValueError(
                f"{tensor.key} in {tensor.file} has shape {list(tensor.shape)}, "
                f"but {name} of the model has {list(state[name].shape)}"
            )
        if kept in reads:
            copies.append((name, kept, tensor))
        else:
            reads[kept] = tensor
    missing = [name for name in state if tied.get(name, name) not in reads and name not in tied]
    unexpected = {name: tensor.key for name, tensor in stored.items() if name not in state}
    ignored = _ignored_when_unexpected(template)
    return _Plan(
        reads=reads,
        copies=copies,
        to_initialize=[name for name in slots if name not in reads],
        missing=tuple(sorted(_not_matching(missing, template._keys_to_ignore_on_load_missing or ()))),
        unexpected=tuple(sorted(unexpected[name] for name in _not_matching(unexpected, ignored))),
    )


def _ignored_when_unexpected(template: PreTrainedModel) -> list[str]:
    patterns = list(template._keys_to_ignore_on_load_unexpected or ())
    # Old files hold buffers that are computed today; transformers passes over these too.
    buffers = [name for name, _ in template.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _not_matching(names: Collection[str], patterns: Collection[str]) -> Iterator[str]:
    return (name for name in names if not any(re.search(pattern, name) for pattern in patterns))


@torch.no_grad()
def _read_slices(plan: _Plan, slots: Mapping[str, Slot]) -> int:
    """Read this rank's part of every tensor, file by file; returns the bytes."""
    num_bytes = 0
    for reads in _by_file((name, tensor) for name, tensor in plan.reads.items()):
        with open_safetensors(reads[0][1].file) as handle:
            for name, tensor in reads:
                local, where = local_part(slots[name].tensor)
                if local.numel():
                    piece = _read(handle, tensor, where)
                    num_bytes += piece.nbytes
                    local.copy_(piece)
    for name, kept, tensor in plan.copies:
        local, where = local_part(slots[kept].tensor)
        with open_safetensors(tensor.file) as handle:
            if local.numel() and not torch.equal(_read(handle, tensor, where).to(local), local):
                raise _differing_ties(name, kept, str(tensor.file))
    return num_bytes


def _by_file(reads: Iterator[tuple[str, StoredTensor]]) -> Iterator[list[tuple[str, StoredTensor]]]:
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, tensor in reads:
        by_file.setdefault(tensor.file, []).append((name, tensor))
    # In the order of the names in the file, which is about the order of the data.
    return (sorted(tensors, key=lambda read: read[1].key) for tensors in by_file.values())


def _read(handle: Any, tensor: StoredTensor, where: tuple[slice, ...]) -> torch.Tensor:
    """Read a part; a whole tensor comes without a copy."""
    if all(part == slice(0, size) for part, size in zip(where, tensor.shape, strict=True)):
        piece: torch.Tensor = handle.get_tensor(tensor.key)
    else:
        piece = handle.get_slice(tensor.key)[where]
    return piece


def _differing_ties(name: str, kept: str, place: str) -> ValueError:
    return ValueError(
        f"{place}: the configuration makes {name} and {kept} one tensor, but two different ones are stored; "
        "set tie_word_embeddings to false"
    )


def _into(slots: Mapping[str, Slot]) -> Callable[[str, torch.Tensor], None]:
    return lambda name, value: copy_part(slots[name].tensor, value)


def _compare_ranks(failure: Exception | None, found: object) -> None:
    """Let every rank know that all are to read the same.

    Raises:
        RuntimeError: another rank failed; nothing is raised on the rank that failed.
        ValueError: the ranks found different weights.
    """
    told = (None if failure is None else f"{type(failure).__name__}: {failure}", found)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if failure is not None:
        return
    for rank, (reason, theirs) in enumerate(everyone):
        if reason is not None:
            raise RuntimeError(f"rank {rank} found no usable weights: {reason}")
        if theirs != everyone[0][1]:
            raise ValueError(f"ranks 0 and {rank} found different weights; name a commit as model.revision")


def _broadcast_object(outcome: _Outcome) -> _Outcome:
    values = [outcome]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@torch.no_grad()
def _copy_from_main(target: torch.Tensor, value: torch.Tensor | None, *, sharded: bool) -> None:
    """Set `target` from the whole value, which of a sharded model rank zero alone has."""
    if not sharded:
        assert value is not None
        copy_part(target, value)
        return
    local, _ = local_part(target)
    if value is None:
        value = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    value = value.to(device=local.device, dtype=target.dtype).contiguous()
    dist.broadcast(value, src=0)
    copy_part(target, value)
