"""FSDP2 over real ranks: what is sharded with what, and from whose values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automodel.distributed.config import DistributedConfig
from automodel.distributed.fsdp2 import Fsdp2, parse_policy_dtype
from automodel.distributed.mesh import build_mesh
from automodel.distributed.rank_group import RankGroup

CPU = torch.device("cpu")


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, dtype=torch.float32))

    def forward(self, x):
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


def make(world_size, **values):
    config = DistributedConfig(**values)
    mesh = build_mesh(config.sizes(world_size), world=RankGroup(dist.group.WORLD), device_type="cpu")
    return Fsdp2(config, mesh=mesh, device=CPU, dtype=torch.float32)


def train_a_mixed_model(rank, world_size):
    torch.manual_seed(rank)
    strategy, model = make(world_size), Model()
    assert strategy.shard(model) is model
    values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for last in (False, True):
        with strategy.micro_batch(model, is_last=last):
            (model(torch.arange(4) + rank).float().square().mean()).backward()
        # Not reduced before the last pass: sharded parameters have no gradient yet.
        assert all((parameter.grad is not None) == last for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    dtypes = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    return dtypes, {name: value.tolist() for name, value in values.items()}


def test_a_router_in_float32_is_gathered_apart_and_rank_zeros_values_hold(ranks):
    (dtypes, values), (_, others) = ranks.run(2, train_a_mixed_model)
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


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("torch.float32", torch.float32), (None, None)])
def test_policy_dtypes(name, dtype):
    assert parse_policy_dtype(name, name="reduce_dtype") == dtype


@pytest.mark.parametrize("name", ["int8", "floaty"])
def test_an_unknown_policy_dtype_is_refused(name):
    with pytest.raises(ValueError, match=rf"distributed\.mp_policy\.reduce_dtype must name a .*, got '{name}'"):
        parse_policy_dtype(name, name="reduce_dtype")
