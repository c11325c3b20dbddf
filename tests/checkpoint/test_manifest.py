"""The manifest: what is written is read back, and what is damaged is named."""

import json

import pytest

from automodel.checkpoint.manifest import FORMAT_VERSION, make_manifest, read_manifest

GOOD = make_manifest(step=3, epoch=0, ranks=2, model_class="Model", model_signature="ab12", torch_version="2.13")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "checkpoint.json"


def test_a_manifest_comes_back(file):
    file.write_text(json.dumps(GOOD))
    assert read_manifest(file.parent) == GOOD


def test_one_without_a_number_of_ranks_is_of_one_rank(file):
    file.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "ranks"}))
    assert read_manifest(file.parent)["ranks"] == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("{}", "does not describe a checkpoint of automodel"),
        ("[]", "does not describe a checkpoint of automodel"),
        ("7", "does not describe a checkpoint of automodel"),
        (json.dumps({**GOOD, "format": "other"}), "does not describe a checkpoint of automodel"),
        (json.dumps({**GOOD, "version": "1"}), "does not describe a checkpoint of automodel"),
        (json.dumps({**GOOD, "ranks": "two"}), "ranks must be of type int, got 'two'"),
        (json.dumps({**GOOD, "model_signature": None}), "model_signature must be of type str, got None"),
    ],
)
def test_a_damaged_manifest_is_named_with_the_reason(file, text, reason):
    file.write_text(text)
    with pytest.raises(ValueError, match="is damaged") as error:
        read_manifest(file.parent)
    assert str(error.value).startswith(f"{file} is damaged: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("key", ["step", "epoch", "model_class", "model_signature"])
def test_a_missing_key_is_named(file, key):
    file.write_text(json.dumps({name: value for name, value in GOOD.items() if name != key}))
    with pytest.raises(ValueError, match=rf"checkpoint\.json is damaged: it has no {key}$"):
        read_manifest(file.parent)


def test_a_newer_format_is_refused_whatever_its_keys(file):
    file.write_text(json.dumps({"format": "automodel-checkpoint", "version": FORMAT_VERSION + 1}))
    with pytest.raises(ValueError, match=f"has format version {FORMAT_VERSION + 1}, newer than {FORMAT_VERSION}"):
        read_manifest(file.parent)
