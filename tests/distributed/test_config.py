"""Sections `distributed` and `dist_env`."""

import pytest

from automodel.config.loader import ConfigNode
from automodel.config.sections import NotAvailableYetError, build_section
from automodel.distributed.config import DistEnvConfig, DistributedConfig


def distributed(**values):
    return build_section(DistributedConfig, ConfigNode(values), "distributed")


def test_the_defaults_are_one_unsharded_process():
    assert distributed().strategy == "fsdp2"
    assert distributed() == DistributedConfig()
    distributed().check_world_size(1)


def test_several_processes_are_refused():
    with pytest.raises(NotAvailableYetError, match="training in 2 processes is not available yet"):
        distributed(dp_size=2).check_world_size(2)


@pytest.mark.parametrize("strategy", ["megatron_fsdp", "megatron-fsdp", "mfsdp"])
def test_strategies_that_are_not_built_yet(strategy):
    with pytest.raises(NotAvailableYetError, match=rf"distributed\.strategy: '{strategy}' is not available yet"):
        distributed(strategy=strategy)


def test_an_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"distributed\.strategy must be one of 'fsdp2', 'ddp'.*got 'zero3'"):
        distributed(strategy="zero3")


def test_dp_size_must_be_the_number_of_processes():
    distributed(dp_size=1).check_world_size(1)
    with pytest.raises(ValueError, match=r"distributed\.dp_size must be null or the number of processes \(1\), got 2"):
        distributed(dp_size=2).check_world_size(1)


def test_the_policy_is_a_section_of_its_own():
    assert distributed(mp_policy={"param_dtype": "float32"}).mp_policy.param_dtype == "float32"
    with pytest.raises(ValueError, match=r"distributed\.mp_policy\.cast_forward_inputs must be true or false"):
        distributed(mp_policy={"cast_forward_inputs": 3})


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_a_timeout_is_positive(minutes):
    with pytest.raises(ValueError, match=r"dist_env\.timeout_minutes must be positive"):
        build_section(DistEnvConfig, {"timeout_minutes": minutes}, "dist_env")
    assert build_section(DistEnvConfig, {"timeout_minutes": 1}, "dist_env").timeout_minutes == 1.0
