"""tied_parameters: which state-dict keys name the same tensor."""

import pytest
import torch

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.tied_weights import tied_parameters

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
