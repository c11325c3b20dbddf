"""The parts of a job, built from sections and checked against each other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from automodel.config.loader import ConfigNode
from automodel.data.collate import default_collater
from automodel.data.loader import StatefulDataLoader
from automodel.distributed.rank_group import RankGroup
from automodel.distributed.single import Single
from automodel.recipes import parts
from automodel.recipes.sections import build_sections
from automodel.training.loss import MaskedCrossEntropy

SAMPLES = [{"input_ids": [number, 1], "labels": [1, 2]} for number in range(10)]
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1}


class Model(nn.Module):
    """A matrix, a bias, a norm and a matrix that asks not to decay."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.rates = nn.Parameter(torch.ones(2, 2))
        self.rates._no_weight_decay = True
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def decays(optimizer, model):
    """The weight decay of each parameter that the optimizer has."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: group["weight_decay"] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize(("given", "expected"), [({"weight_decay": 0.3}, 0.3), ({}, 0.01)])
def test_matrices_decay_and_vectors_do_not(given, expected):
    model = Model()
    optimizer = parts.build_optimizer(ConfigNode({**ADAMW, "betas": [0.8, 0.9], **given}), model)
    found = decays(optimizer, model)
    assert found.pop("linear.weight") == expected
    assert set(found) == {"linear.bias", "norm.weight", "norm.bias", "rates"}
    assert set(found.values()) == {0.0}
    assert all(tuple(group["betas"]) == (0.8, 0.9) and group["lr"] == 0.1 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "section",
    [{**ADAMW, "weight_decay": 0}, {"_target_": "torch.optim.Adam", "lr": 0.1}, {**ADAMW, "weight_decay": 0.0}],
)
def test_without_weight_decay_there_is_one_group(section):
    model = Model()
    optimizer = parts.build_optimizer(ConfigNode(section), model)
    assert len(optimizer.param_groups) == 1
    assert set(decays(optimizer, model).values()) == {0}


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        parts.build_optimizer(ConfigNode(ADAMW), Model().requires_grad_(False))


class Tokenizer:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


def test_the_vocabulary_must_have_a_row_for_each_token():
    model = Model()
    parts.check_vocabulary(model, Tokenizer(100))
    model.config = ConfigNode({"vocab_size": 64})
    parts.check_vocabulary(model, Tokenizer(64))
    parts.check_vocabulary(model, None)
    with pytest.raises(ValueError, match="65 tokens but the model's vocab_size is 64"):
        parts.check_vocabulary(model, Tokenizer(65))


LOSSES = """
from torch import nn
class Lacking(nn.Module):
    def forward(self, logits, labels):
        return logits.sum()
def lacking(logits, labels):
    return logits.sum()
def make(function):
    return lambda: function
make_lacking = make(lacking)
make_taking = make(lambda logits, labels, *, num_label_tokens: logits.sum() / num_label_tokens)
"""


def test_a_loss_must_take_the_number_of_label_tokens(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(LOSSES)
    assert isinstance(parts.build_loss(None), MaskedCrossEntropy)
    taking = parts.build_loss(ConfigNode({"_target_": f"{file}:make_taking"}))
    assert taking(torch.ones(4), None, num_label_tokens=2) == 2
    for name in ("Lacking", "make_lacking"):
        with pytest.raises(ValueError, match="num_label_tokens"):
            parts.build_loss(ConfigNode({"_target_": f"{file}:{name}"}))
    with pytest.raises(ValueError, match="num_label_tokens"):
        parts.build_loss(ConfigNode({"_target_": "torch.nn.CrossEntropyLoss"}))


def make_loader(node, *, training=True, batch_size=4):
    node = None if node is None else ConfigNode(node, path="dataloader")
    return parts.build_loader(node, SAMPLES, batch_size=batch_size, seed=3, training=training, ranks=RankGroup())


OURS = "automodel.data.loader.StatefulDataLoader"


@pytest.mark.parametrize("node", [None, {"_target_": OURS}])
def test_training_shuffles_whole_batches_and_validation_takes_all_in_order(node):
    training = [batch["sample_indices"] for batch in make_loader(node)]
    assert [len(indices) for indices in training] == [4, 4]
    assert training[0] + training[1] != sorted(training[0] + training[1])
    held_out = [batch["sample_indices"] for batch in make_loader(node, training=False)]
    assert held_out == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_recipe_may_differ_in_all_but_the_batch_size(caplog):
    loader = make_loader({"_target_": OURS, "shuffle": False, "drop_last": False, "batch_size": 7})
    assert [batch["sample_indices"] for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert "dataloader.batch_size is 7; local_batch_size 4 holds" in caplog.text


def test_the_loader_of_torchdata_is_ours():
    node = {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
        "shuffle": True,
    }
    loader = make_loader(node)
    assert isinstance(loader, StatefulDataLoader)
    (batch, _) = loader
    assert batch["input_ids"].shape == default_collater(SAMPLES[:4])["input_ids"].shape


def test_a_loader_whose_position_cannot_be_saved_is_refused():
    with pytest.raises(TypeError, match=r"dataloader\._target_ must give a loader with set_epoch.*got a DataLoader"):
        make_loader({"_target_": "torch.utils.data.DataLoader"})


def sections(**changes):
    needed = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
        "dataset": {"_target_": "automodel.data.text.TextFilesDataset", "context_length": 16},
        "optimizer": ADAMW,
    }
    return build_sections(ConfigNode({**needed, **changes}))


def test_a_model_is_built_in_training_mode_and_must_be_a_module():
    strategy = Single(device=torch.device("cpu"), dtype=torch.float32)
    model = parts.build_model(sections(), strategy=strategy)
    assert isinstance(model.inner, nn.Linear)
    assert model.module is model.inner
    assert model.inner.training
    with pytest.raises(TypeError, match=r"model\._target_ must give a torch module, got a Fraction"):
        parts.build_model(sections(model={"_target_": "fractions.Fraction"}), strategy=strategy)


def test_several_ranks_need_a_loader_that_knows_them(ranks):
    ranks.run(2, load_without_ranks)


def load_without_ranks(rank, world_size):
    node = ConfigNode({"_target_": "torch.utils.data.DataLoader"}, path="dataloader")
    with pytest.raises(TypeError, match=r"dataloader\._target_ must take rank and world_size, so that 2 ranks"):
        parts.build_loader(node, SAMPLES, batch_size=2, seed=3, training=True, ranks=RankGroup(dist.group.WORLD))


def test_data_has_the_local_batch_size_and_the_seed(corpus, recipe):
    values = {**recipe.values, "rng": {"seed": 5}}
    values["step_scheduler"] = {"global_batch_size": 6, "local_batch_size": 3}
    built = build_sections(ConfigNode(values))
    tokenizer = parts.build_tokenizer(built)
    data = parts.build_data(built, tokenizer, ranks=RankGroup())
    assert data.loader.batch_size == data.validation_loader.batch_size == 3
    assert data.loader.state_dict()["seed"] == 5
    assert data.loader.state_dict()["shuffle"]
    assert not data.validation_loader.state_dict()["shuffle"]
    assert next(iter(data.loader))["input_ids"].shape == (3, 32)
    no_validation = build_sections(ConfigNode({**values, "validation_dataset": None}))
    without = parts.build_data(no_validation, tokenizer, ranks=RankGroup())
    assert without.validation_dataset is without.validation_loader is None


def test_a_model_that_is_neither_pretrained_nor_has_a_tokenizer_goes_without():
    assert parts.build_tokenizer(sections()) is None


def test_a_dataset_without_a_tokenizer_argument_is_not_given_one():
    made = parts.build_dataset(ConfigNode({"_target_": "fractions.Fraction", "numerator": 3}), Tokenizer(3))
    assert made == 3


class Vocabulary:
    """A tokenizer whose three ids have a gap: rows from 7 on belong to no token."""

    def get_vocab(self):
        return {"a": 0, "b": 1, "c": 6}


class Embeddings(nn.Module):
    """An input and an output embedding of ones, and rows of the former that are zero."""

    def __init__(self, *zero_rows):
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(torch.ones(10, 4), freeze=False)
        self.lm_head = nn.Linear(4, 10, bias=False)
        with torch.no_grad():
            self.lm_head.weight.fill_(1.0)
            self.embed_tokens.weight[list(zero_rows)] = 0.0


def zero_rows(model):
    return (model.embed_tokens.weight.norm(dim=1) == 0).nonzero().flatten().tolist()


def test_embeddings_are_repaired_up_to_the_highest_token():
    wanted = sections(embedding_row_repair={"max_rows": 1})
    model = Embeddings(6, 7, 9)
    parts.repair_embeddings(wanted, model, Vocabulary(), ranks=RankGroup())
    assert zero_rows(model) == [7, 9]
    with pytest.raises(ValueError, match="3 damaged rows, more than max_rows=1"):
        parts.repair_embeddings(wanted, Embeddings(6, 7, 9), None, ranks=RankGroup())
    untouched = Embeddings(6)
    parts.repair_embeddings(sections(), untouched, Vocabulary(), ranks=RankGroup())
    assert zero_rows(untouched) == [6]


def repair_own_copy(rank, world_size):
    model = Embeddings(rank + 1)
    wanted = sections(embedding_row_repair={"max_rows": 1})
    with pytest.raises(ValueError, match="2 damaged rows, more than max_rows=1"):
        parts.repair_embeddings(wanted, model, None, ranks=RankGroup(dist.group.WORLD))
    return zero_rows(model)


def test_copies_of_an_embedding_are_repaired_together(ranks):
    assert ranks.run(2, repair_own_copy) == [[1], [2]]
