"""FSDP2 over real ranks: what is sharded with what, and from whose values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automodel.distributed.config import DistributedConfig
from automodel.distributed.fsdp2 import Fsdp2
from automodel.distributed.mesh import build_mesh
from automodel.distributed.rank_group import RankGroup

CPU = torch.device("cpu")


class Router(nn.Module):
    seen = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, dtype=torch.float32))

    def forward(self, x):
        # The policy of its block is bfloat16; it keeps its own dtype.
        Router.seen = self.weight.dtype
        return torch.softmax(x.float() @ self.weight.T, -1).sum(-1, keepdim=True).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Router()
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.linear(x) * self.gate(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, dtype=torch.bfloat16)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def make(world_size, *, dtype=torch.float32, **values):
    config = DistributedConfig(**values)
    mesh = build_mesh(config.sizes(world_size), world=RankGroup(dist.group.WORLD), device_type="cpu")
    return Fsdp2(config, mesh=mesh, device=CPU, dtype=dtype)


def train_a_mixed_model(rank, world_size):
    torch.manual_seed(rank)
    strategy, model = make(world_size, dtype=torch.bfloat16), Model()
    assert strategy.shard(model) is model
    values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for last in (False, True):
        with strategy.micro_batch(model, is_last=last):
            (model(torch.arange(4) + rank).float().square().mean()).backward()
        # Not reduced before the last pass: sharded parameters have no gradient yet.
        assert all((parameter.grad is not None) == last for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    dtypes = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    return dtypes, {name: value.tolist() for name, value in values.items()}, str(Router.seen)


def test_a_router_in_float32_is_gathered_apart_and_rank_zeros_values_hold(ranks):
    (dtypes, values, seen), (_, others, _) = ranks.run(2, train_a_mixed_model)
    assert seen == "torch.float32"
    assert dtypes["layers.0.gate.weight"] == "torch.float32"
    assert dtypes["layers.0.linear.weight"] == "torch.bfloat16"
    assert values == others
    torch.manual_seed(0)
    assert values["head.weight"] == Model().head.weight.tolist()


def shard_a_module_of_two_dtypes(rank, world_size):
    model = Model()
    model.layers[0].linear.bias = nn.Parameter(torch.zeros(8, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"layers\.0\.linear holds trainable parameters of several dtypes"):
        make(world_size).shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_two_dtypes_in_one_module_are_refused_before_anything_is_sharded(ranks):
    ranks.run(2, shard_a_module_of_two_dtypes)


def placements(rank, world_size):
    model = Model()
    make(world_size, dp_replicate_size=2).shard(model)
    weight = model.head.weight
    return weight.device_mesh.mesh_dim_names, str(weight.placements), tuple(weight.to_local().shape)


def test_hsdp_shards_within_each_replica(ranks):
    expected = (("dp_replicate", "dp_shard"), "(Replicate(), Shard(dim=0))", (8, 8))
    assert ranks.run(4, placements) == [expected] * 4


def meta_to_memory(rank, world_size):
    with torch.device("meta"):
        model = Model()
    strategy = make(world_size)
    strategy.shard(model)
    strategy.materialize(model)
    return [(parameter.device.type, parameter.to_local().numel()) for parameter in model.parameters()]


def test_a_model_on_meta_gets_memory_for_its_shards_only(ranks):
    first, second = ranks.run(2, meta_to_memory)
    whole = [parameter.numel() for parameter in Model().parameters()]
    assert [one + other for (_, one), (_, other) in zip(first, second, strict=True)] == whole
    assert {device for device, _ in first} == {"cpu"}


def options_take_effect(rank, world_size):
    """What each option changes, with and without it."""
    seen = {}
    for name, values in {
        "default": {},
        "kept": {"reshard_after_forward": False},
        "every pass": {"defer_fsdp_grad_sync": False},
        "ahead": {"enable_fsdp2_prefetch": True},
        "offloaded": {"offload_policy": True},
    }.items():
        strategy, model = make(world_size, **values), Model()
        strategy.shard(model)
        with strategy.micro_batch(model, is_last=False):
            loss = model(torch.arange(4)).float().square().mean()
            whole = not isinstance(model.layers[0].linear.weight, DTensor)
            loss.backward()
        first = model.layers[0]._get_fsdp_state()
        seen[name] = {
            "whole after forward": whole,
            "reduced after a pass": model.head.weight.grad is not None,
            "forward": len(first._states_to_forward_prefetch),
            "backward": len(model.layers[1]._get_fsdp_state()._states_to_backward_prefetch),
            "offload": type(first._fsdp_param_group.offload_policy).__name__,
        }
    return seen


def test_options_take_effect(ranks):
    (seen, _) = ranks.run(2, options_take_effect)
    default = seen.pop("default")
    assert default == {
        "whole after forward": False,
        "reduced after a pass": False,
        "forward": 0,
        "backward": 0,
        "offload": "OffloadPolicy",
    }
    changed = {name: {key: value for key, value in one.items() if value != default[key]} for name, one in seen.items()}
    assert changed == {
        "kept": {"whole after forward": True},
        "every pass": {"reduced after a pass": True},
        "ahead": {"forward": 1, "backward": 1},
        "offloaded": {"offload": "CPUOffloadPolicy"},
    }


def refuse_what_cannot_be_sharded(rank, world_size):
    model = Model()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="parameter temperature is a scalar"):
        make(world_size).shard(model)
    model.temperature = nn.Parameter(torch.ones(4, 4).T[:2].T)
    with pytest.raises(ValueError, match="parameter temperature is not contiguous"):
        make(world_size).shard(model)


def test_what_cannot_be_sharded_is_refused_by_name(ranks):
    ranks.run(2, refuse_what_cannot_be_sharded)
