"""complete: a continuation that is drawn from the model, and from nothing else."""

import random

import numpy
import pytest
import torch
from torch import nn

from automodel.models.auto import NeMoAutoModelForCausalLM
from automodel.models.generation import complete

LETTERS = "abcdefghijklmnop"


class Letters:
    """A tokenizer of one token per letter; the last one ends the text."""

    eos_token_id = len(LETTERS) - 1

    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[int(index)] for index in ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = {"model_type": "llama", "vocab_size": len(LETTERS), "hidden_size": 8, "intermediate_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "attention_dropout": 0.5}
    return NeMoAutoModelForCausalLM.from_config(config).train()


class Counting(nn.Module):
    """Predicts the letter after the last one, for certain; `lengths` are those of the inputs that it saw."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1000.0))
        self.lengths = []

    def forward(self, input_ids, use_cache):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.lengths.append(input_ids.shape[1])
        output = nn.functional.one_hot((input_ids + 1) % len(LETTERS), len(LETTERS)) * self.scale
        return type("Output", (), {"logits": output})


def test_the_same_seed_gives_the_same_text(model):
    first = complete(model, Letters(), "abc")
    assert first.startswith("abc")
    assert complete(model, Letters(), "abc") == first
    assert len({complete(model, Letters(), "abc", seed=seed) for seed in range(6)}) > 1


def test_global_random_state_is_neither_read_nor_changed(model):
    first = complete(model, Letters(), "abc")
    torch.manual_seed(123)
    random.seed(123)
    numpy.random.seed(123)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert complete(model, Letters(), "abc") == first
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_goes_on_in_the_mode_it_was_in(training):
    model = Counting().train(training)
    complete(model, Letters(), "ab")
    assert model.training is training
    assert model.scale.grad is None


def test_it_stops_at_the_end_of_the_text():
    model = Counting()
    assert complete(model, Letters(), "klm") == "klmno"
    assert model.lengths == [3, 4, 5]


def test_it_stops_at_the_longest_length():
    assert complete(Counting(), Letters(), "a", max_new_tokens=4) == "abcde"
    assert complete(Counting(), Letters(), "a", max_new_tokens=0) == "a"


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="the prompt '' holds no token"):
        complete(Counting(), Letters(), "")


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        complete(Counting(), Letters(), "a", temperature=temperature)


def test_a_low_temperature_takes_the_likeliest(model):
    model.eval()
    ids = torch.tensor([Letters().encode("abc")])
    likeliest = int(model(input_ids=ids).logits[0, -1].argmax())
    texts = {complete(model, Letters(), "abc", max_new_tokens=1, temperature=1e-4, seed=seed) for seed in range(4)}
    model.train()
    assert texts == {"abc" + (LETTERS[likeliest] if likeliest != Letters.eos_token_id else "")}
