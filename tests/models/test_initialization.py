import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.initialization import initialize
from automodel.models.weights import FreshWeights
from tiny_models import digests, empty_copy, hybrid_config, llama_config

CONFIGS = {
    "llama": llama_config(),
    "tied": llama_config(tie_word_embeddings=True),
    "hybrid": hybrid_config(),
    "moe": hybrid_config(layers_block_type=["mamba", "moe"]),
    "bfloat16": hybrid_config(dtype="bfloat16"),
}


def template_of(config):
    return build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": config})


def filled(config, *, seed=7, replicas=None):
    template = template_of(config)
    model = empty_copy(template, replicas=replicas)
    FreshWeights().fill(model, template, seed=seed)
    return model


def fill_on_ranks(rank, world_size, replicas):
    torch.manual_seed(rank)
    return {name: digests(filled(config, replicas=replicas)) for name, config in CONFIGS.items()}


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture(scope="module")
def one_process():
    return {name: digests(filled(config)) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_every_number_of_ranks_gets_the_same_values(ranks, one_process, world_size, replicas):
    for found in ranks.run(world_size, fill_on_ranks, replicas):
        assert found == one_process


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_gets_a_value_of_the_distribution_that_transformers_draws_from(name):
    config = CONFIGS[name]
    model, reference = filled(config), AutoModelForCausalLM.from_config(copy.deepcopy(config))
    ours, theirs = tensors(model), tensors(reference)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert tensor.isfinite().all(), key
        if tensor.numel() < 100:
            continue
        # Constants and rotary frequencies are equal; of draws the spread is: 100 numbers give it within a third.
        spread, expected = tensor.float().std(), theirs[key].float().std()
        assert torch.equal(tensor, theirs[key]) or 0.6 < spread / expected < 1.6, key


def test_constants_and_rotary_frequencies_are_exact():
    model, reference = filled(CONFIGS["llama"]), AutoModelForCausalLM.from_config(llama_config())
    for name in ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"):
        assert torch.equal(model.get_buffer(name), reference.get_buffer(name))
    hybrid, reference = filled(CONFIGS["hybrid"]), AutoModelForCausalLM.from_config(hybrid_config())
    for name in ("A_log", "D", "conv1d.bias", "norm.weight"):
        assert torch.equal(
            hybrid.model.layers[0].mixer.get_parameter(name), reference.model.layers[0].mixer.get_parameter(name)
        )


def test_a_parent_may_change_what_its_child_got():
    # NemotronH draws the output projection of its mixers anew, with another spread.
    plain = filled(hybrid_config(rescale_prenorm_residual=False))
    rescaled = filled(hybrid_config(rescale_prenorm_residual=True))
    name = "model.layers.0.mixer.out_proj.weight"
    assert not torch.equal(plain.get_parameter(name), rescaled.get_parameter(name))
    assert rescaled.get_parameter(name).abs().max() <= 1 / (24 * 3) ** 0.5


def test_values_depend_on_the_seed_and_on_the_name_alone():
    first, second = filled(llama_config()), filled(llama_config(), seed=8)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    shallow = filled(llama_config(num_hidden_layers=1))
    assert all(torch.equal(value, tensors(first)[name]) for name, value in tensors(shallow).items())
    layers = first.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)


def test_tied_tensors_are_initialised_once_as_the_embedding_is():
    model = filled(CONFIGS["tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, filled(CONFIGS["llama"]).model.embed_tokens.weight)
    padding = model.model.embed_tokens.padding_idx
    assert padding == 3
    assert not model.lm_head.weight[padding].any()
    assert model.lm_head.weight[padding + 1].all()


def test_random_state_and_template_are_left_as_they_were():
    template = template_of(CONFIGS["hybrid"])
    before = {name: (tensor, id(tensor)) for name, tensor in tensors(template).items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    initialize(template, seed=1, store=lambda name, value: None)
    initialize(template, seed=1, store=lambda name, value: None, names=["lm_head.weight"])
    assert torch.equal(torch.get_rng_state(), state)
    after = tensors(template)
    for name, (tensor, identity) in before.items():
        assert id(after[name]) == identity
        assert tensor.is_meta
        assert not hasattr(tensor, "_is_hf_initialized")


def test_one_block_at_a_time_has_memory():
    template = template_of(llama_config())
    seen = []

    def store(name, value):
        seen.append(name)
        assert all(parameter.is_meta for parameter in template.parameters())

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        """Notes which blocks have memory whenever something is drawn."""

        def __init__(self):
            super().__init__()
            self.together = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.normal_.default and not args[0].is_meta:
                names = {name for name, tensor in template.named_parameters() if not tensor.is_meta}
                self.together.append({".".join(name.split(".")[:3]) for name in names})
            return function(*args, **kwargs or {})

    with Watch() as watch:
        initialize(template, seed=1, store=store)
    assert sorted(seen) == sorted(tensors(template))
    assert len(watch.together) == 3 * 7 + 2
    assert all(len(blocks) == 1 for blocks in watch.together)


def test_some_names_get_the_values_that_all_of_them_would():
    whole, part = {}, {}
    template = template_of(CONFIGS["hybrid"])
    initialize(template, seed=1, store=lambda name, value: whole.update({name: value.clone()}))
    names = ["lm_head.weight", "model.layers.0.mixer.dt_bias", "model.norm_f.weight"]
    initialize(template, seed=1, store=lambda name, value: part.update({name: value.clone()}), names=names)
    assert sorted(part) == names
    assert all(torch.equal(part[name], whole[name]) for name in names)


class FromAbove(LlamaForCausalLM):
    """Sets a parameter of its blocks when it is itself initialised."""

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            for layer in self.model.layers:
                nn.init.constant_(layer.input_layernorm.weight, 0.25)


def test_an_outer_module_may_set_parameters_of_the_blocks():
    with torch.device("meta"):
        template = FromAbove(llama_config())
    model = empty_copy(template)
    FreshWeights().fill(model, template, seed=7)
    assert all((layer.input_layernorm.weight == 0.25).all() for layer in model.model.layers)
    assert torch.equal(model.lm_head.weight, filled(llama_config()).lm_head.weight)


class Forgetful(LlamaForCausalLM):
    """Has a parameter that its initialisation does not know of."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Parameter(torch.empty(2))


class Clumsy(LlamaForCausalLM):
    """Cannot initialise its head."""

    def _init_weights(self, module):
        if module is self.lm_head:
            raise AttributeError("no such thing")
        super()._init_weights(module)


class Counting(LlamaForCausalLM):
    """Has a buffer of integers that only its construction sets."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("counts", torch.arange(3), persistent=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetful, "Forgetful leaves extra .of a Forgetful. without values"),
        (Counting, "Counting leaves counts .of a Counting. without values"),
        (Clumsy, "Clumsy._init_weights cannot initialise lm_head .a Linear.: AttributeError: no such thing"),
    ],
)
def test_a_class_that_cannot_initialise_itself_is_refused(kind, message):
    with torch.device("meta"):
        template = kind(llama_config())
    before = list(template.parameters())
    with pytest.raises(ValueError, match=message):
        initialize(template, seed=1, store=lambda name, value: None)
    assert all(one is other for one, other in zip(before, template.parameters(), strict=True))


def test_only_models_of_transformers_can_be_initialised():
    with pytest.raises(ValueError, match=r"only transformers models .* got Linear"):
        initialize(nn.Linear(2, 2, device="meta"), seed=1, store=lambda name, value: None)
