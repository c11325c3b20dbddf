"""Embeddings are found by their names and read row by row without memory of their own."""

import pytest
import torch
from safetensors.torch import save_file

from automodel.checkpoint.embedding_files import (
    UnreadableModelError,
    find_embeddings,
    printable,
    read_rows,
    read_squared_norms,
)
from embedding_models import INPUT, OUTPUT, make_weights, write_model


def matrix(rows=6, columns=4):
    return torch.ones(rows, columns)


def names_of(tmp_path, **weights):
    found = find_embeddings(write_model(tmp_path / "model", {k.replace("/", "."): v for k, v in weights.items()}))
    return found.input.key, None if found.output is None else found.output.key


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INPUT, OUTPUT),
        ("transformer.wte.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("backbone.embeddings.weight", "lm_head.weight"),
        ("transformer.word_embeddings.weight", "lm_head.weight"),
        ("tok_embeddings.weight", "output.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("wte.weight", None),
    ],
)
def test_usual_names_are_found(tmp_path, first, second):
    weights = {first: matrix(), **({second: matrix()} if second else {})}
    assert names_of(tmp_path, **weights) == (first, second)


def test_other_modules_are_no_embeddings(tmp_path):
    others = {
        "lm_head_norm.weight": torch.ones(4),
        "model.layers.0.embed_tokens.weight": matrix(),
        "model.layers.0.output.weight": matrix(),
        "vision_tower.embeddings.weight": matrix(),
        "model.embed_tokens.bias": matrix(),
        "position_embeddings.weight": matrix(),
        "my_embed_tokens.weight": matrix(),
    }
    assert names_of(tmp_path, **others, **{INPUT: matrix(), OUTPUT: matrix()}) == (INPUT, OUTPUT)


def test_the_output_of_the_same_shape_is_preferred(tmp_path):
    weights = {INPUT: matrix(), "lm_head.weight": matrix(2, 4), "score.head.weight": matrix()}
    assert names_of(tmp_path, **weights) == (INPUT, "score.head.weight")


def test_equally_good_names_are_refused(tmp_path):
    weights = {"encoder.embed_tokens.weight": matrix(), "decoder.embed_tokens.weight": matrix()}
    with pytest.raises(UnreadableModelError, match=r"decoder.embed_tokens.weight, encoder.embed_tokens.weight"):
        find_embeddings(write_model(tmp_path / "model", weights))


def test_no_embedding(tmp_path):
    with pytest.raises(UnreadableModelError, match="holds no input embedding"):
        find_embeddings(write_model(tmp_path / "model", {"layers.0.weight": matrix()}))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({INPUT: torch.ones(5)}, r"must be a matrix \[vocab, hidden\], its shape is \[5\]"),
        ({INPUT: torch.ones(0, 5)}, r"its shape is \[0, 5\]"),
        ({INPUT: torch.ones(2, 5, dtype=torch.int8)}, "is of dtype I8; only plain F32, F16, BF16"),
        ({INPUT: matrix(), f"{INPUT}_scale_inv": torch.ones(1)}, "is scaled by model.embed_tokens.weight_scale_inv"),
        ({INPUT: matrix(), OUTPUT: torch.ones(6)}, "lm_head.weight must be a matrix"),
    ],
)
def test_what_is_no_plain_matrix_is_refused(tmp_path, weights, message):
    with pytest.raises(UnreadableModelError, match=message):
        find_embeddings(write_model(tmp_path / "model", weights))


@pytest.mark.parametrize(
    ("settings", "keys", "tied"),
    [
        ({"tie_word_embeddings": True}, (INPUT,), True),
        ({"tie_word_embeddings": False}, (INPUT,), False),
        ({"tie_word_embeddings": None}, (INPUT,), True),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": False}}, (INPUT,), False),
        ({"tie_word_embeddings": True}, (INPUT, OUTPUT), True),
        ({"tie_word_embeddings": False}, (INPUT, OUTPUT), False),
        ({"tie_word_embeddings": True}, (OUTPUT,), True),
    ],
)
def test_tied_or_not(tmp_path, settings, keys, tied):
    found = find_embeddings(write_model(tmp_path / "model", dict.fromkeys(keys, matrix()), **settings))
    assert found.tied is tied
    assert found.input.key == keys[0]
    assert (found.output is None) == (len(keys) == 1)


def test_stored_weights_that_differ_are_not_tied_whatever_the_configuration_says(tmp_path):
    weights = {INPUT: matrix(), OUTPUT: 2 * matrix()}
    assert not find_embeddings(write_model(tmp_path / "model", weights, tie_word_embeddings=True)).tied


def test_padding_of_the_text_model(tmp_path):
    text = {"text_config": {"pad_token_id": 3}}
    assert find_embeddings(write_model(tmp_path / "a", pad_token_id=5)).padding_id == 5
    assert find_embeddings(write_model(tmp_path / "b", pad_token_id=5, **text)).padding_id == 3
    assert find_embeddings(write_model(tmp_path / "c", pad_token_id=None)).padding_id is None


@pytest.mark.parametrize("text", [None, -1, 2048, 10**30, "3", True, 2.0])
def test_no_padding_row(tmp_path, text):
    """The text model's word counts, whatever the whole says."""
    settings = {"pad_token_id": 5, "text_config": {"pad_token_id": text}}
    assert find_embeddings(write_model(tmp_path / "model", **settings)).padding_id is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON: Expecting property name"),
        (b"\xff", "is no JSON: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "is no JSON: maximum recursion depth exceeded"),
        (b"[]", "is no configuration of a model"),
        (b'"x"', "is no configuration of a model"),
    ],
    ids=["cut", "no_text", "deep", "list", "string"],
)
def test_a_damaged_configuration_is_named(tmp_path, content, message):
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UnreadableModelError, match=rf"{folder}/config\.json {message}"):
        find_embeddings(folder)


@pytest.mark.parametrize(("said", "tied"), [(None, False), (False, False), (True, True)])
def test_one_of_several_files_is_tied_only_where_the_configuration_says_so(tmp_path, said, tied):
    folder = write_model(tmp_path / "model", tie_word_embeddings=said)
    found = find_embeddings(folder / "model-00001-of-00004.safetensors")
    assert (found.input.key, found.output, found.tied) == (INPUT, None, tied)


def test_what_would_upset_a_terminal_is_escaped():
    assert printable("a\x1b[2J\n\u202e\udcff b\u00e9") == r"a\x1b[2J\n\u202e\udcff b" + "\u00e9"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_norms_and_rows_are_those_of_the_weights(tmp_path, dtype):
    weights = make_weights(dtype, damaged={7: float("nan"), 9: 0.0})
    save_file(weights, tmp_path / "model.safetensors")
    found = find_embeddings(tmp_path / "model.safetensors")
    seen = []
    norms = read_squared_norms(found.input, on_bytes=seen.append)
    expected = weights[INPUT].double().square().sum(1)
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0, equal_nan=True)
    assert sum(seen) == found.input.num_bytes == weights[INPUT].nbytes
    ((ids, rows),) = read_rows(found.output, [2047, 0, 5])
    assert ids == [2047, 0, 5]
    assert torch.equal(
        rows.view(torch.uint8), weights[OUTPUT].view(torch.uint8).reshape(2048, -1)[ids].view(torch.uint8)
    )
