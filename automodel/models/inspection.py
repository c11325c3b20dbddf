"""What a model is made of, and what one training step of it keeps in memory."""

import inspect
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel.models.auto import quiet_kernel_fallbacks
from automodel.models.tied_weights import storage_identity, tensor_identity

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["PARAMETER_GROUPS", "ParameterSummary", "saved_activation_bytes", "summarize_parameters"]

logger = logging.getLogger(__name__)

PARAMETER_GROUPS = ("embedding", "attention", "linear_attention", "mlp", "other")

# Parts of the class and attribute names of the modules inside a decoder layer, the more telling ones first.
_NAME_PARTS = (
    ("linear_attention", ("mamba", "deltanet", "linear_attn", "linearattention", "ssm")),
    ("attention", ("attention", "attn")),
    ("mlp", ("mlp", "moe", "expert", "feedforward", "feed_forward", "ffn")),
)


@dataclass(frozen=True, kw_only=True)
class ParameterSummary:
    """The parameters of a model; tied ones count once.

    Args:
        total: Number of elements.
        trainable: Number of elements that require a gradient.
        num_bytes: Bytes in their present dtypes.
        by_group: Elements for each of `PARAMETER_GROUPS`: "embedding" holds the output head too, "linear_attention"
            Mamba and Gated DeltaNet layers, "mlp" experts too, "other" the norms between layers and the rest.
    """

    total: int
    trainable: int
    num_bytes: int
    by_group: dict[str, int]


def summarize_parameters(model: torch.nn.Module) -> ParameterSummary:
    """Count a model's parameters, on any device including meta."""
    modules = dict(model.named_modules())
    embeddings = _embedding_modules(model)
    seen: set[Hashable] = set()
    total = trainable = num_bytes = 0
    by_group = dict.fromkeys(PARAMETER_GROUPS, 0)
    for name, parameter in model.named_parameters():
        identity = tensor_identity(parameter)
        if parameter.numel() == 0 or identity in seen:
            continue
        seen.add(identity)
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        num_bytes += parameter.numel() * parameter.element_size()
        by_group[_group(name, modules, embeddings)] += parameter.numel()
    return ParameterSummary(total=total, trainable=trainable, num_bytes=num_bytes, by_group=by_group)


def saved_activation_bytes(
    model: torch.nn.Module, *, batch_size: int, context_length: int, autocast_dtype: torch.dtype | None = None
) -> int | None:
    """Estimate the bytes that one forward pass and its next-token loss keep for the backward pass.

    The pass runs on tensors without data, so that it takes no memory and the model may be on the meta device. Each
    storage that autograd saves counts once; parameters do not count, logits do. Temporaries of the backward pass,
    gradients and the optimizer's state are not in it.

    Args:
        model: A causal language model that takes `input_ids` [batch_size, context_length]; it is not changed.
        batch_size: Sequences in one forward pass.
        context_length: Tokens in each sequence.
        autocast_dtype: The dtype of autocast, or None for none.

    Returns:
        The bytes; None, with a line in the log, where the model's forward pass needs the data.
    """
    autocast = nullcontext() if autocast_dtype is None else torch.autocast("cpu", dtype=autocast_dtype)
    kept: dict[Hashable, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_identity(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    try:
        # Fake CPU tensors and not meta ones: attention masks are built by branches that ask tensors for values on the
        # meta device, and autocast does not exist there.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), quiet_kernel_fallbacks():
            state = _state_without_data(model)
            token_ids = torch.zeros(batch_size, context_length, dtype=torch.long)
            with hooks, autocast, torch.enable_grad():
                logits = _logits(model, state, token_ids)
                keep(logits)
                loss = F.cross_entropy(logits.float().flatten(0, 1), token_ids.flatten())
            del loss
            parameters = {storage_identity(tensor) for tensor in state.values()}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # A border: the model's own code runs here, and the estimate is a service, not a condition of training.
        logger.warning("no estimate of the activations: %s", " ".join(str(error).split())[:200])
        return None
    return sum(size for storage, size in kept.items() if storage not in parameters)


def _state_without_data(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors without data in place of the parameters and buffers; call it inside a FakeTensorMode."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        state[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        state[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return state


def _logits(model: torch.nn.Module, state: dict[str, torch.Tensor], token_ids: torch.Tensor) -> torch.Tensor:
    arguments: dict[str, Any] = {"input_ids": token_ids}
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    output = torch.func.functional_call(model, state, (), arguments)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


def _embedding_modules(model: torch.nn.Module) -> set[int]:
    """The ids of the input embedding and the output head, for models that say which modules these are."""
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    return {id(getter()) for getter in getters if getter is not None}


def _group(name: str, modules: dict[str, torch.nn.Module], embeddings: set[int]) -> str:
    """Find a parameter's group from the modules around it, the innermost first, up to its decoder layer."""
    path = name.rpartition(".")[0]
    owner = modules[path]
    if isinstance(owner, torch.nn.Embedding) or id(owner) in embeddings:
        return "embedding"
    while path and not isinstance(modules[path], PreTrainedModel | GradientCheckpointingLayer):
        label = f"{path.rpartition('.')[2]} {type(modules[path]).__name__}".lower()
        # A norm belongs to the module around it, whatever it is named after: post_attention_layernorm.
        groups = () if "norm" in label else _NAME_PARTS
        for group, parts in groups:
            if any(part in label for part in parts):
                return group
        path = path.rpartition(".")[0]
    return "other"
