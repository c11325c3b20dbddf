"""A Hub cache on disk, as huggingface_hub lays it out, with two commits of one tiny model."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FIRST, SECOND = "1" * 40, "2" * 40


@dataclass(frozen=True, kw_only=True)
class HubCache:
    cache_dir: Path
    name: str = "org/tiny"

    @property
    def repository(self) -> Path:
        return self.cache_dir / ("models--" + self.name.replace("/", "--"))

    def add(self, commit: str, folder: Path, *, subfolder: str = "") -> None:
        blobs, snapshot = self.repository / "blobs", self.repository / "snapshots" / commit / subfolder
        blobs.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():
            blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))

    def point(self, branch: str, commit: str) -> None:
        reference = self.repository / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def tiny_llama(*, fill: float, **changes) -> LlamaForCausalLM:
    keys = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Folders of two versions: weights of 1.0 and epsilon 0.001, weights of 2.0 and epsilon 0.002."""
    folders = {}
    for number, commit in enumerate((FIRST, SECOND), start=1):
        folder = folders[commit] = tmp_path_factory.mktemp("checkpoint")
        model = tiny_llama(fill=float(number), rms_norm_eps=number / 1000)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folders


@pytest.fixture
def hub(tmp_path, checkpoints) -> HubCache:
    cache = HubCache(cache_dir=tmp_path / "hub")
    for commit, folder in checkpoints.items():
        cache.add(commit, folder)
    cache.point("main", FIRST)
    cache.point("dev", SECOND)
    return cache


@pytest.fixture
def move_after(monkeypatch, hub) -> Iterator[Callable[[object, str], None]]:
    """Let a function do its real work and move `main` to the second commit each time it returns."""

    def wrap(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def then_move(*args, **kwargs):
            result = real(*args, **kwargs)
            hub.point("main", SECOND)
            return result

        monkeypatch.setattr(owner, name, then_move)

    return wrap
