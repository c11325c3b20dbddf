"""Recipe sections `distributed` and `dist_env`; their schema is fixed, `_target_` has no meaning in them."""

from dataclasses import dataclass
from typing import Literal

from automodel.config.loader import ConfigNode
from automodel.config.sections import refuse, setting

__all__ = [
    "DistEnvConfig",
    "DistributedConfig",
    "MixedPrecisionConfig",
    "OffloadConfig",
    "ParallelSizes",
    "describe_ranks",
]

Strategy = Literal["fsdp2", "ddp", "megatron_fsdp"]

_DTYPE_NAMES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "float64")

_ALIASES: dict[str, Strategy] = {"megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    """Sub-section `distributed.mp_policy`: dtypes by name, such as `bfloat16` or `float32`.

    FSDP2 gathers parameters in `param_dtype` and computes in it, while each rank keeps its shard in the dtype that the
    model was built with. DDP and a single process compute in it by autocast; the other keys are FSDP2's alone.
    """

    param_dtype: str | None = setting(None, "dtype of the computation; null: bfloat16 where the device is fast in it")
    reduce_dtype: str | None = setting(None, "dtype in which FSDP2 reduces gradients; null: float32")
    output_dtype: str | None = setting(None, "dtype of the outputs of FSDP2 units; null: as computed")
    cast_forward_inputs: bool = setting(True, "cast floating inputs of FSDP2 units to param_dtype")

    def __post_init__(self) -> None:
        for name in ("reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and value.removeprefix("torch.") not in _DTYPE_NAMES:
                raise refuse(f"distributed.mp_policy.{name}", value, f"null or one of {', '.join(_DTYPE_NAMES)}")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Sub-section `distributed.offload_policy`."""

    pin_memory: bool = setting(True, "pin the host memory where there is a GPU, so that copies overlap")


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """How many ranks each dimension of the job has; their product is the number of processes."""

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def data(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Recipe section `distributed`: the strategy and the sizes of its dimensions."""

    strategy: Literal["fsdp2", "ddp", "megatron_fsdp", "megatron-fsdp", "mfsdp"] = setting(
        "fsdp2", "how ranks share the model; a single process holds it whole"
    )
    dp_size: int | None = setting(None, "data-parallel ranks; null: all that the other sizes leave")
    dp_replicate_size: int | None = setting(None, "replicas of the sharded model (HSDP); null: one")
    tp_size: int | None = setting(None, "tensor-parallel ranks", off=(None, 1))
    pp_size: int | None = setting(None, "pipeline stages", off=(None, 1))
    cp_size: int | None = setting(None, "context-parallel ranks", off=(None, 1))
    ep_size: int | None = setting(None, "expert-parallel ranks", off=(None, 1))
    sequence_parallel: bool | None = setting(None, "shard activations along the sequence", off=(None, False))
    activation_checkpointing: bool | Literal["full", "selective"] | None = setting(
        None, "recompute blocks in the backward pass: full (true), or selective (matrix products are kept)"
    )
    pipeline: ConfigNode | None = setting(None, "options of pipeline parallelism; no effect while pp_size is 1")
    moe: ConfigNode | None = setting(None, "options of expert parallelism; no effect while ep_size is 1")
    multimodal: ConfigNode | None = setting(None, "options for frozen towers; no effect on a text model")
    defer_fsdp_grad_sync: bool | None = setting(
        None, "reduce gradients once per step (true, null), or after every pass, which takes less memory"
    )
    enable_async_tensor_parallel: bool | None = setting(None, "overlap tensor-parallel collectives", off=(None, False))
    enable_fsdp2_prefetch: bool | None = setting(
        None, "FSDP2 gathers the next blocks while one computes; each takes the memory of a whole block"
    )
    fsdp2_forward_prefetch_depth: int | None = setting(None, "blocks to gather ahead in the forward pass; null: one")
    fsdp2_backward_prefetch_depth: int | None = setting(None, "blocks to gather ahead in the backward pass; null: one")
    enable_compile: bool | None = setting(None, "compile each block with torch.compile")
    patch_is_packed_sequence: bool | None = setting(None, "no effect: sequences are not packed")
    mp_policy: MixedPrecisionConfig = setting(help="dtypes of computation", factory=MixedPrecisionConfig)
    reshard_after_forward: bool | None = setting(
        None, "FSDP2 frees a block's gathered parameters after its forward pass (true, null)"
    )
    offload_policy: bool | OffloadConfig | None = setting(
        None, "FSDP2 keeps parameters, gradients and optimizer state in host memory: true, or a mapping"
    )

    def __post_init__(self) -> None:
        depths = ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")
        for name in ("dp_size", "dp_replicate_size", *depths):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refuse(f"distributed.{name}", value, "positive or null")
        if self.dp_replicate > 1 and self.strategy_name == "ddp":
            raise refuse(
                "distributed.dp_replicate_size", self.dp_replicate, "1 or null with ddp, which only replicates"
            )
        if self.offloading is not None and self.strategy_name != "fsdp2":
            raise refuse("distributed.offload_policy", self.offload_policy, f"null with strategy {self.strategy}")

    @property
    def strategy_name(self) -> Strategy:
        """The strategy, whichever of its spellings the recipe has."""
        match self.strategy:
            case "fsdp2" | "ddp" | "megatron_fsdp":
                return self.strategy
            case _:
                return _ALIASES[self.strategy]

    @property
    def dp_replicate(self) -> int:
        """Replicas of the sharded model."""
        return self.dp_replicate_size or 1

    @property
    def offloading(self) -> OffloadConfig | None:
        """How parameters are kept in host memory; None: they are not."""
        if isinstance(self.offload_policy, OffloadConfig):
            return self.offload_policy
        return OffloadConfig() if self.offload_policy else None

    @property
    def checkpointing_mode(self) -> Literal["full", "selective"] | None:
        """Which activations are recomputed; None: none."""
        match self.activation_checkpointing:
            case True:
                return "full"
            case "full" | "selective":
                return self.activation_checkpointing
            case _:
                return None

    def ignored_options(self, world_size: int) -> list[str]:
        """The keys that ask for something which this strategy, or a single process, does not do."""
        if world_size == 1:
            asked = {"offload_policy": self.offloading is not None}
        elif self.strategy_name == "fsdp2":
            depths = ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")
            asked = {name: getattr(self, name) is not None and not self.enable_fsdp2_prefetch for name in depths}
        else:
            asked = {
                "enable_fsdp2_prefetch": bool(self.enable_fsdp2_prefetch),
                "reshard_after_forward": self.reshard_after_forward is not None,
                "mp_policy.output_dtype": self.mp_policy.output_dtype is not None,
                "mp_policy.reduce_dtype": self.strategy_name == "ddp" and self.mp_policy.reduce_dtype is not None,
            }
        return [f"distributed.{name}" for name, is_asked in asked.items() if is_asked]

    def sizes(self, world_size: int) -> ParallelSizes:
        """Divide the processes into dimensions, before any model is built.

        Raises:
            ValueError: dp_size is another number than the processes make up, or the replicas do not divide it.
        """
        if self.dp_size is not None and self.dp_size != world_size:
            raise refuse("distributed.dp_size", self.dp_size, f"null or the number of processes ({world_size})")
        if self.strategy_name == "ddp":
            return ParallelSizes(dp_replicate=world_size)
        if world_size % self.dp_replicate:
            expected = f"a divisor of the number of processes ({world_size})"
            raise refuse("distributed.dp_replicate_size", self.dp_replicate, expected)
        return ParallelSizes(dp_replicate=self.dp_replicate, dp_shard=world_size // self.dp_replicate)


def describe_ranks(sizes: ParallelSizes, config: DistributedConfig) -> str:
    """How the processes share the work, in a few words for people."""
    if sizes.data == 1:
        return "1"
    match config.strategy_name:
        case "ddp":
            how = "DDP, a whole model on each"
        case "megatron_fsdp":
            how = f"Megatron-FSDP, {sizes.dp_replicate} x {sizes.dp_shard}"
        case "fsdp2" if sizes.dp_replicate > 1:
            how = f"HSDP, {sizes.dp_replicate} replicas of {sizes.dp_shard} shards"
        case _:
            how = "FSDP2, sharded over all"
    return f"{sizes.data} ({how})"


@dataclass(frozen=True, kw_only=True)
class DistEnvConfig:
    """Recipe section `dist_env`; a single process makes no process group."""

    backend: str | None = setting(None, "backend of the process group; null: chosen by the device")
    timeout_minutes: float = setting(10.0, "minutes after which a missing rank or a collective is given up")

    def __post_init__(self) -> None:
        if not self.timeout_minutes > 0:
            raise refuse("dist_env.timeout_minutes", self.timeout_minutes, "positive")
