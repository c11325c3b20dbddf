"""Tensors on disk: what is written, how it is read back, and which models are the same."""

import errno
import resource

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from automodel.checkpoint import tensors


def stored(directory):
    """The names and shapes in all shards."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            assert not found.keys() & set(shard.keys())
            found.update({name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()})  # noqa: SIM118
    return found


def test_a_model_comes_back_bit_by_bit(tiny_model, tmp_path):
    saved, loaded = tiny_model(), tiny_model()
    with torch.no_grad():
        saved.norm.weight[0] = float("nan")
        saved.norm.weight[1] = -0.0
        saved.norm.bias[2] = float("inf")
    tensors.save_model(saved, tmp_path / "model")
    tensors.load_model(loaded, tmp_path / "model")
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert stored(tmp_path / "model") == {name: tuple(value.shape) for name, value in saved.state_dict().items()}


def test_a_tied_tensor_is_stored_once_and_stays_tied(tiny_model, tmp_path):
    saved, loaded = tiny_model(tied=True), tiny_model(tied=True)
    tensors.save_model(saved, tmp_path / "model")
    names = stored(tmp_path / "model").keys()
    assert ("embedding.weight" in names) != ("head.weight" in names)
    tensors.load_model(loaded, tmp_path / "model")
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded.head.weight, saved.head.weight)


class Unusual(nn.Module):
    """Tensors that storage formats trip over."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.rand(()))
        self.transposed = nn.Parameter(torch.rand(3, 5).t())
        self.short = nn.Parameter(torch.rand(4).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("counter", torch.tensor(3))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("part", torch.rand(10)[2:5])
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def test_tensors_of_unusual_layout_and_dtype_come_back(tmp_path):
    saved, loaded = Unusual(), Unusual()
    saved.counter += 4
    tensors.save_model(saved, tmp_path / "model")
    tensors.load_model(loaded, tmp_path / "model")
    for name, value in saved.state_dict().items():
        restored = loaded.state_dict()[name]
        assert restored.dtype == value.dtype
        assert torch.equal(restored, value), name
    assert not torch.equal(loaded.scratch, saved.scratch)


def test_the_state_of_parameters_that_are_not_trained_is_not_asked_for(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model[1].parameters(), lr=0.1)

    (model, optimizer), (other, restored) = make(), make()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tensors.save_optimizer(model, optimizer, tmp_path / "optim")
    tensors.load_optimizer(other, restored, tmp_path / "optim")
    states = zip(optimizer.state.values(), restored.state.values(), strict=True)
    assert all(torch.equal(one[key], two[key]) for one, two in states for key in one)


def test_an_optimizer_that_has_not_stepped_can_be_saved(tiny_model, tmp_path):
    model = tiny_model()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tensors.save_optimizer(model, optimizer, tmp_path / "optim")
    tensors.load_optimizer(model, optimizer, tmp_path / "optim")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_signature_tells_models_apart_by_class_names_and_shapes(tiny_model):
    signature = tensors.model_signature(tiny_model())
    assert signature == tensors.model_signature(tiny_model())
    with torch.device("meta"):
        assert signature == tensors.model_signature(tiny_model())
    renamed = type("Renamed", (tiny_model,), {})
    others = [tiny_model(16), tiny_model(tied=True), renamed(), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
    assert len({signature, *map(tensors.model_signature, others)}) == len(others) + 1


def test_settings_that_a_checkpoint_changes_are_told(tiny_model, tmp_path, caplog):
    model = tiny_model()
    tensors.save_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5), tmp_path / "optim")
    changed = torch.optim.AdamW(model.parameters(), lr=2.0, weight_decay=0.25)
    tensors.load_optimizer(model, changed, tmp_path / "optim")
    assert caplog.messages == ["optimizer.weight_decay: the checkpoint's 0.5 holds, not 0.25"]
    assert changed.param_groups[0]["weight_decay"] == 0.5


def test_a_failed_write_of_the_optimizer_gives_the_reason_of_the_operating_system(tmp_path):
    model = nn.Sequential(*[nn.Linear(60, 60) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(60)).sum().backward()
    optimizer.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    reasons = []
    # Which layer of PyTorch notices depends on the place: within a tensor, or at the end of its archive.
    for size in range(500, 60_000, 3_500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(CheckpointException) as error:
                tensors.save_optimizer(model, optimizer, tmp_path / str(size))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        reasons += [reason for reason, _ in error.value.failures.values()]
    assert {type(reason) for reason in reasons} == {OSError}
    assert {reason.errno for reason in reasons} == {errno.EFBIG}


def test_an_archive_that_fails_without_a_reason_says_that_the_disk_may_be_full(tmp_path):
    unexplained = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    told = str(tensors._write_failure(unexplained, tmp_path))
    assert told.startswith(f"{tmp_path} could not be written: the disk may be full (")
    assert told.endswith(f"MiB are free): {unexplained}")
    other = RuntimeError("out of memory")
    assert tensors._write_failure(other, tmp_path) is other
