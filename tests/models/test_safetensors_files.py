"""Places of tensors in safetensors files, and what is said about files that are damaged or missing."""

import json

import pytest
import torch
from safetensors.torch import save_file

from automodel.models.safetensors_files import read_folder, read_header
from embedding_models import INPUT, OUTPUT, make_weights, write_model


def test_the_offset_is_where_the_bytes_are(tmp_path):
    weights = make_weights()
    file = tmp_path / "all.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    places = read_header(file)
    assert set(places) == set(weights)
    content = file.read_bytes()
    for key, weight in weights.items():
        place = places[key]
        assert (place.key, place.dtype, place.shape) == (key, "BF16", tuple(weight.shape))
        stored = content[place.offset : place.offset + weight.nbytes]
        assert stored == weight.view(torch.uint8).numpy().tobytes()


def test_a_folder_is_its_index_or_its_single_file(tmp_path):
    folder = write_model(tmp_path / "model")
    places = read_folder(folder)
    assert len({place.file for place in places.values()}) == 4
    assert {INPUT, OUTPUT} <= set(places)
    save_file({"only": torch.ones(2)}, folder / "model.safetensors")
    assert set(read_folder(folder)) == {"only"}


def test_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        read_folder(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00003-of-00004.safetensors is missing"):
        read_folder(folder)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(file):
    file.write_bytes(file.read_bytes()[:20])


def cut_length(file):
    file.write_bytes(file.read_bytes()[:5])


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


def wrong_length(file):
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def wrong_json(file):
    content = file.read_bytes()
    file.write_bytes(content[:8] + content[8:].replace(b'"dtype"', b'"dtipe"', 1))


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, cut_header, cut_length, lengthen, wrong_length, wrong_json, empty])
def test_a_damaged_file_is_named(tmp_path, damage):
    folder = write_model(tmp_path / "model")
    damage(folder / "model-00002-of-00004.safetensors")
    with pytest.raises(ValueError, match=r"model-00002-of-00004.safetensors is damaged or not complete"):
        read_folder(folder)


def test_a_tensor_that_the_index_promises_is_named(tmp_path):
    folder = write_model(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model-00001-of-00004.safetensors lacks extra"):
        read_folder(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', "\udcff", "[" * 100_000], ids=lambda text: text[:20]
)
def test_a_damaged_index_is_named(tmp_path, text):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"index.json is no index of weights"):
        read_folder(folder)
