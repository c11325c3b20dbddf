"""Tiny models for tests with several ranks: configurations, sharded copies, and digests that tell values apart."""

import copy
import hashlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, NemotronHConfig

__all__ = ["digests", "empty_copy", "hybrid_config", "llama_config", "poison", "shard"]


def llama_config(**changes):
    keys = {
        "vocab_size": 37,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 3,
    }
    return LlamaConfig(**keys | changes)


def hybrid_config(**changes):
    keys = {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "mamba_num_heads": 3,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 3,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    }
    return NemotronHConfig(**keys | changes)


def shard(model, *, replicas=1):
    """Shards each block and the root over all ranks, or within each of several replicas."""
    world_size = torch.distributed.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    else:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=names)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def empty_copy(template, *, replicas=None):
    """A copy with memory and no values, whole or sharded."""
    model = copy.deepcopy(template)
    if replicas is not None:
        shard(model, replicas=replicas)
    model.to_empty(device="cpu")
    poison(model)
    return model


@torch.no_grad()
def poison(model):
    """Fills everything, each rank its part, with values that must not be left over."""
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor
        local.fill_(float("nan") if tensor.is_floating_point() else 99)


def digests(model):
    """A short text for every parameter and buffer, equal exactly where dtype, shape and all bits are."""
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data = whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name] = f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    return found
