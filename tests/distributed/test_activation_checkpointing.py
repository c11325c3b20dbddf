import copy
import gc
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from automodel.distributed.activation_checkpointing import checkpoint_blocks
from automodel.distributed.units import find_blocks, find_units

MODES = ("full", "selective")


class Block(nn.Module):
    """Attention, dropout, a keyword argument and two outputs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.calls = 0

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states and their mean."""
        self.calls += 1
        query, key, value = self.qkv(hidden).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        mixed = nn.functional.dropout(mixed.sin(), 0.3, self.training)
        hidden = hidden + self.out(nn.functional.gelu(mixed) * scale)
        return hidden, hidden.mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        total = hidden.new_zeros(())
        for block in self.blocks:
            hidden, mean = block(hidden, scale=self.scale)
            total = total + mean
        return hidden.float().square().mean() + total.float()


def pair(mode: str) -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    checkpoint_blocks(find_blocks(model), mode=mode)
    return plain, model


def token_ids(rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * 6).reshape(rows, 6) % 11


def loss_and_gradients(model: nn.Module, ids: torch.Tensor, *, autocast: bool = False):
    """The values with the random numbers of seed 1, and what the generator draws after the backward pass."""
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(ids)
    torch.rand(5)
    loss.backward()
    values = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), values, torch.rand(())


def kept_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    """Bytes between forward and backward pass: what autograd saves, and what Python still holds, parameters aside."""
    gc.collect()
    before = {one.untyped_storage().data_ptr() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    before |= {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids)
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    loss.backward()
    return sum(size for pointer, size in kept.items() if pointer not in before)


def sharded_values(rank, world_size, mode, how):
    plain, model = pair(mode)
    expected = loss_and_gradients(plain, token_ids(4)[2 * rank : 2 * rank + 2])
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (world_size,))
        for unit in find_units(model):
            fully_shard(unit.module, mesh=mesh)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model)
    loss, gradients, draw = loss_and_gradients(wrapped, token_ids(4)[2 * rank : 2 * rank + 2])
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(draw, expected[2])
    for name, value in expected[1].items():
        dist.all_reduce(value)
        got = gradients[name.removeprefix("module.") if how == "fsdp2" else f"module.{name}"]
        got = got.full_tensor() if how == "fsdp2" else got
        torch.testing.assert_close(got, value / world_size)
    return [block.calls for block in model.blocks]


def mixed_precision_is_kept(rank, world_size):
    seen = []

    class Watch(Block):
        def forward(self, hidden, *, scale):
            seen.append((hidden.dtype, self.qkv.weight.dtype, type(self.qkv.weight).__name__))
            return super().forward(hidden, scale=scale)

    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList([Watch()])
    checkpoint_blocks(find_blocks(model), mode="full")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in find_units(model):
        fully_shard(unit.module, mp_policy=policy)
    model(token_ids()).backward()
    return seen


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_the_same(mode, autocast):
    plain, model = pair(mode)
    expected = loss_and_gradients(plain, token_ids(), autocast=autocast)
    got = loss_and_gradients(model, token_ids(), autocast=autocast)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_each_mode_keeps_less():
    # Enough rows that the generator's state, 5 KB a block, does not count.
    ids = token_ids(200)
    sizes = {mode: kept_bytes(pair(mode)[1], ids) for mode in MODES}
    none = kept_bytes(pair("full")[0], ids)
    assert sizes["full"] < 0.5 * none
    assert sizes["full"] < sizes["selective"] < 0.9 * none


def test_selective_recomputes_no_matrix_product():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    counts = {}
    for mode in (None, *MODES):
        plain, model = pair(mode or "full")
        model = model if mode else plain
        loss = model(token_ids())
        with Count() as count:
            loss.backward()
        names = count.names
        counts[mode] = (
            sum(name in ("aten::mm", "aten::addmm") for name in names),
            names.count("aten::_scaled_dot_product_flash_attention_for_cpu"),
            names.count("aten::sin"),
        )
    products, _, _ = counts[None]
    assert counts[None] == (products, 0, 0)
    # The last linear layer's result is not needed for gradients: recomputation stops before it.
    assert counts["full"] == (products + 3, 3, 3)
    assert counts["selective"] == (products, 0, 3)


@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
@pytest.mark.parametrize("mode", MODES)
def test_under_data_parallelism(ranks, mode, how):
    assert ranks.run(2, sharded_values, mode, how) == [[2, 2, 2], [2, 2, 2]]


def test_recomputation_has_fsdps_gathered_and_cast_parameters(ranks):
    for seen in ranks.run(2, mixed_precision_is_kept):
        assert seen == [(torch.bfloat16, torch.bfloat16, "Parameter")] * 2


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_recomputed_without_gradients_or_in_evaluation(mode):
    plain, model = pair(mode)
    with torch.no_grad():
        model(token_ids())
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    model.eval()
    loss = model(token_ids())
    loss.backward()
    assert [block.calls for block in model.blocks] == [2, 2, 2]
    torch.testing.assert_close(loss, plain.eval()(token_ids()))


def test_names_in_the_state_dict_and_the_signature_stay():
    plain, model = pair("full")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_recomputes_with_its_own_parameters(mode):
    plain, model = pair(mode)
    twin = copy.deepcopy(model)
    for each in (plain, twin):
        with torch.no_grad():
            each.blocks[0].qkv.weight.mul_(2.0)
    expected = loss_and_gradients(plain, token_ids())
    torch.testing.assert_close(loss_and_gradients(twin, token_ids()), expected, rtol=0, atol=0)
    assert [block.calls for block in twin.blocks] == [2, 2, 2]
    assert [block.calls for block in model.blocks] == [0, 0, 0]


def tiny_llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**keys, num_attention_heads=2, max_position_embeddings=16, **changes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("mode", MODES)
def test_estimate_without_data_sees_the_smaller_number(mode):
    from automodel.models.inspection import saved_activation_bytes

    with torch.device("meta"):
        model = tiny_llama(use_cache=False).train()
    before = saved_activation_bytes(model, batch_size=2, context_length=16)
    checkpoint_blocks(find_blocks(model), mode=mode)
    after = saved_activation_bytes(model, batch_size=2, context_length=16)
    assert after is not None
    assert before is not None
    assert 0 < after < 0.5 * before


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_is_refused_in_training_and_served_otherwise(mode):
    model = tiny_llama(use_cache=True).train()
    checkpoint_blocks(find_blocks(model), mode=mode)
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer got a cache .* use_cache=False"):
        model(token_ids())
    model(token_ids(), use_cache=False).logits.sum().backward()
    assert model.eval().generate(token_ids(1), max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_blocks_are_checkpointed_once_and_refused_as_a_whole():
    _, model = pair("full")
    fresh = Block()
    forward = fresh.forward
    with pytest.raises(ValueError, match=r"block blocks\.0 recomputes its activations already"):
        checkpoint_blocks([("fresh", fresh), *find_blocks(model)], mode="selective")
    assert fresh.forward == forward
    with pytest.raises(ValueError, match="mode must be full or selective, got 'some'"):
        checkpoint_blocks([("fresh", fresh)], mode="some")  # type: ignore[arg-type]
