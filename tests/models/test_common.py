"""Recipes of the reference system choose kernels with a BackendConfig; it is accepted and its lack of effect told."""

import logging

from automodel.config.loader import ConfigNode


def test_a_backend_is_accepted_and_said_to_have_no_effect(caplog):
    caplog.set_level(logging.WARNING)
    config = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    node = ConfigNode(
        {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": config,
            "backend": {"_target_": "nemo_automodel.components.models.common.BackendConfig", "attn": "te", "rope": 1},
        }
    )
    assert repr(node.arguments()["backend"]) == "BackendConfig(attn='te', rope=1)"
    assert node.instantiate().config.hidden_size == 8
    assert "backend has no effect" in caplog.text
