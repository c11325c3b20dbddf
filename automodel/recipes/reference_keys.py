"""Keys of our sections that recipes of the reference system hold and that nothing here reads.

Each class lists what one section may hold beside its own settings. A key is accepted where it changes nothing in a
single process; one that would change something is known, and refused as not available yet when it is switched on.
"""

from dataclasses import dataclass
from typing import Any

from automodel.config.sections import setting

__all__ = [
    "MEGATRON_OPTIONS",
    "REFERENCE_KEYS",
    "REFERENCE_TARGETS",
    "CheckpointReferenceKeys",
    "ClipGradNormReferenceKeys",
    "DistEnvReferenceKeys",
    "DistributedReferenceKeys",
    "LrSchedulerReferenceKeys",
    "StepSchedulerReferenceKeys",
]


@dataclass(frozen=True, kw_only=True)
class StepSchedulerReferenceKeys:
    """What recipes of the reference system hold in `step_scheduler` besides."""

    grad_acc_steps: int | None = setting(
        None, "older form; global_batch_size over local_batch_size says the same", off=(None,)
    )
    start_step: int | None = setting(None, "first step; a checkpoint restores it", off=(None, 0))
    start_epoch: int | None = setting(None, "first epoch; a checkpoint restores it", off=(None, 0))


@dataclass(frozen=True, kw_only=True)
class DistEnvReferenceKeys:
    """What recipes of the reference system hold in `dist_env` besides."""

    init_method: str | None = setting(None, "no effect: the launcher's variables say how ranks find each other")
    world_size: int | None = setting(None, "number of processes, which the launcher sets", off=(None, 1))
    rank: int | None = setting(None, "this process's rank, which the launcher sets", off=(None, 0))


@dataclass(frozen=True, kw_only=True)
class DistributedReferenceKeys:
    """What recipes of the reference system hold in `distributed` besides."""

    backend: str | None = setting(None, "no effect: dist_env.backend chooses the backend of the process group")
    world_size: int | None = setting(None, "number of processes, which the launcher sets", off=(None, 1))
    tp_plan: Any = setting(None, "how layers are split; no effect while tp_size is 1")
    custom_tp_plan: Any = setting(None, "how layers are split; no effect while tp_size is 1")
    use_hf_tp_plan: bool | None = setting(None, "split layers as transformers says; no effect while tp_size is 1")
    autocast_dtype: Any = setting(None, "dtype of autocast; mp_policy.param_dtype sets it here", off=(None,))
    # Options of the package megatron-fsdp; see MEGATRON_OPTIONS.
    megatron_fsdp_unit_modules: Any = setting(None, "no effect: megatron_fsdp's options are set here")
    zero_dp_strategy: int | None = setting(None, "no effect: megatron_fsdp's options are set here")
    init_fsdp_with_meta_device: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    grad_reduce_in_fp32: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    preserve_fp32_weights: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    overlap_grad_reduce: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    overlap_param_gather: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    check_for_nan_in_grad: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    average_in_collective: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    disable_bucketing: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    calculate_per_token_loss: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    keep_fp8_transpose_cache: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    nccl_ub: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")
    fsdp_double_buffer: bool | None = setting(None, "no effect: megatron_fsdp's options are set here")


MEGATRON_OPTIONS = (
    "megatron_fsdp_unit_modules",
    "zero_dp_strategy",
    "init_fsdp_with_meta_device",
    "grad_reduce_in_fp32",
    "preserve_fp32_weights",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "check_for_nan_in_grad",
    "average_in_collective",
    "disable_bucketing",
    "calculate_per_token_loss",
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
)
"""Keys of `distributed` that are options of the package megatron-fsdp, which our adapter sets itself."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReferenceKeys:
    """What recipes of the reference system hold in `checkpoint` besides."""

    model_cache_dir: str | None = setting(None, "no effect: model.cache_dir says where downloads are kept")
    model_repo_id: str | None = setting(None, "no effect: the model section names the base model")
    original_model_root_dir: str | None = setting(None, "no effect: the model section names the base model")
    single_rank_consolidation: bool | None = setting(None, "one rank writes the copy for transformers; so it is here")
    is_peft: bool | None = setting(None, "save adapters only", off=(None, False))
    load_base_model: bool | None = setting(
        None, "no effect where false: the model's _target_ decides whether weights are loaded", off=(None, False)
    )
    skip_task_head_prefixes_for_base_model: tuple[str, ...] | None = setting(
        None, "weights of the base model to leave out", off=(None, ())
    )
    v4_compatible: bool | None = setting(None, "write config.json as transformers 4 did", off=(None, False))
    diffusers_compatible: bool | None = setting(None, "write files under the names of diffusers", off=(None, False))


@dataclass(frozen=True, kw_only=True)
class LrSchedulerReferenceKeys:
    """What recipes of the reference system hold in `lr_scheduler` besides."""

    init_lr: float | None = setting(None, "learning rate at the start of the warm-up", off=(None, 0.0))
    max_lr: float | None = setting(None, "peak; optimizer.lr sets it here", off=(None,))
    start_wd: float | None = setting(None, "weight decay at the start", off=(None,))
    end_wd: float | None = setting(None, "weight decay at the end", off=(None,))
    wd_incr_steps: int | None = setting(None, "steps over which the weight decay grows", off=(None, 0))
    wd_incr_style: str | None = setting(None, "shape of that growth", off=(None, "constant"))
    wsd_decay_steps: int | None = setting(None, "steps of the decay of style WSD", off=(None,))
    lr_wsd_decay_style: str | None = setting(None, "shape of the decay of style WSD; no effect without that style")
    override_opt_param_scheduler: bool | None = setting(None, "no effect: the recipe's schedule always holds")
    use_checkpoint_opt_param_scheduler: bool | None = setting(None, "take the checkpoint's", off=(None, False))


@dataclass(frozen=True, kw_only=True)
class ClipGradNormReferenceKeys:
    """What recipes of the reference system hold in `clip_grad_norm` besides."""

    norm_type: float | None = setting(None, "which norm is meant", off=(None, 2.0))
    foreach: bool | None = setting(None, "no effect: how the norm is computed changes nothing in it")


REFERENCE_KEYS: dict[str, type[Any]] = {
    "step_scheduler": StepSchedulerReferenceKeys,
    "dist_env": DistEnvReferenceKeys,
    "distributed": DistributedReferenceKeys,
    "checkpoint": CheckpointReferenceKeys,
    "lr_scheduler": LrSchedulerReferenceKeys,
    "clip_grad_norm": ClipGradNormReferenceKeys,
}
"""By section."""

REFERENCE_TARGETS: dict[str, str] = {
    "step_scheduler": "StepScheduler",
    "rng": "StatefulRNG",
    "checkpoint": "CheckpointingConfig",
    "lr_scheduler": "OptimizerParamScheduler",
}
"""The class that a section may name as its `_target_`, which says no more than the section's own name does."""
