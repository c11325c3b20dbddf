import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from automodel.distributed.units import Unit, bytes_per_rank, describe_units, find_blocks, find_units

COMMON = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
CONFIGS = {
    "llama": {**COMMON, **HEADS, "num_hidden_layers": 2, "head_dim": 8},
    "nemotron_h": {
        **COMMON,
        **HEADS,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "qwen3_next": {
        **COMMON,
        **HEADS,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "mamba2": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
    },
    "bamba": {**COMMON, **HEADS, **MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "zamba2": {
        **COMMON,
        **HEADS,
        "num_hidden_layers": 6,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "hybrid_layer_ids": [1, 3, 5],
        "layers_block_type": ["mamba", "hybrid"] * 3,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "granitemoehybrid": {
        **COMMON,
        **HEADS,
        **MAMBA,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
# The names of each model's units, in order; blocks by number.
UNITS = {
    "llama": ("model.layers", [0, 1], ["model.embed_tokens", "lm_head", ""]),
    "nemotron_h": ("model.layers", [0, 1, 2, 3], ["model.embeddings", "lm_head", ""]),
    "qwen3_next": ("model.layers", [0, 1, 2, 3], ["model.embed_tokens", "lm_head", ""]),
    "mamba2": ("backbone.layers", [0, 1], ["backbone.embeddings", "lm_head", ""]),
    "bamba": ("model.layers", [0, 1], ["model.embed_tokens", "lm_head", ""]),
    # The hybrid layers share a transformer; embedding and head are tied.
    "zamba2": ("model.layers", [0, 2, 4], [""]),
    "granitemoehybrid": ("model.layers", [0, 1], ["model.embed_tokens", "lm_head", ""]),
    "gpt2": ("transformer.h", [0, 1], [""]),
}


def build(kind: str, *, device: str = "meta") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + sum(expert(hidden) for expert in self.experts)


class Plain(nn.Module):
    """A language model that says nothing of itself."""

    def __init__(self, *, tied: bool = False, blocks: nn.Module | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), nn.Identity(), Block()]) if blocks is None else blocks
        self.norm = nn.LayerNorm(4)
        self.adapter = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.adapter(self.norm(hidden)))


class ScalarModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def managed_names(rank, world_size, kind):
    """What FSDP manages in each unit, as names in the model, and what `bytes_per_rank` says against what is held."""
    model = Plain() if kind == "plain" else build(kind)
    units = find_units(model)
    mesh = init_device_mesh("cpu", (world_size,))
    said = [bytes_per_rank(unit, shards=world_size) for unit in units]
    result = []
    for unit, size in zip(units, said, strict=True):
        before = set(model.parameters())
        fully_shard(unit.module, mesh=mesh)
        names = {name for name, parameter in model.named_parameters() if parameter not in before}
        local = {name: parameter.to_local() for name, parameter in model.named_parameters() if name in names}
        held = sum(shard.numel() * shard.element_size() for shard in local.values())
        result.append((sorted(unit.parameters), sorted(names), size, held, bytes_per_rank(unit, shards=world_size)))
    return result


@pytest.mark.parametrize("kind", CONFIGS)
def test_units_of_models(kind):
    model = build(kind)
    units = find_units(model)
    blocks, numbers, others = UNITS[kind]
    assert [unit.name for unit in units] == [f"{blocks}.{number}" for number in numbers] + others
    assert [unit.kind for unit in units] == ["block"] * len(numbers) + (
        ["embedding", "head", "root"] if len(others) == 3 else ["root"]
    )
    assert [unit.module for unit in units] == [model.get_submodule(unit.name) for unit in units]
    owned = [name for unit in units for name in unit.parameters]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert sum(unit.num_parameters for unit in units) == sum(one.numel() for one in model.parameters())
    assert sum(unit.num_bytes for unit in units) == bytes_per_rank(model, shards=1)


def test_blocks_include_those_that_share_parameters():
    assert [name for name, _ in find_blocks(build("zamba2"))] == [f"model.layers.{number}" for number in range(6)]


@pytest.mark.parametrize("kind", [*CONFIGS, "plain"])
def test_fsdp_manages_each_units_parameters(ranks, kind):
    for result in ranks.run(2, managed_names, kind):
        for own, managed, _, _, _ in result:
            assert own == managed


def test_bytes_per_rank_are_what_the_first_rank_holds(ranks):
    for kind in ("llama", "plain"):
        results = ranks.run(2, managed_names, kind)
        for said, held, after in [entry[2:] for entry in results[0]]:
            assert said == held == after
        # Seven rows: the second rank holds fewer.
        assert sum(entry[3] for entry in results[1]) <= sum(entry[3] for entry in results[0])


def test_units_of_a_plain_module():
    model = Plain()
    units = {unit.name: unit for unit in find_units(model)}
    assert list(units) == ["blocks.0", "blocks.2", "table", "out", ""]
    assert units[""].parameters == ("norm.weight", "norm.bias", "adapter.weight", "adapter.bias")
    assert units["out"].num_parameters == 7 * 4 + 7
    assert units["out"].num_bytes == 4 * (7 * 4 + 7)


def test_tied_embeddings_stay_with_the_root():
    units = find_units(Plain(tied=True))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.2", ""]
    assert {"table.weight", "out.bias"} <= set(units[-1].parameters)


def test_a_model_that_says_it_has_no_head():
    class Headless(Plain):
        def get_input_embeddings(self):
            return self.table

        def get_output_embeddings(self):
            return None

    assert [unit.name for unit in find_units(Headless())] == ["blocks.0", "blocks.2", "table", ""]


def test_getters_that_are_not_implemented_count_as_missing():
    class Silent(Plain):
        def get_input_embeddings(self):
            raise NotImplementedError

    assert [unit.kind for unit in find_units(Silent())] == ["block", "block", "embedding", "head", "root"]


def test_blocks_that_share_one_parameter_are_no_units():
    first, second, third = Block(), Block(), Block()
    second.experts[1].weight = first.experts[0].weight
    model = Plain(blocks=nn.ModuleList([first, second, third]))
    assert [unit.name for unit in find_units(model) if unit.kind == "block"] == ["blocks.2"]


def test_a_block_that_shares_parameters_within_itself_is_a_unit():
    block = Block()
    block.experts[1].weight = block.experts[0].weight
    units = find_units(Plain(blocks=nn.ModuleList([block])))
    assert units[0].parameters == ("blocks.0.experts.0.weight", "blocks.0.experts.0.bias", "blocks.0.experts.1.bias")


def test_a_block_that_is_listed_twice_comes_once_and_stays_with_the_root():
    block = Block()
    model = Plain(blocks=nn.ModuleList([block, block]))
    assert [name for name, _ in find_blocks(model)] == ["blocks.0"]
    assert [unit.kind for unit in find_units(model)] == ["embedding", "head", "root"]


def test_lists_of_lists_and_several_lists():
    tower = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": Block()})])
    model = nn.ModuleDict({"vision": tower, "text": nn.Sequential(nn.ModuleList([Block()]))})
    assert [name for name, _ in find_blocks(model)] == ["vision.0.0", "vision.0.1", "vision.1.a", "text.0.0"]


def test_a_model_without_blocks():
    assert [(unit.name, unit.kind) for unit in find_units(nn.Linear(2, 3))] == [("", "root")]
    assert find_blocks(nn.Linear(2, 3)) == []


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_bytes_per_rank_follow_chunk(rows, shards):
    model = nn.ParameterList([nn.Parameter(torch.empty(rows, 3, dtype=torch.bfloat16))])
    largest = max(chunk.numel() for chunk in torch.empty(rows, 3).chunk(shards))
    assert bytes_per_rank(model, shards=shards) == 2 * largest


def test_bytes_per_rank_of_several_dtypes():
    parameters = [torch.empty(5, 2), torch.empty(3, dtype=torch.float64)]
    model = nn.ParameterList([nn.Parameter(value) for value in parameters])
    assert bytes_per_rank(model, shards=2) == 3 * 2 * 4 + 2 * 8


def test_scalars_cannot_be_sharded():
    assert bytes_per_rank(ScalarModel(), shards=1) == 4
    with pytest.raises(ValueError, match=r"^parameter scale is a scalar"):
        bytes_per_rank(ScalarModel(), shards=2)
    with pytest.raises(ValueError, match="shards must be positive, got 0"):
        bytes_per_rank(ScalarModel(), shards=0)


def test_description_folds_equal_blocks():
    lines = describe_units(find_units(build("nemotron_h")), shards=2)
    assert len(lines) == 6
    assert lines[0].startswith("2 x NemotronHBlock (model.layers.0, 3)  ")
    assert lines[0].endswith(" per rank each")
    assert lines[1].startswith("NemotronHBlock (model.layers.1)  ")
    assert lines[3] == "Embedding (embedding, model.embeddings)  1.02 k parameters, 2.0 KiB per rank"
    assert lines[4] == "Linear (head, lm_head)  1.02 k parameters, 2.0 KiB per rank"
    assert lines[5] == "NemotronHForCausalLM (the rest)  16 parameters, 32 B per rank"


def test_description_of_many_alternating_blocks_is_short():
    blocks = nn.ModuleList([Block(4 + 2 * (number % 2)) for number in range(40)])
    lines = describe_units(find_units(Plain(blocks=blocks)), shards=1)
    assert lines[0] == "20 x Block (blocks.0, 2, 4, 6, 8, 10, ..., 38)  40 parameters each, 160 B per rank each"
    assert lines[1].startswith("20 x Block (blocks.1, 3,")
    runs = nn.ModuleList([Block() for _ in range(12)])
    assert describe_units(find_units(Plain(blocks=runs)), shards=1)[0].startswith("12 x Block (blocks.0-11)  ")


def test_description_tells_dtypes_apart():
    model = Plain(blocks=nn.ModuleList([Block(), Block().bfloat16()]))
    lines = describe_units(find_units(model), shards=1)
    assert lines[0] == "Block (blocks.0)  40 parameters, 160 B per rank"
    assert lines[1] == "Block (blocks.1)  40 parameters, 80 B per rank"


def test_description_of_a_large_unit():
    with torch.device("meta"):
        model = nn.Linear(2**16, 2**15, bias=False)
    unit: Unit = find_units(model)[0]
    assert bytes_per_rank(unit, shards=3) == math.ceil(2**15 / 3) * 2**18
    assert describe_units([unit], shards=8) == ["Linear (the rest)  2.15 B parameters, 1.0 GiB per rank"]
