import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.weights import FreshWeights, PretrainedWeights, weight_source
from tiny_models import digests, empty_copy, hybrid_config, llama_config

OURS = NeMoAutoModelForCausalLM.from_pretrained
FIRST, SECOND = "1" * 40, "2" * 40

# Name: configuration, dtype in the files, dtype of the model, largest file.
CASES = {
    "llama in several files": (llama_config(), "float32", "float32", "2KB"),
    "tied llama, to float32": (llama_config(tie_word_embeddings=True), "bfloat16", "float32", "2KB"),
    "hybrid, to bfloat16": (hybrid_config(), "float32", "bfloat16", "50MB"),
    "merged experts, to bfloat16": (hybrid_config(layers_block_type=["mamba", "moe"]), "float32", "bfloat16", "50MB"),
}


def arguments_of(folder, **changes):
    return {"pretrained_model_name_or_path": str(folder), **changes}


def load(arguments, *, factory=OURS, replicas=None, seed=0):
    template = build_on_meta(factory, arguments)
    model = empty_copy(template, replicas=replicas)
    report = weight_source(factory, arguments).fill(model, template, seed=seed)
    return model, report


def load_on_ranks(rank, world_size, cases, replicas):
    found = {}
    for name, arguments in cases.items():
        model, report = load(arguments, replicas=replicas)
        found[name] = digests(model), report
    return found


def fill_on_ranks(rank, world_size, arguments, seed):
    model, report = load(arguments, replicas=1, seed=seed)
    return digests(model), report


def fail_on_ranks(rank, world_size, arguments_by_rank):
    with pytest.raises(Exception, match=r".") as caught:
        load(arguments_by_rank[rank], replicas=1)
    torch.distributed.barrier()  # hangs unless every rank got as far
    return f"{caught.type.__name__}: {caught.value}"


def save(config, folder, *, dtype="float32", largest="50MB", model_class=AutoModelForCausalLM):
    torch.manual_seed(1)
    model = (model_class.from_config if model_class is AutoModelForCausalLM else model_class)(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.uniform_(-1, 1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=largest)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The arguments of each case, and what plain transformers loads."""
    arguments, expected = {}, {}
    for name, (config, stored, wanted, largest) in CASES.items():
        folder = save(config, tmp_path_factory.mktemp("checkpoint"), dtype=stored, largest=largest)
        arguments[name] = arguments_of(folder, dtype=wanted)
        expected[name] = digests(AutoModelForCausalLM.from_pretrained(folder, dtype=wanted))
    return arguments, expected


@pytest.fixture
def folder(tmp_path):
    return save(llama_config(), tmp_path / "model", largest="2KB")


def change_file(folder, change):
    """Rewrites the single file of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_sharded_models_get_what_transformers_loads(ranks, saved, world_size, replicas):
    arguments, expected = saved
    found = ranks.run(world_size, load_on_ranks, arguments, replicas)
    for name in CASES:
        assert [one[name][0] for one in found] == [expected[name]] * world_size
        reports = [one[name][1] for one in found]
        assert all(report.missing == report.unexpected == () for report in reports)
        if name.startswith("merged"):
            assert [report.how for report in reports] == ["whole"] * world_size
            assert [report.bytes_read > 0 for report in reports] == [True] + [False] * (world_size - 1)
            continue
        assert [report.how for report in reports] == ["slices"] * world_size
        config, stored, _, _ = CASES[name]
        size = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
        size *= getattr(torch, stored).itemsize
        # Each element is read by one rank of a replica.
        assert sum(report.bytes_read for report in reports) == size * replicas


@pytest.mark.parametrize("name", CASES)
def test_whole_models_get_what_transformers_loads(saved, name):
    arguments, expected = saved
    model, report = load(arguments[name])
    assert digests(model) == expected[name]
    assert report.how == ("whole" if name.startswith("merged") else "slices")
    assert report.seconds > 0
    if "tied" in name:
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("owner", [AutoModelForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_classes_of_transformers_are_loaded_as_they_load_themselves(folder, owner, dtype):
    arguments = arguments_of(folder, **({} if dtype is None else {"dtype": dtype}))
    model, report = load(arguments, factory=owner.from_pretrained)
    assert report.how == "slices"
    assert digests(model) == digests(owner.from_pretrained(**arguments))


def test_a_router_stays_in_float32_as_transformers_loads_it(saved):
    model, _ = load(saved[0]["merged experts, to bfloat16"])
    gate = model.model.layers[1].mixer.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_names_with_and_without_the_prefix_are_the_same(tmp_path):
    bare = save(llama_config(), tmp_path / "bare", model_class=LlamaModel)
    assert "norm.weight" in load_file(bare / "model.safetensors")
    full = save(llama_config(), tmp_path / "full")
    for target, source in ((LlamaForCausalLM, bare), (LlamaModel, full)):
        arguments = arguments_of(source)
        model, report = load(arguments, factory=target.from_pretrained)
        expected = digests(target.from_pretrained(**arguments))
        found = digests(model)
        if target is LlamaForCausalLM:
            assert report.missing == ("lm_head.weight",)
            del found["lm_head.weight"], expected["lm_head.weight"]
        else:
            assert report.unexpected == ("lm_head.weight",)
        assert found == expected


def test_older_names_of_a_model_are_read_in_slices(saved):
    arguments, _ = saved
    file = f"{arguments['hybrid, to bfloat16']['pretrained_model_name_or_path']}/model.safetensors"
    assert "backbone.embeddings.weight" in load_file(file)


def test_missing_and_unexpected_tensors_are_reported_and_the_rest_is_loaded(ranks, tmp_path, caplog):
    folder = save(llama_config(), tmp_path / "model")
    whole = load(arguments_of(folder))[0]

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.7.odd"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    change_file(folder, change)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    model, report = load(arguments_of(folder), seed=3)
    assert report.missing == ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    assert report.unexpected == ("model.layers.7.odd",)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("automodel")]
    assert len(ours) == 2
    assert "lacks 2 tensors of the model" in ours[0]
    assert "model.layers.1.mlp.up_proj.weight, model.norm.weight" in ours[0]
    assert "holds 1 tensors that the model does not have: model.layers.7.odd" in ours[1]
    assert (model.model.norm.weight == 1).all()
    assert 0 < model.model.layers[1].mlp.up_proj.weight.std() < 0.1
    found, expected = digests(model), digests(whole)
    assert {name for name in found if found[name] != expected[name]} == set(report.missing)
    fresh = build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": llama_config()})
    filled = empty_copy(fresh)
    FreshWeights().fill(filled, fresh, seed=3)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, filled.model.layers[1].mlp.up_proj.weight)
    assert [one[0] for one in ranks.run(2, fill_on_ranks, arguments_of(folder), 3)] == [found] * 2


def test_a_head_that_is_stored_instead_of_the_embedding_is_the_embedding(tmp_path):
    folder = save(llama_config(tie_word_embeddings=True), tmp_path / "model")
    expected = digests(load(arguments_of(folder))[0])
    change_file(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    model, report = load(arguments_of(folder))
    assert digests(model) == expected
    assert report.missing == ()


def test_a_tied_tensor_that_is_stored_twice_must_be_the_same_twice(tmp_path):
    folder = save(llama_config(tie_word_embeddings=True), tmp_path / "model")
    expected = digests(load(arguments_of(folder))[0])
    copy_head = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})  # noqa: E731
    change_file(folder, copy_head)
    assert digests(load(arguments_of(folder))[0]) == expected
    change_file(folder, lambda tensors: tensors["lm_head.weight"][5].zero_())
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight one tensor, but two different"):
        load(arguments_of(folder))


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    folder = save(llama_config(), tmp_path / "model")
    change_file(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(9)}))
    template = build_on_meta(OURS, arguments_of(folder))
    model = empty_copy(template)
    with pytest.raises(
        ValueError, match=r"model.norm.weight in .*/model.safetensors has shape \[9\], but .* has \[8\]"
    ):
        weight_source(OURS, arguments_of(folder)).fill(model, template, seed=0)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_missing_file_is_named(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = index["weight_map"]["model.norm.weight"]
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name} is missing: .*index.json names it"):
        load(arguments_of(folder))


def test_a_truncated_file_is_named(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{file.name} is damaged or not complete"):
        load(arguments_of(folder))


def test_an_index_must_tell_the_truth(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks model.ghost, which .*index.json says it holds"):
        load(arguments_of(folder))
    index.write_text(index.read_text()[:50])
    with pytest.raises(ValueError, match=r"index.json is no index of weights"):
        load(arguments_of(folder))


def test_a_folder_without_safetensors_is_loaded_by_transformers(ranks, tmp_path, caplog):
    folder = save(llama_config(tie_word_embeddings=True), tmp_path / "model")
    expected = digests(load(arguments_of(folder))[0])
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    caplog.set_level(logging.INFO)
    model, report = load(arguments_of(folder))
    assert report.how == "whole"
    said = [record.getMessage() for record in caplog.records if record.name == "automodel.models.weights"]
    assert said == [f"{folder}: transformers loads the model whole, since its weights cannot be read in slices"]
    assert digests(model) == expected
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [one[0] for one in ranks.run(2, fill_on_ranks, arguments_of(folder), 0)] == [expected] * 2


def test_options_that_change_the_loading_are_left_to_transformers(tmp_path):
    folder = save(llama_config(), tmp_path / "model")
    change_file(folder, lambda tensors: tensors.update({"final.weight": tensors.pop("model.norm.weight")}))
    arguments = arguments_of(folder, key_mapping={"^final": "model.norm"})
    model, report = load(arguments)
    assert report.how == "whole"
    assert report.missing == ()
    assert digests(model) == digests(OURS(**arguments))


def test_variant_and_subfolder_are_honoured(tmp_path):
    folder = save(llama_config(), tmp_path / "models" / "tiny")
    expected = digests(load(arguments_of(folder))[0])
    (folder / "model.safetensors").rename(folder / "model.special.safetensors")
    arguments = arguments_of(tmp_path / "models", subfolder="tiny", variant="special")
    model, report = load(arguments)
    assert report.how == "slices"
    assert digests(model) == expected


def test_a_failure_on_one_rank_ends_all_of_them(ranks, folder, tmp_path):
    other = save(llama_config(), tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"")
    zero, one = ranks.run(2, fail_on_ranks, [arguments_of(folder), arguments_of(other)])
    assert one.startswith("ValueError: ")
    assert "other/model.safetensors is damaged or not complete" in one
    assert zero == f"RuntimeError: rank 1 found no usable weights: {one}"


def test_ranks_must_find_the_same_weights(ranks, tmp_path):
    folders = [save(llama_config(), tmp_path / name) for name in ("one", "two")]
    change_file(folders[1], lambda tensors: tensors.pop("model.norm.weight"))
    for text in ranks.run(2, fail_on_ranks, [arguments_of(folder) for folder in folders]):
        assert text.startswith("ValueError: ranks 0 and 1 found different weights")


def test_a_failure_of_transformers_on_rank_zero_ends_all_ranks(ranks, tmp_path):
    folder = save(llama_config(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    zero, one = ranks.run(2, fail_on_ranks, [arguments_of(folder)] * 2)
    assert one == f"RuntimeError: rank 0 could not load {folder}: {zero}"


def test_the_repository_is_read_at_the_commit_of_the_configuration(hub):
    arguments = {"pretrained_model_name_or_path": hub.name, "cache_dir": str(hub.cache_dir), "local_files_only": True}
    for revision, fill in ((None, 1.0), ("dev", 2.0), (SECOND, 2.0)):
        given = arguments if revision is None else {**arguments, "revision": revision}
        model, report = load(given)
        assert report.how == "slices"
        assert (model.model.norm.weight == fill).all()
        assert model.config.rms_norm_eps == fill / 1000


def test_a_branch_that_moves_after_the_configuration_was_read_changes_nothing(hub):
    arguments = {"pretrained_model_name_or_path": hub.name, "cache_dir": str(hub.cache_dir), "local_files_only": True}
    template = build_on_meta(OURS, arguments)
    hub.point("main", SECOND)
    model = empty_copy(template)
    weight_source(OURS, arguments).fill(model, template, seed=0)
    assert (model.model.norm.weight == 1).all()


def test_generation_settings_come_along(folder):
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.3, "do_sample": True}))
    model, _ = load(arguments_of(folder))
    assert model.generation_config.eos_token_id == [5, 6]
    assert model.generation_config.temperature == 0.3


def test_models_must_belong_together(folder):
    source = weight_source(OURS, arguments_of(folder))
    template = build_on_meta(OURS, arguments_of(folder))
    with pytest.raises(ValueError, match="has no memory"):
        source.fill(template, template, seed=0)
    deeper = build_on_meta(OURS, arguments_of(folder, num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"different parameters or buffers: model.layers.3"):
        source.fill(empty_copy(deeper), template, seed=0)
    wider = build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": llama_config(vocab_size=38)})
    with pytest.raises(ValueError, match=r"different shapes of model\.embed_tokens\.weight"):
        source.fill(empty_copy(wider), template, seed=0)


def build_it():
    return torch.nn.Linear(2, 2)


def test_the_source_follows_from_the_target():
    for factory in (
        NeMoAutoModelForCausalLM.from_config,
        AutoModelForCausalLM.from_config,
        LlamaForCausalLM._from_config,
        LlamaForCausalLM,
    ):
        assert isinstance(weight_source(factory, {}), FreshWeights)
    for factory in (OURS, AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained):
        assert isinstance(weight_source(factory, {}), PretrainedWeights)
    for factory in (build_it, torch.nn.Linear, LlamaForCausalLM.can_generate):
        assert weight_source(factory, {}) is None
