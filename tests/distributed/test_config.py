"""Sections `distributed` and `dist_env`."""

import pytest

from automodel.config.loader import ConfigNode
from automodel.config.sections import NotAvailableYetError, build_section
from automodel.distributed.config import (
    DistEnvConfig,
    DistributedConfig,
    OffloadConfig,
    ParallelSizes,
    describe_ranks,
)


def distributed(**values):
    return build_section(DistributedConfig, ConfigNode(values), "distributed")


def test_by_default_all_processes_share_one_sharded_model():
    assert distributed() == DistributedConfig()
    assert distributed().strategy_name == "fsdp2"
    assert distributed().sizes(1) == ParallelSizes()
    assert distributed().sizes(4) == ParallelSizes(dp_shard=4)


@pytest.mark.parametrize("strategy", ["megatron_fsdp", "megatron-fsdp", "mfsdp"])
def test_megatron_fsdp_has_several_spellings(strategy):
    assert distributed(strategy=strategy).strategy_name == "megatron_fsdp"


@pytest.mark.parametrize("key", ["tp_size", "pp_size", "cp_size", "ep_size"])
def test_dimensions_that_are_not_built_yet(key):
    with pytest.raises(NotAvailableYetError, match=rf"distributed\.{key}: 2 is not available yet"):
        distributed(**{key: 2})
    assert distributed(**{key: 1}).sizes(2).data == 2


def test_an_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"distributed\.strategy must be one of 'fsdp2', 'ddp'.*got 'zero3'"):
        distributed(strategy="zero3")


def test_dp_size_must_be_the_number_of_processes():
    assert distributed(dp_size=2).sizes(2).data == 2
    with pytest.raises(ValueError, match=r"distributed\.dp_size must be null or the number of processes \(1\), got 2"):
        distributed(dp_size=2).sizes(1)


def test_replicas_divide_the_processes():
    assert distributed(dp_replicate_size=2).sizes(8) == ParallelSizes(dp_replicate=2, dp_shard=4)
    expected = r"distributed\.dp_replicate_size must be a divisor of the number of processes \(4\), got 3"
    with pytest.raises(ValueError, match=expected):
        distributed(dp_replicate_size=3).sizes(4)


def test_ddp_only_replicates():
    assert distributed(strategy="ddp").sizes(4) == ParallelSizes(dp_replicate=4)
    with pytest.raises(ValueError, match=r"distributed\.dp_replicate_size must be 1 or null with ddp"):
        distributed(strategy="ddp", dp_replicate_size=2)


@pytest.mark.parametrize("key", ["dp_size", "dp_replicate_size", "fsdp2_forward_prefetch_depth"])
def test_sizes_are_positive(key):
    with pytest.raises(ValueError, match=rf"distributed\.{key} must be positive or null, got 0"):
        distributed(**{key: 0})


@pytest.mark.parametrize(("value", "mode"), [(None, None), (False, None), (True, "full"), ("selective", "selective")])
def test_modes_of_activation_checkpointing(value, mode):
    assert distributed(activation_checkpointing=value).checkpointing_mode == mode


def test_an_unknown_mode_of_activation_checkpointing():
    expected = r"distributed\.activation_checkpointing must be true or false, or one of 'full', 'selective', got 'some'"
    with pytest.raises(ValueError, match=expected):
        distributed(activation_checkpointing="some")


def test_offloading_is_a_switch_or_a_mapping():
    assert distributed().offloading is None
    assert distributed(offload_policy=False).offloading is None
    assert distributed(offload_policy=True).offloading == OffloadConfig()
    assert distributed(offload_policy={"pin_memory": False}).offloading == OffloadConfig(pin_memory=False)
    with pytest.raises(ValueError, match=r"unknown key distributed\.offload_policy\.pin_memry \(did you mean"):
        distributed(offload_policy={"pin_memry": False})
    with pytest.raises(ValueError, match=r"distributed\.offload_policy must be null with strategy ddp, got True"):
        distributed(strategy="ddp", offload_policy=True)


def test_a_description_names_the_layout():
    def describe(world_size, **values):
        return describe_ranks(distributed(**values).sizes(world_size), distributed(**values))

    assert describe(1) == "1"
    assert describe(4) == "4 (FSDP2, sharded over all)"
    assert describe(4, dp_replicate_size=2) == "4 (HSDP, 2 replicas of 2 shards)"
    assert describe(2, strategy="ddp") == "2 (DDP, a whole model on each)"


def test_the_policy_is_a_section_of_its_own():
    assert distributed(mp_policy={"param_dtype": "float32"}).mp_policy.param_dtype == "float32"
    with pytest.raises(ValueError, match=r"distributed\.mp_policy\.cast_forward_inputs must be true or false"):
        distributed(mp_policy={"cast_forward_inputs": 3})


@pytest.mark.parametrize("name", ["int8", "floaty"])
def test_an_unknown_policy_dtype_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"distributed\.mp_policy\.reduce_dtype must be null or one of .*, got '{name}'"
    ):
        distributed(mp_policy={"reduce_dtype": name})
    assert distributed(mp_policy={"reduce_dtype": "torch.bfloat16"}).mp_policy.reduce_dtype == "torch.bfloat16"


def test_options_that_do_nothing_are_known():
    ddp = {"strategy": "ddp", "enable_fsdp2_prefetch": True, "mp_policy": {"reduce_dtype": "bf16"}}
    assert distributed(**ddp).ignored_options(2) == [
        "distributed.enable_fsdp2_prefetch",
        "distributed.mp_policy.reduce_dtype",
    ]
    assert distributed(offload_policy=True).ignored_options(1) == ["distributed.offload_policy"]
    assert distributed(fsdp2_forward_prefetch_depth=2).ignored_options(2) == [
        "distributed.fsdp2_forward_prefetch_depth"
    ]
    assert distributed().ignored_options(2) == []


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_a_timeout_is_positive(minutes):
    with pytest.raises(ValueError, match=r"dist_env\.timeout_minutes must be positive"):
        build_section(DistEnvConfig, {"timeout_minutes": minutes}, "dist_env")
    assert build_section(DistEnvConfig, {"timeout_minutes": 1}, "dist_env").timeout_minutes == 1.0
