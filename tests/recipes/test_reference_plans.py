"""Recipes in the forms that users of the reference system write, of which each gives a plan."""

import pytest

from automodel.cli.main import main
from reference_recipes import LOADER, MODEL, NEMO, TEXT, TRAINING, ReferenceFolder

PLANS = {
    "full fine-tuning": f"""
recipe: TrainFinetuneRecipeForNextTokenPrediction
{TRAINING}{MODEL}{TEXT}{LOADER}
checkpoint:
  enabled: true
  checkpoint_dir: "2024"
  model_save_format: safetensors
  save_consolidated: true
packed_sequence:
  packed_sequence_size: 0
  split_across_pack: false
clip_grad_norm: {{max_norm: 1.0}}
ci:
  recipe_owner: someone
  time: "00:10:00"
  vllm_deploy: true
  checkpoint_robustness: {{hf_kl_threshold: 5e-3, distributed.tp_size: 2}}
""",
    "no recipe key, and a model from a configuration": f"""
{TRAINING}{TEXT}
model:
  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_config
  config:
    _target_: {NEMO}.NeMoAutoConfig.from_pretrained
    pretrained_model_name_or_path: BASE
    num_hidden_layers: 1
  use_liger_kernel: false
  attn_implementation: sdpa
""",
    "a configuration by its name alone": f"""
{TRAINING}{TEXT}
model:
  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_config
  config: BASE
  trust_remote_code: false
""",
    "kernels of the custom models": f"""
{TRAINING}{MODEL}  use_sdpa_patching: false
  force_hf: true
  output_hidden_states: false
  backend:
    _target_: nemo_automodel.components.models.common.BackendConfig
    attn: te
    linear: te
    rms_norm: torch_fp32
    enable_deepep: false
    experts: gmm
{TEXT}
""",
    "anchors and merged mappings": f"""
_data: &data
  _target_: automodel.data.text.TextFilesDataset
  context_length: 32
_sizes:
  - &batch 8
{MODEL}
dataset:
  <<: *data
  split: train
validation_dataset:
  <<: *data
  split: validation
  context_length: 16
step_scheduler: {{global_batch_size: *batch, local_batch_size: *batch}}
optimizer: {{_target_: torch.optim.Adam, lr: 1.0e-4, fused: false, foreach: null}}
""",
    "the older form of distributed": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  dp_replicate_size: 1
  tp_size: 1
  use_hf_tp_plan: false
  custom_tp_plan: null
  backend: nccl
  world_size: 1
  sequence_parallel: false
  offload_policy: null
  mp_policy: {{_target_: torch.distributed.fsdp.MixedPrecisionPolicy, param_dtype: torch.bfloat16}}
""",
    "options of parallelism that is not asked for": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
distributed:
  strategy: ddp
  tp_size: 1
  pp_size: 1
  ep_size: 1
  tp_plan: null
  offload_policy: null
  autocast_dtype: null
  activation_checkpointing: false
  defer_fsdp_grad_sync: true
  reshard_after_forward: false
  enable_fsdp2_prefetch: false
  fsdp2_forward_prefetch_depth: 2
  overlap_param_gather: true
  nccl_ub: false
  mp_policy:
    _target_: torch.distributed.fsdp.MixedPrecisionPolicy
    param_dtype: bfloat16
    reduce_dtype: float32
    cast_forward_inputs: true
  pipeline: {{pp_schedule: interleaved1f1b, pp_microbatch_size: 1, layers_per_stage: 2, scale_grads_in_schedule: false}}
  moe: {{reshard_after_forward: false, wrap_outer_model: true, ignore_router_for_ac: true}}
  multimodal: {{frozen_sharding: root}}
""",
    "sections that are switched off": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
peft: null
compile: {{enabled: false, mode: default, fullgraph: false, dynamic: true, backend: null}}
fp8: {{enabled: false, recipe_name: tensorwise, filter_fqns: [lm_head]}}
wandb: {{enable: false, project: some-project}}
quantization: {{load_in_4bit: false, load_in_8bit: false}}
prewarm: {{cublas_backward: false, comm_groups: false}}
nvtx: false
freeze_config: {{freeze_vision_tower: false, freeze_embeddings: false, freeze_language_model: false}}
qat: {{enabled: false, quantizer: {{_target_: torchao.quantization.qat.linear.Quantizer, groupsize: 128}}}}
checkpoint: {{enabled: false, model_save_format: torch_save, is_async: true, staging_dir: /scratch}}
""",
    "keys that change nothing in one process": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
dist_env: {{backend: gloo, init_method: "env://", timeout_minutes: 30}}
seed: 11
rng: {{seed: 11, ranked: true}}
step_scheduler: {{global_batch_size: 2, local_batch_size: 1, gc_every_steps: 100, log_remote_every_steps: 5,
                  save_checkpoint_every_epoch: false, start_step: 0}}
checkpoint:
  _target_: nemo_automodel.components.checkpoint.checkpointing.CheckpointingConfig
  single_rank_consolidation: true
  v4_compatible: false
  diffusers_compatible: false
  load_base_model: false
  skip_task_head_prefixes_for_base_model: null
  model_cache_dir: /cache
  model_repo_id: some/model
  is_peft: false
  best_metric_key: default
  max_recent_checkpoints: 3
lr_scheduler: {{lr_decay_style: constant, init_lr: 0.0, override_opt_param_scheduler: true, wd_incr_style: constant}}
clip_grad_norm: {{max_norm: 0.5, foreach: true}}
""",
    "megatron_fsdp, in one process": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
distributed:
  strategy: megatron_fsdp
  zero_dp_strategy: 3
  overlap_grad_reduce: true
  megatron_fsdp_unit_modules: [transformers.models.llama.modeling_llama.LlamaDecoderLayer]
""",
    "megatron_fsdp, its older form": f"""
{MODEL}{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
distributed: {{_target_: nemo_automodel.components.distributed.megatron_fsdp.MegatronFSDPManager, zero_dp_strategy: 3}}
""",
    "a dataset of one's own file": f"""
{TRAINING}{MODEL}
dataset:
  _target_: my_data.py:Numbers
  size: 5
  tokenizer: {{_target_: transformers.AutoTokenizer.from_pretrained, pretrained_model_name_or_path: BASE}}
""",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ReferenceFolder(tmp_path).write


@pytest.mark.parametrize("name", PLANS)
def test_a_recipe_that_runs_here_gives_a_plan(name, write, capsys):
    file = write(PLANS[name])
    status = main(["run", file, "--dry-run"])
    out, err = capsys.readouterr()
    assert (status, err.replace("\n", "") if status else "") == (0, "")
    assert "LlamaForCausalLM" in out


def test_a_plan_keeps_the_placeholders_of_the_environment(write, capsys, monkeypatch):
    for name, value in {"AM_TOKEN": "swordfish", "AM_FOLDER": "sword/fish", "AM_SEED": "74189"}.items():
        monkeypatch.setenv(name, value)
    recipe = f"""
{MODEL}  token: ${{AM_TOKEN}}
{TEXT}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-4}}
checkpoint: {{checkpoint_dir: "${{AM_FOLDER}}", best_metric_key: "${{AM_TOKEN}}"}}
seed: ${{AM_SEED}}
"""
    assert main(["run", write(recipe), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    for part in (
        "best_metric_key=${AM_TOKEN} -> ${AM_FOLDER}",
        "seed=${AM_SEED}",
    ):
        assert part in out
    assert not any(secret in out + err for secret in ("swordfish", "sword/fish", "74189"))
