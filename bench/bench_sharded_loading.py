"""Filling a model that four ranks hold together: seconds and memory per rank, beside one sequential read of the files.

The memory is the anonymous memory (RssAnon) that a rank has at most beyond what it had before its shard got memory. A
rank that did nothing needless would need its shard and no more.
"""

import copy
import shutil
import statistics
import time

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from automodel.models.auto import NeMoAutoModelForCausalLM, build_on_meta
from automodel.models.weights import FreshWeights, weight_source
from peak_memory import PeakMemory
from rank_pool import RankPool
from tiny_models import shard

RANKS, ROUNDS, MIB = 4, 3, 2**20


@pytest.fixture(scope="module")
def config():
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        max_position_embeddings=128,
    )


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    template = build_on_meta(NeMoAutoModelForCausalLM.from_config, {"config": config})
    model = copy.deepcopy(template).to_empty(device="cpu")
    FreshWeights().fill(model, template, seed=0)
    model.save_pretrained(folder, max_shard_size="50MB")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pool():
    with RankPool(most=RANKS) as pool:
        yield pool


def fill(rank, world_size, factory, arguments):
    """Returns the seconds, the growth of memory and the size of the shard, in bytes."""
    template = build_on_meta(factory, arguments)
    model = copy.deepcopy(template)
    shard(model)
    torch.distributed.barrier()
    with PeakMemory() as memory:
        model.to_empty(device="cpu")
        report = weight_source(factory, arguments).fill(model, template, seed=0)
    parameters = (parameter.detach() for parameter in model.parameters())
    local = [value.to_local() if isinstance(value, DTensor) else value for value in parameters]
    return report.seconds, memory.growth, sum(value.nbytes for value in local)


def read_files(folder):
    """Returns the seconds of one sequential read."""
    started, buffer = time.perf_counter(), bytearray(8 * MIB)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


@pytest.mark.benchmark(group="filling a sharded model")
@pytest.mark.parametrize("kind", ["pretrained", "fresh"])
def test_sharded_filling(benchmark, pool, folder, config, kind):
    if kind == "pretrained":
        case = (NeMoAutoModelForCausalLM.from_pretrained, {"pretrained_model_name_or_path": str(folder)})
    else:
        case = (NeMoAutoModelForCausalLM.from_config, {"config": config})
    pool.run(RANKS, fill, *case)
    reads, fills = [], []

    def read_first():
        reads.append(read_files(folder))

    def run():
        fills.extend(pool.run(RANKS, fill, *case))

    benchmark.pedantic(run, setup=read_first, rounds=ROUNDS)
    seconds, growth, size = (list(column) for column in zip(*fills, strict=True))
    files = list(folder.glob("*.safetensors"))
    results = {
        "files": f"{len(files)} of {sum(file.stat().st_size for file in files) / MIB:.0f} MiB together",
        "seconds of the slowest rank": round(
            statistics.median(max(seconds[i : i + RANKS]) for i in range(0, len(seconds), RANKS)), 3
        ),
        "seconds of one sequential read": round(statistics.median(reads), 3),
        "shard, MiB": round(max(size) / MIB),
        "most memory of a rank, MiB": round(max(growth) / MIB),
        "beyond the shard, MiB": round(max(more - own for more, own in zip(growth, size, strict=True)) / MIB),
    }
    benchmark.extra_info.update(results)
    print(kind, results)
