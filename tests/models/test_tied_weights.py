"""Which state-dict keys name the same tensor, and where a model's embeddings are."""

import pytest
import torch

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.tied_weights import (
    find_input_embedding,
    find_output_embedding,
    shares_memory,
    tied_parameters,
)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("on_meta", [False, True])
def test_tied_head_of_a_model(on_meta):
    def build(**arguments):
        if on_meta:
            return build_on_meta(NeMoAutoModelForCausalLM.from_config, arguments)
        return NeMoAutoModelForCausalLM.from_config(**arguments)

    assert tied_parameters(build(config={**LLAMA, "tie_word_embeddings": True})) == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    assert tied_parameters(build(config={**LLAMA, "tie_word_embeddings": False})) == {}


class Shared(torch.nn.Module):
    """A head before the embedding, another view, a tied buffer, and parts of one storage that only touch."""

    def __init__(self, device):
        super().__init__()
        self.head = torch.nn.Linear(4, 6, bias=False, device=device)
        self.embedding = torch.nn.Embedding(6, 4, device=device)
        self.head.weight = self.embedding.weight
        self.again = torch.nn.Parameter(self.embedding.weight.detach())
        self.transposed = torch.nn.Parameter(self.embedding.weight.detach().t())
        flat = torch.zeros(8, device=device)
        self.left, self.right = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])
        self.register_buffer("left_buffer", flat[:4])
        self.none, self.nothing = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(0))

    def get_input_embeddings(self):
        return self.embedding


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_decides_and_the_input_embedding_is_kept(device):
    assert tied_parameters(Shared(device)) == {
        "head.weight": "embedding.weight",
        "again": "embedding.weight",
        "left_buffer": "left",
    }


def test_the_first_name_is_kept_without_an_input_embedding():
    model = Shared("cpu")
    model.get_input_embeddings = lambda: None
    assert tied_parameters(model) == {"head.weight": "again", "embedding.weight": "again", "left_buffer": "left"}


SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "llama": (LLAMA, "model.embed_tokens.weight", "lm_head.weight"),
    "gpt_neox": (
        {**SIZES, "model_type": "gpt_neox", "tie_word_embeddings": False},
        "gpt_neox.embed_in.weight",
        None,  # embed_out or lm_head, by the version of transformers
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "vocab_size": 32,
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "tie_word_embeddings": False,
        },
        "transformer.wte.weight",
        "lm_head.weight",
    ),
    "mamba2": (
        {
            "model_type": "mamba2",
            "vocab_size": 32,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_heads": 2,
            "head_dim": 8,
            "state_size": 4,
            "n_groups": 1,
            "tie_word_embeddings": False,
        },
        "backbone.embeddings.weight",
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_of_models(name):
    config, input_name, output_name = MODELS[name]
    model = build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": config})
    found, head = find_input_embedding(model), find_output_embedding(model)
    assert (found.name, head.name) == (input_name, output_name or head.name)
    assert found.weight is model.get_parameter(input_name)
    assert head.weight is model.get_parameter(head.name) is model.get_output_embeddings().weight
    assert found.padding_idx == model.get_submodule(input_name.removesuffix(".weight")).padding_idx


def test_a_tied_embedding_is_found_under_the_names_of_both_modules():
    model = build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": {**LLAMA, "tie_word_embeddings": True}})
    found, head = find_input_embedding(model), find_output_embedding(model)
    assert (found.name, head.name) == ("model.embed_tokens.weight", "lm_head.weight")
    assert found.weight is head.weight
    assert shares_memory(found.weight, head.weight)


class Plain(torch.nn.Module):
    """Modules by their dotted paths; no method says which are the embeddings."""

    def __init__(self, **modules):
        super().__init__()
        for path, module in modules.items():
            *above, last = path.split("__")
            parent = self
            for name in above:
                if not hasattr(parent, name):
                    parent.add_module(name, torch.nn.Module())
                parent = getattr(parent, name)
            parent.add_module(last, module)


def embedding(rows=6, columns=4, **arguments):
    return torch.nn.Embedding(rows, columns, **arguments)


def linear(rows=6, columns=4):
    return torch.nn.Linear(columns, rows, bias=False)


INPUT_NAMES = "embed_tokens wte embeddings embed_in word_embeddings tok_embeddings token_embedding embedding embed"


@pytest.mark.parametrize("name", INPUT_NAMES.split())
def test_an_input_embedding_is_found_by_its_usual_name(name):
    model = Plain(**{f"model__{name}": embedding(padding_idx=2), "lm_head": linear()})
    found = find_input_embedding(model)
    assert (found.name, found.padding_idx) == (f"model.{name}.weight", 2)
    assert found.weight is model.get_parameter(found.name)


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "output_layer", "output_projection", "output", "head"])
def test_an_output_embedding_is_found_by_its_usual_name(name):
    model = Plain(wte=embedding(), lm_head_norm=torch.nn.LayerNorm(4), **{f"model__{name}": linear()})
    assert find_output_embedding(model).name == f"model.{name}.weight"


def test_a_norm_of_the_head_is_no_head():
    assert find_output_embedding(Plain(wte=embedding(), lm_head_norm=torch.nn.LayerNorm(4))) is None


def test_modules_of_blocks_are_no_embeddings():
    model = Plain(wte=embedding(), layers__0__output=linear(6, 4), layers__0__embed_tokens=embedding())
    assert find_input_embedding(model).name == "wte.weight"
    assert find_output_embedding(model) is None
    del model.wte
    assert find_input_embedding(model) is None


def test_the_more_usual_and_the_outer_name_go_first():
    model = Plain(tower__embeddings=embedding(), text__embed_tokens=embedding(), embed_tokens=embedding())
    assert find_input_embedding(model).name == "embed_tokens.weight"
    del model.embed_tokens
    assert find_input_embedding(model).name == "text.embed_tokens.weight"


def test_a_head_as_large_as_the_input_embedding_goes_first():
    model = Plain(wte=embedding(), lm_head=linear(2), decoder__output=linear())
    assert find_output_embedding(model).name == "decoder.output.weight"
    del model.decoder
    assert find_output_embedding(model).name == "lm_head.weight"


def test_what_the_model_says_goes_first():
    model = Plain(wte=embedding(), lm_head=linear(), other=embedding(), projection=linear())
    model.get_input_embeddings = lambda: model.other
    model.get_output_embeddings = lambda: model.projection
    assert find_input_embedding(model).name == "other.weight"
    assert find_output_embedding(model).name == "projection.weight"

    def not_here():
        raise NotImplementedError

    model.get_input_embeddings = model.get_output_embeddings = not_here
    assert find_input_embedding(model).name == "wte.weight"
    assert find_output_embedding(model).name == "lm_head.weight"
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    assert find_input_embedding(model).name == "wte.weight"


def test_a_weight_that_is_computed_is_none():
    model = Plain(wte=embedding())
    torch.nn.utils.parametrizations.weight_norm(model.wte)
    assert find_input_embedding(model) is None
    model.get_input_embeddings = lambda: model.wte
    assert find_input_embedding(model) is None


def test_shared_memory():
    flat = torch.zeros(12)
    left, right, middle = flat[:6].view(2, 3), flat[6:].view(2, 3), flat[4:8]
    assert shares_memory(left, left.view(3, 2))
    assert shares_memory(left, middle)
    assert shares_memory(middle, right)
    assert not shares_memory(left, right)
    assert not shares_memory(left, left.clone())
    assert not shares_memory(flat[:0], flat[6:])
    assert not shares_memory(flat, flat[6:6])
    assert not shares_memory(flat[6:6], flat[6:6])
    assert shares_memory(torch.nn.Parameter(left), left)
