"""A recipe that trains in a second: the whole job, on a model of a few thousand parameters."""

import yaml


class TinyRecipe:
    """A hybrid of a few thousand parameters with attention dropout, so that the random state matters."""

    def __init__(self, corpus, file):
        self.file = file
        data = {"_target_": "automodel.data.text.TextFilesDataset", "source": str(corpus), "context_length": 32}
        data["validation_tokens"] = 4_000
        self.values = {
            "step_scheduler": {
                "global_batch_size": 4,
                "local_batch_size": 2,
                "max_steps": 20,
                "ckpt_every_steps": 6,
                "val_every_steps": 10,
                "val_at_start": True,
            },
            "rng": {"seed": 7},
            "model": {
                "_target_": "automodel.NeMoAutoModelForCausalLM.from_config",
                "config": {
                    "_target_": "transformers.NemotronHConfig",
                    "vocab_size": 320,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "layers_block_type": ["mamba", "attention", "mlp"],
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                    "attention_dropout": 0.1,
                    "mamba_num_heads": 4,
                    "mamba_head_dim": 16,
                    "ssm_state_size": 8,
                    "n_groups": 1,
                    "chunk_size": 16,
                },
            },
            "tokenizer": {
                "_target_": "automodel.data.tokenizer.train_byte_level_bpe",
                "source": str(corpus),
                "vocab_size": 320,
            },
            "dataset": {**data, "split": "train"},
            "validation_dataset": {**data, "split": "validation", "sample_prompt": "def "},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-2, "weight_decay": 0.1},
            "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 3},
            "distributed": {"strategy": "fsdp2", "mp_policy": {"param_dtype": "float32"}},
        }

    def __getitem__(self, section):
        return self.values[section]

    def __setitem__(self, section, value):
        self.values[section] = value

    def write(self):
        self.file.write_text(yaml.safe_dump(self.values, sort_keys=False))
        return str(self.file)
