"""Refusals and the choice of units. What runs on a GPU with the package is not tried here."""

import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from automodel.distributed import megatron_fsdp
from automodel.distributed.megatron_fsdp import MegatronFsdp

HAS_PACKAGE = importlib.util.find_spec("megatron_fsdp") is not None


class Layer(nn.Linear):
    pass


class SharedLayer(Layer):
    pass


CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
from automodel.distributed.megatron_fsdp import MegatronFsdp
print("megatron_fsdp" in sys.modules)
try:
    MegatronFsdp.check_available()
except Exception as error:
    print(type(error).__name__, error)
print("megatron_fsdp" in sys.modules)
"""


@pytest.mark.skipif(HAS_PACKAGE, reason="megatron-fsdp is installed")
def test_without_the_package():
    with pytest.raises(ImportError, match=r"^distributed\.strategy megatron_fsdp needs .* `pip install megatron-fsdp`"):
        MegatronFsdp.check_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda(tmp_path):
    package = tmp_path / "megatron_fsdp"
    package.mkdir()
    # It must not be imported: the refusal comes first.
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    before, message, after = result.stdout.strip().splitlines()
    assert message.startswith("RuntimeError distributed.strategy megatron_fsdp needs a CUDA device")
    assert "use fsdp2" in message
    assert (before, after) == ("False", "False")


@pytest.mark.skipif(not HAS_PACKAGE, reason="megatron-fsdp is not installed")
def test_the_package_takes_what_it_is_given():
    package = importlib.import_module("megatron_fsdp")
    shard = inspect.signature(package.fully_shard_model).parameters
    assert {
        "module",
        "device_mesh",
        "dp_shard_dim",
        "dp_outer_dim",
        "hybrid_fsdp_group",
        "fsdp_unit_modules",
        "device",
        "mixed_precision_policy",
        "sync_model_each_microbatch",
    } <= set(shard)
    assert "optimizer" in inspect.signature(package.fully_shard_optimizer).parameters
    assert hasattr(package.MegatronFSDP, "set_model_auto_sync")
    package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
    )


@pytest.mark.skipif(HAS_PACKAGE, reason="megatron-fsdp is installed")
def test_no_object_is_made_without_the_package():
    from automodel.distributed.config import DistributedConfig, ParallelSizes
    from automodel.distributed.mesh import build_mesh
    from automodel.distributed.rank_group import RankGroup

    mesh = build_mesh(ParallelSizes(), world=RankGroup(), device_type="cpu")
    with pytest.raises(ImportError, match="pip install megatron-fsdp"):
        MegatronFsdp(DistributedConfig(), mesh=mesh, device=torch.device("cpu"), dtype=torch.float32)


def test_units_are_the_classes_whose_every_block_is_one():
    shared = [SharedLayer(2, 2), SharedLayer(2, 2)]
    shared[1].weight = shared[0].weight
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([Layer(2, 2), *shared, SharedLayer(2, 2), Layer(2, 2)]))
    assert megatron_fsdp._unit_classes(model) == [Layer]
    assert megatron_fsdp._unit_classes(nn.Linear(2, 2)) == []
