"""NeMoAutoConfig and NeMoAutoModelForCausalLM: one commit, overrides, dtypes, the meta device."""

import copy
import logging

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import automodel.models.resolution
from automodel.data.tokenizer import load_tokenizer
from automodel.models.auto import NeMoAutoConfig, NeMoAutoModelForCausalLM, build_on_meta, quiet_kernel_fallbacks

FIRST, SECOND = "1" * 40, "2" * 40
EPSILON = {FIRST: 0.001, SECOND: 0.002}
WEIGHT = {FIRST: 1.0, SECOND: 2.0}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "vocab_size": 64,
    "hidden_size": 32,
    "layers_block_type": ["mamba", "mlp", "attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "chunk_size": 16,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
    "tie_word_embeddings": True,
}


def offline(hub) -> dict:
    return {"cache_dir": hub.cache_dir, "local_files_only": True}


def commit_of(model) -> str:
    """The commit whose configuration a model has, having checked that its weights are of the same one."""
    (commit,) = (commit for commit, epsilon in EPSILON.items() if model.config.rms_norm_eps == epsilon)
    assert all(bool((parameter == WEIGHT[commit]).all()) for parameter in model.parameters())
    return commit


class TestOneCommit:
    def test_the_config_keeps_the_commit_it_was_read_at(self, hub):
        config = NeMoAutoConfig.from_pretrained(hub.name, **offline(hub))
        assert isinstance(config, LlamaConfig)
        assert (config.rms_norm_eps, config._commit_hash) == (EPSILON[FIRST], FIRST)
        assert "_commit_hash" not in config.to_dict()

    def test_a_branch_that_moves_between_config_and_weights(self, hub):
        config = NeMoAutoConfig.from_pretrained(hub.name, **offline(hub))
        hub.point("main", SECOND)
        model = NeMoAutoModelForCausalLM.from_pretrained(hub.name, config=config, **offline(hub))
        assert commit_of(model) == FIRST
        assert commit_of(NeMoAutoModelForCausalLM.from_pretrained(hub.name, **offline(hub))) == SECOND

    @pytest.mark.parametrize(
        ("owner", "function"),
        [(automodel.models.resolution, "select_commit"), (AutoConfig, "from_pretrained")],
        ids=["after-the-commit", "after-the-config"],
    )
    def test_a_branch_that_moves_inside_one_load(self, hub, move_after, owner, function):
        move_after(owner, function)
        model = NeMoAutoModelForCausalLM.from_pretrained(hub.name, **offline(hub))
        assert (hub.repository / "refs/main").read_text() == SECOND
        assert commit_of(model) == FIRST

    def test_a_branch_that_moves_inside_one_config_read(self, hub, move_after):
        move_after(automodel.models.resolution, "select_commit")
        config = NeMoAutoConfig.from_pretrained(hub.name, **offline(hub))
        assert (config.rms_norm_eps, config._commit_hash) == (EPSILON[FIRST], FIRST)

    @pytest.mark.parametrize("revision", ["dev", SECOND])
    def test_revision(self, hub, revision):
        options = {"revision": revision, **offline(hub)}
        assert NeMoAutoConfig.from_pretrained(hub.name, **options)._commit_hash == SECOND
        assert commit_of(NeMoAutoModelForCausalLM.from_pretrained(hub.name, **options)) == SECOND

    def test_a_full_commit_that_contradicts_the_config(self, hub):
        config = NeMoAutoConfig.from_pretrained(hub.name, **offline(hub))
        with pytest.raises(ValueError, match=f"revision is commit {SECOND}, but config was read at commit {FIRST}"):
            NeMoAutoModelForCausalLM.from_pretrained(hub.name, config=config, revision=SECOND, **offline(hub))

    def test_a_branch_that_contradicts_the_config_warns(self, hub, caplog):
        config = NeMoAutoConfig.from_pretrained(hub.name, **offline(hub))
        model = NeMoAutoModelForCausalLM.from_pretrained(hub.name, config=config, revision="main", **offline(hub))
        assert "is now commit" not in caplog.text
        model = NeMoAutoModelForCausalLM.from_pretrained(hub.name, config=config, revision="dev", **offline(hub))
        assert commit_of(model) == FIRST
        assert f"revision dev of org/tiny is now commit {SECOND}" in caplog.text

    def test_the_commit_of_another_repository_is_not_used(self, hub, checkpoints):
        config = NeMoAutoConfig.from_pretrained(hub.name, revision="dev", **offline(hub))
        other = type(hub)(cache_dir=hub.cache_dir, name="org/other")
        other.add("3" * 40, checkpoints[FIRST])
        other.point("main", "3" * 40)
        model = NeMoAutoModelForCausalLM.from_pretrained(other.name, config=config, **offline(hub))
        assert model.config.rms_norm_eps == EPSILON[SECOND]
        assert model.lm_head.weight[0, 0] == WEIGHT[FIRST]

    def test_subfolder(self, hub, checkpoints, move_after):
        other = type(hub)(cache_dir=hub.cache_dir, name="org/nested")
        other.add("3" * 40, checkpoints[SECOND], subfolder="inner")
        other.point("main", "3" * 40)
        options = {"subfolder": "inner", **offline(hub)}
        config = NeMoAutoConfig.from_pretrained(other.name, **options)
        assert config._commit_hash == "3" * 40
        assert commit_of(NeMoAutoModelForCausalLM.from_pretrained(other.name, **options)) == SECOND

    def test_from_config_reads_a_repository(self, hub):
        model = NeMoAutoModelForCausalLM.from_config(hub.name, **offline(hub), revision="dev")
        assert model.config.rms_norm_eps == EPSILON[SECOND]
        assert not bool((model.lm_head.weight == WEIGHT[SECOND]).all())

    def test_an_unknown_repository_or_revision(self, hub):
        with pytest.raises(OSError, match=r"org/absent|cached files"):
            NeMoAutoConfig.from_pretrained("org/absent", **offline(hub))
        with pytest.raises(OSError, match=r"nope|cached files"):
            NeMoAutoConfig.from_pretrained(hub.name, revision="nope", **offline(hub))


class TestLocalPaths:
    def test_folder(self, checkpoints):
        config = NeMoAutoConfig.from_pretrained(checkpoints[SECOND])
        assert config.rms_norm_eps == EPSILON[SECOND]
        assert getattr(config, "_commit_hash", None) is None
        assert commit_of(NeMoAutoModelForCausalLM.from_pretrained(str(checkpoints[SECOND]))) == SECOND

    def test_file(self, checkpoints):
        path = checkpoints[FIRST] / "config.json"
        assert NeMoAutoConfig.from_pretrained(path).rms_norm_eps == EPSILON[FIRST]
        assert NeMoAutoModelForCausalLM.from_config(path).config.rms_norm_eps == EPSILON[FIRST]

    def test_config_of_a_folder_and_its_weights(self, checkpoints):
        config = NeMoAutoConfig.from_pretrained(checkpoints[FIRST])
        assert commit_of(NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], config=config)) == FIRST


class TestOverrides:
    def test_of_a_config(self, hub):
        config = NeMoAutoConfig.from_pretrained(hub.name, num_hidden_layers=3, **offline(hub))
        assert config.num_hidden_layers == 3
        assert len(NeMoAutoModelForCausalLM.from_config(config).model.layers) == 3

    def test_of_a_model(self, checkpoints):
        model = NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], attention_dropout=0.25)
        assert model.config.attention_dropout == 0.25

    def test_beside_a_config_object_which_stays_as_it_was(self, checkpoints):
        config = NeMoAutoConfig.from_pretrained(checkpoints[FIRST])
        before = copy.deepcopy(config.to_dict())
        for build in (
            lambda **options: NeMoAutoModelForCausalLM.from_config(config, **options),
            lambda **options: NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], config=config, **options),
        ):
            model = build(attention_dropout=0.25, text_config={"rms_norm_eps": 0.5}, torch_dtype="float64")
            assert (model.config.attention_dropout, model.config.rms_norm_eps) == (0.25, 0.5)
            assert config.to_dict() == before

    def test_the_recipe_is_not_changed(self):
        rope = {"rope_type": "default", "rope_theta": 5000.0}
        recipe = {**LLAMA, "rope_parameters": rope}
        before = copy.deepcopy(recipe)
        NeMoAutoModelForCausalLM.from_config(recipe, torch_dtype="bfloat16")
        assert recipe == before

    def test_unused_ones_are_returned_on_request(self, checkpoints):
        config, unused = NeMoAutoConfig.from_pretrained(
            checkpoints[FIRST], num_hidden_layers=2, wholly_else=1, return_unused_kwargs=True
        )
        assert config.num_hidden_layers == 2
        assert unused == {"wholly_else": 1}

    def test_unused_ones_warn(self, checkpoints, caplog):
        NeMoAutoConfig.from_pretrained(checkpoints[FIRST], wholly_else=1)
        assert "does not use these keys: wholly_else" in caplog.text

    def test_misspelt_ones(self, checkpoints):
        match = r"num_hiden_layers is not a key .* \(did you mean 'num_hidden_layers'\?\)"
        with pytest.raises(ValueError, match=match):
            NeMoAutoConfig.from_pretrained(checkpoints[FIRST], num_hiden_layers=2)
        with pytest.raises(ValueError, match=match):
            NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], num_hiden_layers=2)
        with pytest.raises(ValueError, match=match):
            NeMoAutoModelForCausalLM.from_config({"model_type": "llama", "num_hiden_layers": 2})
        with pytest.raises(ValueError, match=match):
            NeMoAutoModelForCausalLM.from_config(LLAMA, num_hiden_layers=2)
        with pytest.raises(ValueError, match=f"text_config.{match}"):
            NeMoAutoModelForCausalLM.from_config(LLAMA, text_config={"num_hiden_layers": 2})

    def test_output_hidden_states(self):
        model = NeMoAutoModelForCausalLM.from_config(LLAMA, output_hidden_states=True)
        assert len(model(input_ids=torch.zeros(1, 4, dtype=torch.long)).hidden_states) == 2


class TestConfigSources:
    def test_mapping(self):
        model = NeMoAutoModelForCausalLM.from_config(LLAMA)
        assert isinstance(model, LlamaForCausalLM)
        assert model.training
        assert model.config.use_cache is False

    def test_a_revision_beside_a_ready_config_warns(self, caplog):
        NeMoAutoModelForCausalLM.from_config(LLAMA, revision="dev")
        assert "revision=dev has no effect" in caplog.text

    def test_use_cache_on_request(self):
        assert NeMoAutoModelForCausalLM.from_config(LLAMA, use_cache=True).config.use_cache is True

    def test_older_names_of_keys_are_known(self, caplog):
        model = NeMoAutoModelForCausalLM.from_config(
            {
                **NEMOTRON_H,
                "layers_block_type": None,
                "hybrid_override_pattern": "M-*",
                "_name_or_path": "x",
            }
        )
        assert len(model.model.layers) == 3
        model = NeMoAutoModelForCausalLM.from_config({**LLAMA, "rope_theta": 100.0})
        assert model.config.rope_parameters["rope_theta"] == 100.0
        assert "does not use" not in caplog.text

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"hidden_size": 8}, "config.model_type must name an architecture"),
            ({"model_type": "lama_x"}, "lama_x"),
            (7, "config must be a transformers configuration"),
        ],
    )
    def test_bad_ones(self, config, message):
        with pytest.raises(ValueError, match=message):
            NeMoAutoModelForCausalLM.from_config(config)


class TestDtype:
    @pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "bf16", torch.bfloat16])
    @pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
    def test_from_config(self, name, value):
        model = NeMoAutoModelForCausalLM.from_config(LLAMA, **{name: value})
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.config.dtype == torch.bfloat16

    @pytest.mark.parametrize("value", ["auto", None])
    def test_auto(self, checkpoints, value):
        assert NeMoAutoModelForCausalLM.from_config(LLAMA, torch_dtype=value).dtype == torch.float32
        in_config = {**LLAMA, "dtype": "bfloat16"}
        assert NeMoAutoModelForCausalLM.from_config(in_config, torch_dtype=value).dtype == torch.bfloat16
        loaded = NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], torch_dtype=value)
        assert loaded.dtype == torch.bfloat16

    def test_from_pretrained(self, checkpoints):
        model = NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], torch_dtype="float32")
        assert model.dtype == torch.float32
        assert commit_of(model) == FIRST

    @pytest.mark.parametrize("value", ["bfloat17", "int8", "nn", torch.int64, 16])
    def test_bad_ones(self, checkpoints, value):
        with pytest.raises(ValueError, match=f"torch_dtype must be .* got {value!r}"):
            NeMoAutoModelForCausalLM.from_config(LLAMA, torch_dtype=value)
        with pytest.raises(ValueError, match=f"^dtype must be .* got {value!r}"):
            NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], dtype=value)

    def test_two_that_differ(self):
        with pytest.raises(ValueError, match="torch_dtype='float32' and dtype='bfloat16'"):
            NeMoAutoModelForCausalLM.from_config(LLAMA, torch_dtype="float32", dtype="bfloat16")
        NeMoAutoModelForCausalLM.from_config(LLAMA, torch_dtype="float32", dtype=torch.float32)


class TestModel:
    def test_a_pretrained_model_is_ready_to_train(self, checkpoints):
        model = NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST])
        assert model.training
        assert model.config.use_cache is False
        assert type(model) is LlamaForCausalLM

    def test_attn_implementation(self, checkpoints):
        for model in (
            NeMoAutoModelForCausalLM.from_config(LLAMA, attn_implementation="eager"),
            NeMoAutoModelForCausalLM.from_pretrained(checkpoints[FIRST], attn_implementation="eager"),
        ):
            assert model.config._attn_implementation == "eager"

    def test_options_of_the_loader_pass_through(self, checkpoints):
        loaded = NeMoAutoModelForCausalLM.from_pretrained(
            checkpoints[FIRST], vocab_size=64, ignore_mismatched_sizes=True, output_loading_info=True
        )
        assert loaded[0].training
        assert loaded[0].lm_head.weight.shape == (64, 8)
        assert loaded[1]["mismatched_keys"]

    def test_options_of_the_reference_system_are_explained(self, caplog):
        caplog.set_level(logging.INFO, logger="automodel")
        NeMoAutoModelForCausalLM.from_config(LLAMA, use_liger_kernel=False, use_sdpa_patching=False, force_hf=False)
        assert not caplog.records
        NeMoAutoModelForCausalLM.from_config(
            LLAMA, use_liger_kernel=True, use_sdpa_patching=True, force_hf=True, backend={"attn": "te"}
        )
        first_words = [record.getMessage().split()[0] for record in caplog.records]
        assert first_words == ["use_liger_kernel", "use_sdpa_patching", "force_hf", "backend"]


class TestMeta:
    @pytest.mark.parametrize("config", [LLAMA, NEMOTRON_H, QWEN3_NEXT], ids=lambda config: config["model_type"])
    def test_from_config(self, config):
        arguments = {"config": config, "torch_dtype": "bfloat16"}
        model = build_on_meta(NeMoAutoModelForCausalLM.from_config, arguments)
        real = NeMoAutoModelForCausalLM.from_config(**arguments)
        shapes = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
        assert shapes == {name: (value.shape, value.dtype) for name, value in real.state_dict().items()}
        tensors = [*model.parameters(), *model.buffers()]
        assert {tensor.device.type for tensor in tensors} == {"meta"}

    @pytest.mark.parametrize("factory", [NeMoAutoModelForCausalLM, AutoModelForCausalLM, LlamaForCausalLM])
    def test_from_pretrained_reads_no_weights(self, checkpoints, tmp_path, factory):
        (tmp_path / "config.json").write_bytes((checkpoints[SECOND] / "config.json").read_bytes())
        arguments = {"pretrained_model_name_or_path": tmp_path, "torch_dtype": "float32", "num_hidden_layers": 3}
        model = build_on_meta(factory.from_pretrained, arguments)
        assert isinstance(model, LlamaForCausalLM)
        assert len(model.model.layers) == 3
        assert {(tensor.device.type, tensor.dtype) for tensor in model.parameters()} == {("meta", torch.float32)}

    def test_any_other_factory(self):
        model = build_on_meta(torch.nn.Linear, {"in_features": 2, "out_features": 3})
        assert model.weight.is_meta


class TestKernelFallbacks:
    @pytest.fixture
    def said(self):
        """What transformers' kernel module logs, its memory of what it has said before wiped."""
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        source = logging.getLogger("transformers.integrations.hub_kernels")
        source.addHandler(handler)
        transformers.utils.logging.warning_once.cache_clear()
        yield messages
        source.removeHandler(handler)

    def test_the_advice_is_silent_inside(self, said):
        with quiet_kernel_fallbacks():
            self.forward()
            logging.getLogger("transformers.integrations.hub_kernels").warning("something else")
        assert said == ["something else"]

    def test_the_advice_is_given_outside(self, said):
        with quiet_kernel_fallbacks():
            pass
        self.forward()
        assert any("mamba_ssm" in message for message in said)

    def forward(self):
        model = NeMoAutoModelForCausalLM.from_config(NEMOTRON_H)
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
@pytest.mark.parametrize(
    "load", [NeMoAutoConfig.from_pretrained, NeMoAutoModelForCausalLM.from_pretrained, load_tokenizer]
)
def test_a_missing_folder_is_named_as_one(load, name):
    with pytest.raises(FileNotFoundError, match=f"there is no model folder '{name}'"):
        load(name)
