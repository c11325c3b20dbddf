"""Sections that recipes of the reference system may hold and that are not built yet, and what switches each off."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PLANNED_SECTIONS", "PlannedSection"]


def _always(value: Mapping[Any, Any]) -> bool:
    del value
    return True


def _unless_a_switch_is_off(value: Mapping[Any, Any]) -> bool:
    switches = [value[name] for name in ("enabled", "enable") if name in value]
    return any(switches) if switches else True


def _only_when_enabled(value: Mapping[Any, Any]) -> bool:
    return bool(value.get("enabled", value.get("enable")))


def _when_any_value_is_set(value: Mapping[Any, Any]) -> bool:
    return _unless_a_switch_is_off(value) and any(value.values())


def _when_sequences_are_packed(value: Mapping[Any, Any]) -> bool:
    return value.get("packed_sequence_size") not in (0, None)


def _when_weights_are_quantized(value: Mapping[Any, Any]) -> bool:
    switches = [value[name] for name in ("load_in_4bit", "load_in_8bit") if name in value]
    return _unless_a_switch_is_off(value) and (any(switches) if switches else True)


def _when_something_is_frozen(value: Mapping[Any, Any]) -> bool:
    """Without selectors the vision tower is frozen unless the section says otherwise."""
    explicit = any(name in value for name in ("freeze_modules", "unfreeze_modules", "freeze_vision_tower"))
    return not explicit or any(value.values())


@dataclass(frozen=True, kw_only=True)
class PlannedSection:
    """A section that is known and not built yet.

    Attributes:
        name: Its name.
        help: One line.
        off: What leaves it switched off, besides leaving it out, null and false.
        is_on: Whether a mapping asks for something.
        keys: Its keys and a line on each, as far as they are known.
    """

    name: str
    help: str
    off: str = ""
    is_on: Callable[[Mapping[Any, Any]], bool] = _always
    keys: Mapping[str, str] = field(default_factory=dict)

    def asks_for_something(self, value: object) -> bool:
        """Whether a recipe that holds this value under the section's name needs the section."""
        if value is None or value is False:
            return False
        return self.is_on(value) if isinstance(value, Mapping) else True


def _switchable(name: str, text: str, keys: Mapping[str, str], *, switch: str = "enabled") -> PlannedSection:
    return PlannedSection(
        name=name, help=text, off=f"{name}.{switch}: false", is_on=_unless_a_switch_is_off, keys={**keys}
    )


_ALL = (
    PlannedSection(
        name="peft",
        help="adapters (LoRA) on a frozen base model",
        keys={
            "dim": "rank of the adapters",
            "alpha": "scale of the adapters",
            "target_modules": "patterns of the module names that get one",
            "exclude_modules": "patterns of the module names that get none",
            "match_all_linear": "every linear layer gets one",
            "dropout": "dropout before the adapter",
            "dropout_position": "before or after the adapter",
            "use_dora": "learn magnitudes as well",
            "use_triton": "fused kernels",
            "lora_A_init": "how the first matrix starts",
            "lora_dtype": "dtype of the adapters",
        },
    ),
    PlannedSection(
        name="packed_sequence",
        help="several samples in one sequence",
        off="packed_sequence.packed_sequence_size: 0",
        is_on=_when_sequences_are_packed,
        keys={
            "packed_sequence_size": "tokens of a packed sequence; 0: samples are not packed",
            "packing_strategy": "how samples are chosen",
            "split_across_pack": "cut a sample where its sequence is full",
            "max_packs": "most sequences to make",
        },
    ),
    PlannedSection(
        name="freeze_config",
        help="which modules are trained",
        off="all of its options false",
        is_on=_when_something_is_frozen,
        keys={
            "freeze_modules": "selectors (path or glob) of modules to freeze",
            "unfreeze_modules": "selectors of modules to train, which win",
            "freeze_vision_tower": "freeze the vision tower",
            "freeze_audio_tower": "freeze the audio tower",
            "freeze_language_model": "freeze the language model",
            "freeze_embeddings": "freeze the embeddings",
            "freeze_video_embedder": "freeze the video embedder",
        },
    ),
    PlannedSection(name="processor", help="_target_ that makes the processor of a multimodal model"),
    PlannedSection(
        name="benchmark",
        help="what a benchmarking run measures",
        keys={
            "warmup_steps": "steps that are not counted",
            "peak_tflops": "peak that MFU is measured against",
            "nsys_start": "first step that is profiled",
            "nsys_end": "last step that is profiled",
            "nsys_ranks": "ranks that are profiled",
            "num_nodes": "nodes of the run",
            "json_output_path": "file of the results",
        },
    ),
    PlannedSection(
        name="compile",
        help="torch.compile of the model",
        off="compile.enabled: false",
        is_on=_only_when_enabled,
        keys={
            "enabled": "compile the model",
            "mode": "mode of torch.compile",
            "fullgraph": "refuse graph breaks",
            "dynamic": "dynamic shapes",
            "backend": "backend of torch.compile",
            "dynamo_cache_size_limit": "recompilations per function",
        },
    ),
    PlannedSection(
        name="fp8",
        help="matrix products in FP8",
        off="fp8.enabled: false",
        is_on=_only_when_enabled,
        keys={
            "enabled": "convert the linear layers",
            "recipe_name": "how scales are chosen",
            "filter_fqns": "layers to leave alone",
            "emulate": "compute without FP8 hardware",
            "enable_fsdp_float8_all_gather": "gather parameters in FP8",
            "precompute_float8_dynamic_scale_for_fsdp": "compute all scales at once",
            "force_recompute_fp8_weight_in_bwd": "recompute FP8 weights in the backward pass",
        },
    ),
    _switchable(
        "wandb",
        "rows sent to Weights & Biases",
        {
            "enable": "send rows",
            "project": "project",
            "entity": "team or user",
            "name": "name of the run",
            "group": "group of the run",
            "tags": "tags of the run",
            "mode": "online, offline or disabled",
            "dir": "local folder",
            "save_dir": "local folder",
        },
        switch="enable",
    ),
    _switchable(
        "mlflow",
        "rows sent to MLflow",
        {
            "experiment_name": "experiment",
            "run_name": "name of the run",
            "tracking_uri": "address of the server",
            "artifact_location": "where artifacts go",
            "tags": "tags of the run",
        },
    ),
    _switchable(
        "comet",
        "rows sent to Comet",
        {"project_name": "project", "workspace": "workspace", "experiment_name": "name of the run", "tags": "tags"},
    ),
    PlannedSection(
        name="quantization",
        help="a base model in 4 or 8 bits",
        off="quantization.load_in_4bit and load_in_8bit: false",
        is_on=_when_weights_are_quantized,
        keys={
            "load_in_4bit": "store weights in 4 bits",
            "load_in_8bit": "store weights in 8 bits",
            "bnb_4bit_compute_dtype": "dtype of the computation",
            "bnb_4bit_quant_type": "number format",
            "bnb_4bit_quant_storage": "dtype of the storage",
            "bnb_4bit_use_double_quant": "quantize the scales as well",
        },
    ),
    _switchable(
        "qat",
        "training that prepares for quantization",
        {
            "enabled": "fake-quantize the linear layers",
            "quantizer": "_target_ of the quantizer",
            "fake_quant_after_n_steps": "steps before it starts",
        },
    ),
    _switchable("neftune", "noise on the embeddings", {"noise_alpha": "size of the noise"}),
    PlannedSection(
        name="parallelizer", help="_target_ that shards the model its own way", is_on=_unless_a_switch_is_off
    ),
    PlannedSection(name="autopipeline", help="older form of distributed.pipeline", is_on=_unless_a_switch_is_off),
    PlannedSection(
        name="nvtx", help="NVTX ranges around the parts of a step", off="nvtx: false", is_on=_when_any_value_is_set
    ),
    PlannedSection(
        name="autonvtx", help="NVTX ranges around every module", off="autonvtx: false", is_on=_when_any_value_is_set
    ),
    _switchable(
        "moe_metrics",
        "how evenly experts are used, in the metrics",
        {
            "enabled": "record it",
            "mode": "brief or detailed",
            "detailed_every_steps": "steps between detailed rows",
            "top_k_experts": "experts to name",
        },
    ),
    PlannedSection(
        name="prewarm",
        help="one-time initialization during setup",
        off="all of its options false",
        is_on=_when_any_value_is_set,
        keys={
            "cublas_backward": "workspaces of cuBLAS",
            "fla_gdn_autotune": "kernels of Gated DeltaNet",
            "mamba_ssd_autotune": "kernels of Mamba-2",
            "comm_groups": "process groups of the gradient norm",
            "pipeline_stage_compile": "one synthetic micro-batch per pipeline stage",
        },
    ),
    PlannedSection(
        name="mfu",
        help="the peak that MFU is measured against",
        is_on=_when_any_value_is_set,
        keys={"device": "name of the GPU", "peak_tflops": "peak in TFLOP/s, which wins over device"},
    ),
    PlannedSection(name="kernel_cache", help="the shared cache of compiled kernels", is_on=_when_any_value_is_set),
    PlannedSection(
        name="teacher_model", help="_target_ of the teacher of a distillation", is_on=_unless_a_switch_is_off
    ),
    PlannedSection(name="kd_ratio", help="weight of the distillation loss"),
    PlannedSection(name="kd_loss_fn", help="_target_ of the distillation loss"),
    PlannedSection(
        name="offload_teacher_model", help="keep the teacher in host memory", off="offload_teacher_model: false"
    ),
    PlannedSection(name="slurm", help="older form: jobs are submitted with sbatch", is_on=_unless_a_switch_is_off),
    PlannedSection(name="skypilot", help="a job on a cloud machine", is_on=_unless_a_switch_is_off),
)

PLANNED_SECTIONS: dict[str, PlannedSection] = {section.name: section for section in _ALL}
"""By name."""
