"""Parameter counts and the estimate of saved activations, against the real thing."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.multiprocessing.reductions import StorageWeakRef

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.inspection import PARAMETER_GROUPS, saved_activation_bytes, summarize_parameters

COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
LLAMA = {"model_type": "llama", **COMMON, "num_hidden_layers": 2}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    **COMMON,
    "layers_block_type": ["mamba", "mlp", "attention"],
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "chunk_size": 16,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    **COMMON,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
    "tie_word_embeddings": True,
}
HYBRIDS = [LLAMA, NEMOTRON_H, QWEN3_NEXT]


def model_type(config):
    return config["model_type"]


def on_meta(config, **arguments):
    return build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": config, **arguments})


class TestSummary:
    def test_groups_of_a_mamba_model(self):
        summary = summarize_parameters(on_meta(NEMOTRON_H))
        norm, inner, state, heads = 32, 32, 8, 4
        conv = inner + 2 * state
        mamba = (inner + conv + heads) * 32 + conv * (4 + 1) + 3 * heads + inner + inner * 32
        assert summary.by_group == {
            "embedding": 2 * 256 * 32,
            "attention": (32 + 16 + 16) * 32 + 32 * 32,
            "linear_attention": mamba,
            "mlp": 2 * 32 * 48,
            "other": 4 * norm,
        }
        assert tuple(summary.by_group) == PARAMETER_GROUPS

    @pytest.mark.parametrize("config", HYBRIDS, ids=model_type)
    def test_totals(self, config):
        model = NeMoAutoModelForCausalLM.from_config(config, torch_dtype="bfloat16")
        model.lm_head.weight.requires_grad_(False)
        summary = summarize_parameters(model)
        assert summary.total == sum(parameter.numel() for parameter in model.parameters())
        assert summary.total - summary.trainable == 256 * 32
        assert summary.num_bytes == 2 * summary.total
        assert sum(summary.by_group.values()) == summary.total
        assert summary == summarize_parameters_on_meta(config)

    def test_a_delta_net_layer_is_linear_attention(self):
        groups = summarize_parameters(on_meta(QWEN3_NEXT)).by_group
        # Tied: one table of embeddings. Two MLPs of three matrices. Norms: two a layer and the last.
        assert (groups["embedding"], groups["mlp"], groups["other"]) == (256 * 32, 2 * 3 * 32 * 48, 5 * 32)
        assert groups["attention"] > 0
        assert groups["linear_attention"] > 0

    def test_a_storage_under_two_parameters_counts_once(self):
        module = torch.nn.Module()
        module.one = torch.nn.Parameter(torch.zeros(5))
        module.two = torch.nn.Parameter(module.one.detach())
        module.none = torch.nn.Parameter(torch.zeros(0))
        assert summarize_parameters(module).total == 5


def summarize_parameters_on_meta(config):
    model = on_meta(config, torch_dtype="bfloat16")
    model.lm_head.weight.requires_grad_(False)
    return summarize_parameters(model)


def measured_bytes(model, token_ids, autocast_dtype):
    """The same count during a real forward pass."""
    kept = {}

    def keep(tensor):
        kept[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=autocast_dtype or torch.bfloat16, enabled=autocast_dtype is not None),
    ):
        logits = keep(model(input_ids=token_ids, use_cache=False).logits)
        F.cross_entropy(logits.float().flatten(0, 1), token_ids.flatten())
    parameters = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
    return sum(size for storage, size in kept.items() if storage not in parameters)


class TestSavedActivations:
    @pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
    @pytest.mark.parametrize("config", HYBRIDS, ids=model_type)
    def test_against_a_real_forward_pass(self, config, autocast_dtype):
        sizes = {"batch_size": 2, "context_length": 64}
        token_ids = torch.randint(0, 256, (2, 64))
        estimate = saved_activation_bytes(on_meta(config), **sizes, autocast_dtype=autocast_dtype)
        model = NeMoAutoModelForCausalLM.from_config(config)
        measured = measured_bytes(model, token_ids, autocast_dtype)
        # The attention kernel that runs on real tensors saves one copy of its output less.
        assert measured <= estimate <= 1.1 * measured
        assert saved_activation_bytes(model, **sizes, autocast_dtype=autocast_dtype) == estimate

    def test_the_model_and_the_random_state_stay_as_they_were(self):
        model = NeMoAutoModelForCausalLM.from_config({**LLAMA, "attention_dropout": 0.5})
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        random_state = torch.get_rng_state()
        assert saved_activation_bytes(model, batch_size=1, context_length=8) > 0
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_size_of_a_module_that_is_known_exactly(self):
        class Table(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.nn.Embedding(10, 10)

            def forward(self, input_ids):
                return self.table(input_ids)

        # The token ids [2, 3] in int64, and [6, 10] in float32 twice: the logits and the log-probabilities.
        scalar = 4
        size = saved_activation_bytes(Table(), batch_size=2, context_length=3)
        assert size == 6 * 8 + 2 * 60 * 4 + scalar

    def test_none_where_a_branch_needs_the_data(self, caplog):
        class Branching(torch.nn.Linear):
            def forward(self, input_ids):
                hidden = super().forward(input_ids[..., None].float())
                return hidden if hidden.sum() > 0 else -hidden

        assert saved_activation_bytes(Branching(1, 4), batch_size=1, context_length=2) is None
        assert "no estimate of the activations" in caplog.text
