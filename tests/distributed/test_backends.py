"""Which library carries the collectives."""

import logging

import pytest
import torch

from automodel.distributed.backends import choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo"])
def test_a_cpu_has_gloo(backend, caplog):
    assert choose_backend(backend, CPU) == "gloo"
    assert not caplog.records


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_what_needs_a_gpu_becomes_gloo_on_a_cpu_with_a_warning(backend, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose_backend(backend, CPU) == "gloo"
    assert caplog.messages == [f"dist_env.backend {backend} needs GPUs, which this machine lacks: gloo is used"]


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this build of torch has no NCCL")
@pytest.mark.parametrize("backend", [None, "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_gpu_has_nccl_and_its_host_gloo(backend):
    assert choose_backend(backend, CUDA) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_build_without_the_backend_is_named():
    with pytest.raises(ValueError, match=r"dist_env\.backend must be available in this build of torch, got None"):
        choose_backend(None, CUDA)


def test_gloo_can_carry_tensors_of_a_gpu():
    assert choose_backend("gloo", CUDA) == "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize("backend", ["glo", "", "cpu:", "tpu:gloo", "gloo,", "undefined"])
def test_an_unknown_backend_is_named(backend):
    with pytest.raises(ValueError, match=rf"dist_env\.backend must be null or one of .*gloo.*, got '{backend}'"):
        choose_backend(backend, CPU)
