"""The plan of a recipe: exact where it counts, made without weights, data or memory."""

import copy
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from automodel.config.loader import ConfigNode, load_yaml_config
from automodel.distributed.single import Single
from automodel.recipes import parts
from automodel.recipes.catalogue import find_recipe
from automodel.recipes.plan import make_plan
from automodel.recipes.sections import build_sections

LLAMA = {
    "_target_": "transformers.LlamaConfig",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
RECIPE = {
    "model": {"_target_": "automodel.NeMoAutoModelForCausalLM.from_config", "config": LLAMA},
    "dataset": {"_target_": "automodel.data.text.TextFilesDataset", "source": __file__, "context_length": 24},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.1},
    "step_scheduler": {"global_batch_size": 12, "local_batch_size": 3, "max_steps": 7, "num_epochs": 2},
}


def plan_of(**changes):
    return make_plan(ConfigNode({**copy.deepcopy(RECIPE), **changes}))


def real_model(values):
    strategy = Single(device=torch.device("cpu"), dtype=torch.float32)
    return parts.build_model(build_sections(ConfigNode(values)), strategy=strategy).inner


def state_bytes(optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_memory_are_those_of_the_real_model(tied):
    values = {**RECIPE, "model": {**RECIPE["model"], "config": {**LLAMA, "tie_word_embeddings": tied}}}
    plan, model = plan_of(model=values["model"]), real_model(values)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert plan.parameters.total == plan.parameters.trainable == count
    assert plan.memory.parameters == plan.memory.gradients == 4 * count
    optimizer = parts.build_optimizer(ConfigNode(RECIPE["optimizer"]), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert plan.memory.optimizer_state == state_bytes(optimizer)
    # AdamW: two moments for each parameter, and a counter for each tensor.
    assert plan.memory.optimizer_state == 2 * 4 * count + 4 * len(list(model.parameters()))
    assert plan.memory.activations > 3 * 24 * 64 * 4
    memory = plan.memory
    assert memory.total == memory.parameters + memory.gradients + memory.optimizer_state + memory.activations


@pytest.mark.parametrize(
    ("optimizer", "floats"),
    [
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, 0),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}, 1),
        ({"_target_": "torch.optim.AdamW", "lr": 0.1, "fused": True}, 2),
        ({"_target_": "torch.optim.AdamW", "lr": 0.1, "foreach": True}, 2),
        ({"_target_": "torch.optim.AdamW", "lr": 0.1, "amsgrad": True}, 3),
    ],
)
def test_the_optimizers_memory(optimizer, floats):
    plan = plan_of(optimizer=optimizer)
    counters = plan.memory.optimizer_state - floats * 4 * plan.parameters.total
    assert 0 <= counters <= 4 * 30


def test_steps_and_tokens():
    plan = plan_of()
    assert (plan.samples_per_step, plan.accumulation_steps, plan.tokens_per_step) == (12, 4, 12 * 24)
    assert (plan.max_steps, plan.num_epochs) == (7, 2)
    text = "\n".join(plan.lines())
    assert "7 steps, or 2 epoch(s) if that is less" in text
    assert "288 (12 samples in 4 forward pass(es))" in text
    assert "transformers.LlamaConfig" in text
    assert "TrainFinetuneRecipeForNextTokenPrediction" in text
    assert "MaskedCrossEntropy()" in text


def test_a_dataset_that_does_not_say_its_context_length_leaves_gaps(tmp_path):
    file = tmp_path / "data.py"
    file.write_text("def make():\n    raise RuntimeError('a plan builds no dataset')\n")
    plan = plan_of(dataset={"_target_": f"{file}:make"})
    assert plan.tokens_per_step is plan.memory.activations is None
    assert "unknown" in "\n".join(plan.lines())


@pytest.mark.parametrize(
    ("name", "model", "low", "high"),
    [
        ("hybrid_tiny", "NemotronHForCausalLM", 2_000_000, 10_000_000),
        ("gdn_tiny", "Qwen3NextForCausalLM", 1_000_000, 10_000_000),
    ],
)
def test_the_shipped_recipes(name, model, low, high):
    config = load_yaml_config(find_recipe(name))
    plan = make_plan(config)
    assert plan.model == model
    assert low < plan.parameters.total < high
    assert plan.parameters.total == sum(p.numel() for p in real_model(config.to_dict()).parameters())
    assert plan.memory.activations is not None
    assert plan.parameters.by_group["linear_attention"] > 0
    assert plan.parameters.by_group["attention"] > 0


def test_a_misspelt_key_of_the_model_is_refused():
    model = {**RECIPE["model"], "torch_dtpye": "bfloat16"}
    with pytest.raises((ValueError, TypeError), match="torch_dtpye"):
        plan_of(model=model)


def test_a_misspelt_key_of_the_models_configuration_is_refused():
    model = {**RECIPE["model"], "config": {**LLAMA, "hiden_size": 8}}
    with pytest.raises((ValueError, TypeError), match="hiden_size"):
        plan_of(model=model)


def test_an_optimizer_that_refuses_its_arguments_is_an_error():
    with pytest.raises(ValueError, match="learning rate"):
        plan_of(optimizer={"_target_": "torch.optim.AdamW", "lr": -1.0})


def test_a_batch_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"step_scheduler\.global_batch_size"):
        plan_of(step_scheduler={"global_batch_size": 5, "local_batch_size": 2})


def test_no_weights_are_read(tmp_path):
    keys = {key: value for key, value in LLAMA.items() if key != "_target_"}
    LlamaForCausalLM(LlamaConfig(**keys)).save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.write_bytes(b"no tensors")
    model = {
        "_target_": "automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": str(tmp_path / "model"),
    }
    plan = plan_of(model=model, tokenizer={"_target_": "automodel.data.tokenizer.train_byte_level_bpe"})
    assert plan.model == "LlamaForCausalLM"
    assert plan.parameters.total > 0


def test_a_model_larger_than_any_memory_is_planned():
    large = {**LLAMA, "hidden_size": 65_536, "intermediate_size": 262_144, "num_attention_heads": 512}
    plan = plan_of(model={**RECIPE["model"], "config": large})
    assert plan.parameters.total > 100_000_000_000
    assert plan.memory.parameters > 400_000_000_000


def test_a_plan_draws_no_random_number_and_leaves_no_default_device():
    before = torch.get_rng_state()
    plan_of()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.empty(0).device.type == "cpu"


def test_a_plan_for_several_ranks_shows_units_and_bytes_per_rank():
    alone, plan = plan_of(), make_plan(ConfigNode(RECIPE), world_size=2)
    text = "\n".join(plan.lines())
    assert plan.accumulation_steps == 2
    assert plan.ranks == "2 (FSDP2, sharded over all)"
    assert "2 x LlamaDecoderLayer (model.layers.0-1)" in text
    assert "memory per rank" in text
    rows = [(-(-parameter.shape[0] // 2), parameter[0].numel()) for parameter in real_model(RECIPE).parameters()]
    assert plan.memory.parameters == sum(4 * count * width for count, width in rows)
    assert plan.memory.optimizer_state < 0.6 * alone.memory.optimizer_state
    assert plan.memory.gathered > 0 == alone.memory.gathered
    assert not alone.units


def test_a_plan_counts_what_is_recomputed():
    plain, recomputed = plan_of(), plan_of(distributed={"activation_checkpointing": True})
    assert 0 < recomputed.memory.activations < plain.memory.activations


def test_the_number_of_processes_is_checked_before_a_model_is_built(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"step_scheduler\.global_batch_size must be a multiple .* \(3 x 8\), got 12"):
        plan_of(model={"_target_": "fractions.Fraction"})
    with pytest.raises(ValueError, match=r"distributed\.dp_size must be null or the number of processes \(8\), got 3"):
        plan_of(distributed={"dp_size": 3})
    with pytest.raises(ImportError, match="pip install megatron-fsdp"):
        plan_of(distributed={"strategy": "megatron_fsdp"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "foo"}, "split must be 'train' or 'validation', got 'foo'"),
        ({"source": "/nowhere"}, "got '/nowhere'"),
        ({"context_length": -1}, "context_length must be a positive integer, got -1"),
        ({"context_length": "abc"}, "context_length must be a positive integer, got 'abc'"),
        ({"sample_prompt": ""}, "sample_prompt must be a text that is not empty, got ''"),
    ],
)
@pytest.mark.parametrize("section", ["dataset", "validation_dataset"])
def test_the_arguments_of_the_data_are_checked(section, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        plan_of(**{section: RECIPE["dataset"] | settings})
    assert f"while instantiating {section}" in error.value.__notes__[0]


def test_the_tokenizers_vocabulary_is_compared_with_the_models():
    tokenizer = {"_target_": "automodel.data.tokenizer.train_byte_level_bpe", "vocab_size": 4096}
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size is 4096, but the model's vocab_size only"):
        plan_of(tokenizer=tokenizer)


def test_the_checkpoint_to_start_from_is_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.restore_from: 'epoch_0_step_3' names no checkpoint"):
        plan_of(checkpoint={"checkpoint_dir": str(tmp_path), "restore_from": "epoch_0_step_3"})


def test_sections_are_described_with_what_differs_from_the_defaults(tmp_path):
    described = plan_of(checkpoint={"max_recent_checkpoints": 2}, kernels={"tuning": "static"}).sections
    assert described["kernels"] == "tuning=static"
    assert "max_recent_checkpoints=2" in described["checkpoint"]
    assert described["checkpoint"].endswith("-> the run folder/checkpoints")
    assert described["rng"] == "defaults"
    config = ConfigNode({**copy.deepcopy(RECIPE), "checkpoint": {"enabled": False}})
    assert "->" not in make_plan(config, run_dir=tmp_path).sections["checkpoint"]
