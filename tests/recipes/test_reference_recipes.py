"""Recipes in the forms that users of the reference system write, of which each is refused by name.

A recipe of the table is followed by a part of the message for each thing in it that is not there. One dry run tells
them all.
"""

import pytest

from automodel.cli.main import main
from reference_recipes import HELLASWAG, LLM, LOADER, MODEL, NEMO, TEXT, TRAINING, ReferenceFolder

REFUSALS = {
    "question answering": (
        f"{TRAINING}{MODEL}{HELLASWAG}  num_samples_limit: 64\n{LOADER}",
        [f"target '{LLM}.hellaswag.HellaSwag' is not available yet"],
    ),
    "adapters on squad": (
        f"""
recipe:
  _target_: nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction
{TRAINING}{MODEL}
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  match_all_linear: true
  exclude_modules: ["*.lm_head"]
  dim: 8
  alpha: 32
  use_triton: true
dataset:
  _target_: {LLM}.squad.make_squad_dataset
  dataset_name: some/squad
  split: train
  limit_dataset_samples: 128
validation_dataset:
  _target_: {LLM}.squad.make_squad_dataset
  split: validation
packed_sequence: {{packed_sequence_size: 0}}
""",
        ["section 'peft' is not available yet", f"target '{LLM}.squad.make_squad_dataset' is not available yet"],
    ),
    "packed sequences": (
        (
            f"{TRAINING}{MODEL}{HELLASWAG}"
            "packed_sequence: {packed_sequence_size: 1024, packing_strategy: thd, split_across_pack: false}\n"
        ),
        ["section 'packed_sequence' is not available yet (switched off by packed_sequence.packed_sequence_size: 0)"],
    ),
    "a vision model": (
        f"""
recipe: FinetuneRecipeForVLM
{TRAINING}
model:
  _target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained
  pretrained_model_name_or_path: some/vlm
  attn_implementation: eager
  text_config: {{use_cache: false}}
processor:
  _target_: transformers.AutoProcessor.from_pretrained
  pretrained_model_name_or_path: some/vlm
freeze_config: {{freeze_embeddings: true, freeze_vision_tower: true, freeze_language_model: false}}
dataset:
  _target_: nemo_automodel.components.datasets.vlm.datasets.make_cord_v2_dataset
  path_or_dataset: some/receipts
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  num_workers: 1
  pin_memory: true
  collate_fn: {{_target_: nemo_automodel.components.datasets.vlm.collate_fns.qwen2_5_collate_fn}}
""",
        [
            "recipe FinetuneRecipeForVLM is not available yet",
            "section 'processor' is not available yet",
            "section 'freeze_config' is not available yet",
            "NeMoAutoModelForImageTextToText.from_pretrained' is not available yet",
            "make_cord_v2_dataset' is not available yet",
            "qwen2_5_collate_fn' is not available yet",
        ],
    ),
    "a benchmark": (
        f"""
recipe: BenchmarkingRecipeForNextTokenPrediction
{TRAINING.replace("  tp_size: 1", "  pp_size: 4").replace("  cp_size: 1", "  ep_size: 8")}
benchmark: {{warmup_steps: 10, peak_tflops: 989, nsys_start: -1, nsys_end: -1, nsys_ranks: [], num_nodes: 4}}
model:
  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_config
  config: BASE
  backend: {{_target_: nemo_automodel.components.models.common.utils.BackendConfig, attn: te, dispatcher: hybridep}}
dataset:
  _target_: {LLM}.mock_iterable_dataset.MockIterableDataset
  seq_len: 4096
  vocab_size: 1000
compile: {{enabled: true, mode: max-autotune}}
nvtx: true
""",
        [
            "recipe BenchmarkingRecipeForNextTokenPrediction is not available yet",
            "section 'benchmark' is not available yet",
            "section 'compile' is not available yet (switched off by compile.enabled: false)",
            "section 'nvtx' is not available yet (switched off by nvtx: false)",
            "distributed.pp_size: 4 is not available yet",
            "MockIterableDataset' is not available yet",
        ],
    ),
    "distillation": (
        f"""
recipe: KnowledgeDistillationRecipeForNextTokenPrediction
{TRAINING}{MODEL}{TEXT}
teacher_model:
  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/teacher
kd_ratio: 0.5
kd_loss_fn: {{_target_: nemo_automodel.components.loss.kd_loss.KDLoss, ignore_index: -100, temperature: 1.0}}
offload_teacher_model: false
""",
        [
            "recipe KnowledgeDistillationRecipeForNextTokenPrediction is not available yet",
            "section 'teacher_model' is not available yet",
            "section 'kd_ratio' is not available yet",
            "section 'kd_loss_fn' is not available yet",
        ],
    ),
    "experts in parallel": (
        f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
moe_metrics: {{enabled: true, mode: brief}}
distributed:
  strategy: fsdp2
  ep_size: 8
  activation_checkpointing: true
  moe: {{reshard_after_forward: false, mp_policy: {{_target_: torch.distributed.fsdp.MixedPrecisionPolicy}}}}
""",
        ["section 'moe_metrics' is not available yet", "distributed.ep_size: 8 is not available yet"],
    ),
    "the older form of distributed, in parallel": (
        f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  tp_size: 2
  sequence_parallel: true
""",
        ["distributed.tp_size: 2 is not available yet"],
    ),
    "columns to text": (
        f"""
{TRAINING}{MODEL}
dataset:
  _target_: {LLM}.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset
  path_or_dataset_id: [one.jsonl, two.jsonl]
  column_mapping: {{context: text, question: q, answer: a}}
  answer_only_loss_mask: true
  limit_dataset_samples: 10
  seq_length: 512
  padding: do_not_pad
""",
        ["ColumnMappedTextInstructionDataset' is not available yet"],
    ),
    "chats, with a tracker": (
        f"""
{TRAINING}{MODEL}
wandb: {{project: mine, entity: team, name: run, tags: [a], mode: offline, dir: /tmp}}
dataset:
  _target_: {LLM}.chat_dataset.ChatDataset
  path_or_dataset_id: chats.jsonl
  split: train
  tokenizer:
    _target_: transformers.AutoTokenizer.from_pretrained
    pretrained_model_name_or_path: some/model
""",
        ["section 'wandb' is not available yet (switched off by wandb.enable: false)", "ChatDataset' is not available"],
    ),
    "other trackers": (
        f"{TRAINING}{MODEL}{TEXT}mlflow: {{experiment_name: a}}\ncomet: {{project_name: b}}\n",
        ["section 'mlflow' is not available yet", "section 'comet' is not available yet"],
    ),
    "FP8, quantized weights, noise": (
        f"""
{TRAINING}{MODEL}{TEXT}
fp8: {{enabled: true, recipe_name: tensorwise, enable_fsdp_float8_all_gather: true}}
quantization: {{load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_compute_dtype: bfloat16}}
neftune: {{noise_alpha: 5.0}}
qat: {{enabled: true, fake_quant_after_n_steps: 10}}
""",
        [f"section '{name}' is not available yet" for name in ("fp8", "quantization", "neftune", "qat")],
    ),
    "classification of sequences": (
        f"""
recipe: TrainFinetuneRecipeForSequenceClassification
{TRAINING}
model:
  _target_: {NEMO}.NeMoAutoModelForSequenceClassification.from_pretrained
  pretrained_model_name_or_path: some/model
  num_labels: 3
dataset: {{_target_: {LLM}.seq_cls.GLUE_MRPC, split: train}}
""",
        [
            "recipe TrainFinetuneRecipeForSequenceClassification is not available yet",
            "NeMoAutoModelForSequenceClassification.from_pretrained' is not available yet",
            "GLUE_MRPC' is not available yet",
        ],
    ),
    "pretraining of a hybrid": (
        f"""
{TRAINING.replace("masked_ce.MaskedCrossEntropy", "linear_ce.FusedLinearCrossEntropy")}
model:
  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_config
  config: {{_target_: transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: BASE}}
dataset: {{_target_: {LLM}.nanogpt_dataset.NanogptDataset, file_pattern: "data/*.bin", seq_len: 4096}}
{LOADER}  num_workers: 4
  prefetch_factor: 2
""",
        ["FusedLinearCrossEntropy' is not available yet", "NanogptDataset' is not available yet"],
    ),
    "several datasets": (
        f"""
{TRAINING}{MODEL}
dataset:
  - {{_target_: {LLM}.hellaswag.HellaSwag, path_or_dataset: a}}
  - {{_target_: {LLM}.hellaswag.HellaSwag, path_or_dataset: b}}
validation_dataset_second: {{_target_: {LLM}.hellaswag.HellaSwag, path_or_dataset: c}}
""",
        ["dataset: a list of 2 is not available yet", "section 'validation_dataset_second' is not available yet"],
    ),
    "start-up, repair and kernels": (
        f"""
{TRAINING}{MODEL}{TEXT}
prewarm: {{mamba_ssd_autotune: true, pipeline_stage_compile: true}}
embedding_row_repair: {{min_norm: 1.0e-4, max_rows: 256}}
mfu: {{device: h100, peak_tflops: 1979.0}}
kernels: {{backend: triton}}
kernel_cache: {{trust_group: true}}
""",
        [
            *(f"section '{name}' is not available yet" for name in ("prewarm", "mfu", "kernel_cache")),
            "kernels.backend: 'triton' is not available yet",
        ],
    ),
    "launchers": (
        f"{TRAINING}{MODEL}{TEXT}slurm: {{nodes: 2, account: a}}\nskypilot: {{cloud: aws, accelerators: 'H100:8'}}\n",
        ["section 'slurm' is not available yet", "section 'skypilot' is not available yet"],
    ),
    "an optimizer of a package that is not installed": (
        f"{MODEL}{TEXT}optimizer: {{_target_: transformer_engine.pytorch.optimizers.FusedAdam, lr: 1.0e-4}}\n",
        ["target 'transformer_engine.pytorch.optimizers.FusedAdam' cannot be resolved"],
    ),
    "a parallelizer": (
        (
            f"{TRAINING}{MODEL}{TEXT}"
            "parallelizer: {_target_: nemo_automodel.components.moe.parallelizer.Parallelizer}\nautonvtx: true\n"
        ),
        ["section 'parallelizer' is not available yet", "section 'autonvtx' is not available yet"],
    ),
    "a shape of the learning rate that is not there": (
        (
            f"{MODEL}{TEXT}optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}\n"
            "lr_scheduler: {lr_decay_style: WSD, wsd_decay_steps: 10}\n"
        ),
        ["lr_scheduler.lr_decay_style must be one of 'constant', 'linear', 'cosine', 'inverse-square-root', got 'WSD'"],
    ),
    "a scheduler of PyTorch": (
        (
            f"{MODEL}{TEXT}optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}\n"
            "lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 10}\n"
        ),
        ["lr_scheduler._target_: 'torch.optim.lr_scheduler.CosineAnnealingLR' is not available yet"],
    ),
    "asynchronous checkpoints of the other format": (
        f"{TRAINING}{MODEL}{TEXT}checkpoint: {{enabled: true, model_save_format: torch_save, is_async: true}}\n",
        ["checkpoint.model_save_format: 'torch_save' is not available yet"],
    ),
    "a collater with arguments": (
        (
            f"{TRAINING}{MODEL}{TEXT}"
            "dataloader:\n  _target_: torchdata.stateful_dataloader.StatefulDataLoader\n"
            f"  collate_fn: {{_target_: {NEMO}.components.datasets.utils.default_collater, pad_token_id: 3}}\n"
        ),
        ["dataloader.collate_fn: a function with some of its arguments is not available yet"],
    ),
    "several mistakes at once": (
        (
            f"{MODEL}{TEXT}optimizer: {{_target_: torch.optim.AdamW, learning_rate: 1.0e-4}}\n"
            "step_scheduler: {max_step: 5}\ndist_envs: {backend: nccl}\nkernel_cach: {}\n"
        ),
        [
            "unknown section 'dist_envs' (did you mean 'dist_env'?)",
            "unknown section 'kernel_cach' (did you mean 'kernel_cache'?)",
            "unknown key step_scheduler.max_step (did you mean 'max_steps'?)",
            "unknown key optimizer.learning_rate",
        ],
    ),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ReferenceFolder(tmp_path).write


@pytest.mark.parametrize("name", REFUSALS)
def test_a_recipe_that_does_not_is_refused_by_name(name, write, capsys):
    text, messages = REFUSALS[name]
    assert main(["run", write(text), "--dry-run"]) == 2
    err = capsys.readouterr().err
    for message in messages:
        assert message in err
    assert "Traceback" not in err
    told = [line for line in err.splitlines() if line.startswith(("error: ", "  also: "))]
    assert len(told) >= len(messages)
    assert "recipe.yaml:" in err
