import copy
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from automodel.distributed.activation_checkpointing import checkpoint_blocks
from automodel.distributed.block_compile import compile_blocks
from automodel.distributed.units import find_blocks, find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden))) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return hidden.square().mean()


class Graphs:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


def pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Model()
    return plain, copy.deepcopy(plain)


def values(model: nn.Module, hidden: torch.Tensor):
    loss = model(hidden)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def sharded_llama(rank, world_size, backend, mode):
    """A llama that recomputes, is compiled and then sharded, against a plain one on the same data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    keys = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    plain = LlamaForCausalLM(LlamaConfig(**keys, num_attention_heads=2, use_cache=False)).train()
    model = copy.deepcopy(plain)
    graphs = Graphs()
    if mode is not None:
        checkpoint_blocks(find_blocks(model), mode=mode)
    compile_blocks(find_blocks(model), backend=graphs if backend == "count" else backend)
    mesh = init_device_mesh("cpu", (world_size,))
    for unit in find_units(model):
        fully_shard(unit.module, mesh=mesh)
    assert list(model.state_dict()) == list(plain.state_dict())
    for step in range(2):
        ids = torch.arange(12).reshape(2, 6) * (step + 3) % 32
        losses = []
        for each in (plain, model):
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
    for (name, sharded), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, msg=name)
    return len(graphs.graphs)


def test_values_gradients_and_one_graph_for_equal_blocks():
    plain, model = pair()
    graphs = Graphs()
    compile_blocks(find_blocks(model), backend=graphs)
    # With gradients, as the blocks after the first one have them: another need for gradients is another graph.
    hidden = torch.ones(2, 8, requires_grad=True)
    torch.testing.assert_close(values(model, hidden), values(plain, hidden))
    assert len(graphs.graphs) == 1
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("mode", [None, "full", "selective"])
def test_with_recomputation(mode):
    plain, model = pair()
    if mode is not None:
        checkpoint_blocks(find_blocks(model), mode=mode)
    compile_blocks(find_blocks(model), backend="aot_eager")
    hidden = torch.randn(2, 8)
    torch.testing.assert_close(values(model, hidden), values(plain, hidden))
    model.eval()
    torch.testing.assert_close(values(model, hidden), values(plain, hidden))


@pytest.mark.parametrize("mode", [None, "full"])
def test_on_two_ranks_the_hooks_are_outside_the_graph(ranks, mode):
    assert ranks.run(2, sharded_llama, "count", mode, timeout=120) == [1, 1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    import torch._inductor.config

    plain, model = pair()
    compile_blocks([("blocks.0", model.blocks[0])])
    # The forward pass alone and no pool of compilers: a C++ compiler takes seconds for each piece of code.
    with torch._inductor.config.patch(compile_threads=1), torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))


def test_a_failure_names_the_block():
    def fail(graph, inputs):
        raise OSError("no space for code")

    _, model = pair()
    compile_blocks(find_blocks(model), backend=fail)
    with pytest.raises(RuntimeError, match=r"(?s)block blocks\.0 did not compile: .*no space for code"):
        model(torch.ones(2, 8))


def test_a_copy_compiles_its_own_parameters():
    plain, model = pair()
    compile_blocks(find_blocks(model), backend="eager")
    model(torch.ones(2, 8))
    twin = copy.deepcopy(model)
    for each in (plain, twin):
        with torch.no_grad():
            each.blocks[0].up.weight.mul_(2.0)
    torch.testing.assert_close(values(twin, torch.ones(2, 8)), values(plain, torch.ones(2, 8)))


def test_blocks_are_compiled_once():
    _, model = pair()
    compile_blocks(find_blocks(model), backend="eager")
    with pytest.raises(ValueError, match=r"block blocks\.0 is compiled already"):
        compile_blocks(find_blocks(model))
