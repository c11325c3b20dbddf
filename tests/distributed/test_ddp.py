"""DDP over real ranks: whose values hold, when gradients are averaged, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from automodel.distributed.config import DistributedConfig
from automodel.distributed.ddp import Ddp, UnusedParameterError
from automodel.distributed.mesh import build_mesh
from automodel.distributed.rank_group import RankGroup

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("codes", torch.randint(0, 9, (3,), dtype=torch.int16))

    def forward(self, x, *, both=True):
        x = self.used(x) * self.scale
        return self.sometimes(x) if both else x


def make(world_size, **options):
    config = DistributedConfig(strategy="ddp")
    mesh = build_mesh(config.sizes(world_size), world=RankGroup(dist.group.WORLD), device_type="cpu")
    return Ddp(mesh=mesh, device=CPU, dtype=torch.float32, **{"defer_sync": True, **options})


def start_from_different_values(rank, world_size):
    torch.manual_seed(rank)
    model = Model()
    make(world_size).shard(model)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_rank_zeros_parameters_and_buffers_hold(ranks):
    first, second = ranks.run(2, start_from_different_values)
    assert first == second
    torch.manual_seed(0)
    assert first == {name: value.tolist() for name, value in Model().state_dict().items()}


def pass_twice(rank, world_size, defer):
    torch.manual_seed(0)
    model = Model()
    strategy = make(world_size, defer_sync=defer)
    module = strategy.shard(model)
    same = []
    for last in (False, True):
        with strategy.micro_batch(module, is_last=last):
            module(torch.full((1, 4), float(rank + 1))).sum().backward()
        gradients = RankGroup(dist.group.WORLD).all_gather(model.used.weight.grad.tolist())
        same.append(gradients[0] == gradients[1])
    return same


@pytest.mark.parametrize(("defer", "same"), [(True, [False, True]), (False, [True, True])])
def test_gradients_are_averaged_when_they_should_be(ranks, defer, same):
    assert ranks.run(2, pass_twice, defer) == [same] * 2


def leave_a_parameter_out(rank, world_size):
    strategy, model = make(world_size), Model()
    module = strategy.shard(model)
    with pytest.raises(UnusedParameterError, match="use strategy fsdp2"), strategy.micro_batch(module, is_last=True):
        module(torch.ones(1, 4), both=False).sum().backward()


def test_an_unused_parameter_is_an_error_before_the_optimizer_steps(ranks):
    ranks.run(2, leave_a_parameter_out)
