"""Recipe sections `distributed` and `dist_env`; their schema is fixed, `_target_` has no meaning in them."""

from dataclasses import dataclass
from typing import Literal

from automodel.config.loader import ConfigNode
from automodel.config.sections import NotAvailableYetError, refuse, setting

__all__ = ["DistEnvConfig", "DistributedConfig", "MixedPrecisionConfig"]


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    """Sub-section `distributed.mp_policy`; in a single process, param_dtype is the dtype of autocast."""

    param_dtype: str | None = setting(None, "dtype of the computation; null: bfloat16 where the device is fast in it")
    reduce_dtype: str | None = setting(None, "dtype of gradient reductions; no effect in a single process")
    output_dtype: str | None = setting(None, "dtype of the model's output; no effect in a single process")
    cast_forward_inputs: bool = setting(True, "cast floating inputs to param_dtype; no effect in a single process")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Recipe section `distributed`: the strategy and the sizes of its dimensions."""

    strategy: Literal["fsdp2", "ddp", "megatron_fsdp", "megatron-fsdp", "mfsdp"] = setting(
        "fsdp2", "how ranks share the work; a single process runs unsharded", off=("fsdp2", "ddp")
    )
    dp_size: int | None = setting(None, "data-parallel ranks; null: all that the other sizes leave")
    dp_replicate_size: int | None = setting(None, "replicas of the sharded group (HSDP)", off=(None, 1))
    tp_size: int | None = setting(None, "tensor-parallel ranks", off=(None, 1))
    pp_size: int | None = setting(None, "pipeline stages", off=(None, 1))
    cp_size: int | None = setting(None, "context-parallel ranks", off=(None, 1))
    ep_size: int | None = setting(None, "expert-parallel ranks", off=(None, 1))
    sequence_parallel: bool | None = setting(None, "shard activations along the sequence", off=(None, False))
    activation_checkpointing: bool | str | None = setting(None, "recompute activations", off=(None, False))
    pipeline: ConfigNode | None = setting(None, "options of pipeline parallelism; no effect while pp_size is 1")
    moe: ConfigNode | None = setting(None, "options of expert parallelism; no effect while ep_size is 1")
    multimodal: ConfigNode | None = setting(None, "options for frozen towers; no effect on a text model")
    defer_fsdp_grad_sync: bool | None = setting(None, "reduce gradients once per step; no effect in a single process")
    enable_async_tensor_parallel: bool | None = setting(None, "overlap tensor-parallel collectives", off=(None, False))
    enable_fsdp2_prefetch: bool | None = setting(None, "prefetch the next unit; no effect in a single process")
    enable_compile: bool | None = setting(None, "compile each block", off=(None, False))
    patch_is_packed_sequence: bool | None = setting(None, "no effect: sequences are not packed")
    mp_policy: MixedPrecisionConfig = setting(help="dtypes of computation", factory=MixedPrecisionConfig)
    reshard_after_forward: bool | None = setting(None, "free gathered parameters; no effect in a single process")

    def check_world_size(self, world_size: int) -> None:
        """Check the sizes against the number of processes, before any model is built.

        Raises:
            ValueError: dp_size is another number than the processes make up.
            NotAvailableYetError: there are several processes, which would train copies that know nothing of each other.
        """
        if world_size > 1:
            raise NotAvailableYetError(f"training in {world_size} processes is not available yet: start a single one")
        if self.dp_size is not None and self.dp_size != world_size:
            raise refuse("distributed.dp_size", self.dp_size, f"null or the number of processes ({world_size})")


@dataclass(frozen=True, kw_only=True)
class DistEnvConfig:
    """Recipe section `dist_env`; a single process makes no process group."""

    backend: str | None = setting(None, "backend of the process group; null: chosen by the device")
    timeout_minutes: float = setting(10.0, "minutes after which a collective gives up")

    def __post_init__(self) -> None:
        if not self.timeout_minutes > 0:
            raise refuse("dist_env.timeout_minutes", self.timeout_minutes, "positive")
