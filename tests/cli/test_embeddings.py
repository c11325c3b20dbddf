"""`automodel embeddings`: what it prints, its exit status, and that the repaired model trains."""

import io
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from automodel.cli.main import main
from automodel.data.tokenizer import train_byte_level_bpe
from automodel.observe.metrics import read_rows
from embedding_models import DAMAGED, INPUT, OUTPUT, VOCABULARY, make_weights, write_model
from tiny_models import llama_config
from tiny_recipe import TinyRecipe


def inspect_json(capsys, *words):
    status = main(["embeddings", "inspect", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"word{number} of line {number % 7}" for number in range(3000)]
    for part in range(4):
        (folder / f"{part}.py").write_text("\n".join(words[part::4]))
    return folder


@pytest.fixture(scope="module")
def public_model(tmp_path_factory, corpus):
    """A model as it is published: 2,048 tokens of which 79 are damaged, sharded files, a tokenizer."""
    folder = tmp_path_factory.mktemp("public") / "model"
    torch.manual_seed(0)
    config = llama_config(vocab_size=VOCABULARY, hidden_size=24, pad_token_id=None, max_position_embeddings=64)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(make_weights()[INPUT])
    model.save_pretrained(folder, max_shard_size="60KB")
    train_byte_level_bpe(corpus, vocab_size=300, cache=False).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def test_a_published_model_is_inspected_repaired_and_trained(public_model, corpus, tmp_path, capsys, monkeypatch):
    status, found = inspect_json(capsys, public_model, "--min-norm", "1e-4")
    assert status == 1
    assert [row["id"] for row in found["damaged"]] == DAMAGED
    assert all(row["output_healthy"] for row in found["damaged"])

    repaired = tmp_path / "repaired"
    assert main(["embeddings", "repair", str(public_model), "--out", str(repaired), "--min-norm", "1e-4"]) == 0
    assert f"repaired 79 rows of {INPUT}" in capsys.readouterr().out
    status, found = inspect_json(capsys, repaired)
    assert (status, found["damaged"]) == (0, [])

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    recipe = TinyRecipe(corpus, tmp_path / "tiny.yaml")
    recipe["model"] = {
        "_target_": "automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": str(repaired),
        "torch_dtype": "float32",
    }
    recipe["tokenizer"] = {
        "_target_": "automodel.data.tokenizer.load_tokenizer",
        "pretrained_model_name_or_path": str(repaired),
    }
    recipe["step_scheduler"] |= {"max_steps": 2, "val_at_start": False}
    del recipe.values["validation_dataset"]
    assert main(["run", recipe.write(), "--run-dir", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    steps = read_rows(tmp_path / "run" / "training.jsonl")
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] < 100 for step in steps)


def test_what_inspect_prints(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    assert main(["embeddings", "inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split() == [
        "input",
        "embedding",
        INPUT,
        "[2048,",
        "24]",
        "bfloat16,",
        "model-00001-of-00004.safetensors",
    ]
    assert lines[1].endswith("model-00002-of-00004.safetensors, not tied")
    assert lines[2].startswith("healthy rows      1,969 of 2,048  min ")
    assert any(line.startswith("nan, inf") and line.split()[2] == "1" for line in lines)
    assert any(line.startswith("clearest gap") and "78 rows below" in line for line in lines)
    assert "damaged rows      79" in text
    table = [line.split() for line in lines if line.endswith(")") and "healthy (" in line]
    assert [int(row[0]) for row in table] == DAMAGED
    assert {row[2] for row in table} == {"healthy"}
    assert "embedding_row_repair:\n    min_norm: " in text


def test_a_healthy_model(tmp_path, capsys):
    folder = write_model(tmp_path / "model", make_weights(damaged={}))
    assert main(["embeddings", "inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "damaged rows      none" in text
    assert "min_norm 1e-6, the default" in text


def test_json_says_everything(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    status, found = inspect_json(capsys, folder)
    assert status == 1
    assert found["input_embedding"] == {
        "name": INPUT,
        "file": str(folder / "model-00001-of-00004.safetensors"),
        "dtype": "bfloat16",
        "shape": [2048, 24],
    }
    assert found["output_embedding"]["name"] == OUTPUT
    assert found["tied"] is False
    assert found["min_norm_from"] == "gap"
    assert found["gap"]["rows_below"] == 78
    assert found["healthy"]["rows"] == 1969
    assert sum(found["histogram"]["counts"]) + found["histogram"]["zero"] + found["histogram"]["nonfinite"] == 2048
    first, second = found["damaged"][:2]
    # JSON has no NaN.
    assert (first["id"], first["norm"], first["token"]) == (DAMAGED[0], None, None)
    assert (second["norm"], second["output_healthy"]) == (0.0, True)
    assert second["output_norm"] == pytest.approx(1.0, abs=0.5)


def test_the_threshold_can_be_given(tmp_path, capsys):
    status, found = inspect_json(capsys, write_model(tmp_path / "model"), "--min-norm", "1e-7")
    assert (status, len(found["damaged"]), found["min_norm"], found["min_norm_from"]) == (1, 5, 1e-7, "given")


def test_the_plot_is_an_svg_file(tmp_path, capsys):
    file = tmp_path / "plots" / "norms.svg"
    assert main(["embeddings", "inspect", str(write_model(tmp_path / "model")), "--plot", str(file)]) == 1
    root = ET.parse(file).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "model.embed_tokens.weight in model" in root.get("aria-label")
    assert [path.name for path in file.parent.iterdir()] == ["norms.svg"]


@pytest.mark.parametrize("damaged", [{}, None], ids=["healthy", "damaged"])
def test_a_plot_that_cannot_be_written_is_a_mistake(tmp_path, capsys, damaged):
    folder = write_model(tmp_path / "model", make_weights(damaged=damaged))
    file = folder / "config.json" / "norms.svg"
    assert main(["embeddings", "inspect", str(folder), "--plot", str(file)]) == 2
    assert f"error: --plot {file} cannot be written: " in capsys.readouterr().err


def test_a_deep_configuration_cannot_be_read(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text("[" * 100_000)
    assert main(["embeddings", "inspect", str(folder)]) == 3
    assert f"{folder / 'config.json'} is no JSON" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_say_damaged(tmp_path, capsys, monkeypatch):
    folder = write_model(tmp_path / "model", make_weights(damaged={}))
    with io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["embeddings", "inspect", str(folder)]) == 2
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "dtype"), [(INPUT, torch.float8_e5m2), (OUTPUT, torch.float8_e4m3fn)])
def test_no_repair_is_promised_that_would_be_refused(tmp_path, capsys, name, dtype):
    weights = make_weights()
    weights[name] = weights[name].to(dtype)
    folder, out = write_model(tmp_path / "model", weights), tmp_path / "out"
    assert main(["embeddings", "inspect", str(folder), "--min-norm", "1e-3"]) == 1
    text = capsys.readouterr().out
    assert "automodel embeddings repair" not in text
    assert f"{name} is {dtype}: rows can be repaired in" in text
    assert main(["embeddings", "repair", str(folder), "--out", str(out), "--min-norm", "1e-3"]) == 1
    assert f"{name} is {dtype}: rows can be repaired in" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("min_norm", ["1.2345678901234567e-3", "2e-3", "0.1"])
def test_the_suggested_section_has_the_threshold_exactly(tmp_path, capsys, min_norm):
    assert main(["embeddings", "inspect", str(write_model(tmp_path / "model")), "--min-norm", min_norm]) == 1
    lines = capsys.readouterr().out.splitlines()
    section = yaml.safe_load("\n".join(lines[lines.index("  embedding_row_repair:") :]))
    assert section == {"embedding_row_repair": {"min_norm": float(min_norm), "max_rows": 256}}


def test_the_suggested_command_allows_as_many_rows(tmp_path, capsys):
    weights = make_weights(torch.float32, damaged=dict.fromkeys(range(300), 0.0))
    assert main(["embeddings", "inspect", str(write_model(tmp_path / "model", weights))]) == 1
    assert "'automodel embeddings repair PATH --out DIR --max-rows 300'" in capsys.readouterr().out


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr("automodel.observe.byte_progress._PLAIN_SECONDS", 0.0)
    weights = {f"\x1b[2J.{name}": weight for name, weight in make_weights().items()}
    folder, out, plot = write_model(tmp_path / "\x1b[1m", weights), tmp_path / "\x1b[7m", tmp_path / "norms.svg"
    (folder / "\x1b.bin").touch()
    (folder / "tokenizer.json").write_text("{")
    assert main(["embeddings", "inspect", str(folder), "--plot", str(plot)]) == 1
    assert main(["embeddings", "repair", str(folder), "--out", str(out)]) == 0
    assert main(["embeddings", "repair", str(folder), "--out", str(out)]) == 2
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, caplog.text):
        assert r"\x1b" in text
        assert "\x1b" not in text
    assert r"\x1b[2J.model.embed_tokens.weight" in ET.parse(plot).getroot().get("aria-label")


def test_tokens_are_named_and_zero_rows_beyond_them_are_unused(tmp_path, corpus, capsys):
    tokenizer = train_byte_level_bpe(corpus, vocab_size=300, cache=False)
    size = len(tokenizer)
    folder = write_model(tmp_path / "model", make_weights(damaged={70: 0.0, 0: 0.0, 2000: 0.0, 2001: 1e-9}))
    tokenizer.save_pretrained(folder)
    status, found = inspect_json(capsys, folder)
    assert status == 1
    assert [(row["id"], row["token"]) for row in found["damaged"]] == [
        (0, "<|endoftext|>"),
        (70, tokenizer.decode([70])),
        (2001, None),
    ]
    assert found["unused_row_ids"] == [2000]
    assert size < 2000
    assert main(["embeddings", "inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert '"<|endoftext|>"' in text
    assert "unused rows       1 exactly zero" in text


def test_control_characters_of_tokens_do_not_reach_the_terminal(tmp_path, corpus, capsys):
    tokenizer = train_byte_level_bpe(corpus, vocab_size=300, cache=False)
    ids = range(1, 257)
    folder = write_model(tmp_path / "model", make_weights(damaged=dict.fromkeys(ids, 0.0)))
    tokenizer.save_pretrained(folder)
    assert main(["embeddings", "inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "\\u001b" in text


def test_a_tokenizer_that_cannot_be_loaded_is_no_obstacle(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert main(["embeddings", "inspect", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "warning: the tokenizer in" in captured.err
    assert "damaged rows      79" in captured.out


def test_tied_embeddings(tmp_path, capsys):
    weights = make_weights()
    del weights[OUTPUT]
    folder = write_model(tmp_path / "model", weights, tie_word_embeddings=True)
    assert main(["embeddings", "inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "output embedding  tied to the input embedding" in text
    assert "Not every damaged row has a healthy output row" in text
    assert main(["embeddings", "repair", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "tied to the output embedding" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_output_rows_are_told(tmp_path, capsys):
    weights = make_weights()
    weights[OUTPUT][DAMAGED[2]] = float("nan")
    status, found = inspect_json(capsys, write_model(tmp_path / "model", weights))
    assert status == 1
    assert [row["id"] for row in found["damaged"] if not row["output_healthy"]] == [DAMAGED[2]]


def test_many_damaged_rows_are_cut_short(tmp_path, capsys):
    weights = make_weights(torch.float32, damaged=dict.fromkeys(range(300), 0.0))
    assert main(["embeddings", "inspect", str(write_model(tmp_path / "model", weights))]) == 1
    assert "44 more; --json lists all" in capsys.readouterr().out


def damage_header(folder):
    file = folder / "model-00001-of-00004.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    return file.name


def truncate(folder):
    file = folder / "model-00001-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def remove(folder):
    (folder / "model-00002-of-00004.safetensors").unlink()
    return "model-00002-of-00004.safetensors is missing"


def remove_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    return "holds neither model.safetensors nor model.safetensors.index.json"


@pytest.mark.parametrize("damage", [damage_header, truncate, remove, remove_index])
@pytest.mark.parametrize("action", ["inspect", "repair"])
def test_what_cannot_be_read_is_named(tmp_path, capsys, damage, action):
    folder = write_model(tmp_path / "model")
    named = damage(folder)
    out = ["--out", str(tmp_path / "out")] if action == "repair" else []
    assert main(["embeddings", action, str(folder), *out]) == 3
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_not_there(tmp_path, capsys):
    assert main(["embeddings", "inspect", str(tmp_path / "nowhere")]) == 3
    assert f"{tmp_path / 'nowhere'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "model", "--min-norm", "0"], "min_norm must be positive and finite, got 0.0"),
        (["repair", "model", "--out", "out", "--min-norm", "nan"], "min_norm must be positive and finite, got nan"),
        (["repair", "model", "--out", "out", "--max-rows", "0"], "max_rows must be positive, got 0"),
        (["repair", "model", "--out", "model"], "must lie outside the source folder"),
        (["repair", "model", "--out", "full"], "exists already"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named(tmp_path, capsys, monkeypatch, words, message):
    write_model(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["embeddings", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model"]


def test_repair_says_what_it_did(tmp_path, capsys):
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["embeddings", "repair", str(folder), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"repaired 79 rows of {INPUT}, norm " in text
    assert str(DAMAGED) in text
    assert f"{out}: model-00001-of-00004.safetensors written anew, 3 linked, 2 copied" in text
    assert main(["embeddings", "repair", str(out), "--out", str(tmp_path / "again")]) == 0
    assert "has no damaged rows" in capsys.readouterr().out


def test_progress_counts_all_that_is_read_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("automodel.observe.byte_progress._PLAIN_SECONDS", 0.0)
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["embeddings", "repair", str(folder), "--out", str(out)]) == 0
    reading, *writing = capsys.readouterr().err.splitlines()
    assert reading.startswith(f"reading {INPUT}: 100% of 98.3kB")
    assert len(writing) == 3
    copied = sum(path.stat().st_size for path in out.iterdir() if path.stat().st_nlink == 1)
    assert writing[-1].startswith(f"writing {out}: 100% of {copied / 1000:.3g}kB")


def test_more_rows_than_allowed_are_refused(tmp_path, capsys):
    folder, out = write_model(tmp_path / "model"), tmp_path / "out"
    assert main(["embeddings", "repair", str(folder), "--out", str(out), "--max-rows", "78"]) == 1
    assert "79 rows" in capsys.readouterr().err
    assert not out.exists()


def test_the_target_can_be_the_median(tmp_path, capsys):
    weights = make_weights(torch.float32, damaged={5: 0.0, 6: 1e4})
    folder, out = write_model(tmp_path / "model", weights), tmp_path / "out"
    assert main(["embeddings", "repair", str(folder), "--out", str(out), "--target", "median"]) == 0
    row = load_file(out / "model-00001-of-00004.safetensors")[INPUT][5]
    assert float(row.norm()) == pytest.approx(float(weights[INPUT].norm(dim=1).median()), rel=1e-2)


def test_transformers_is_not_imported_without_need(tmp_path):
    save_file(make_weights(), tmp_path / "model.safetensors")
    code = (
        "import sys\nfrom automodel.cli.main import main\n"
        "status = main(['embeddings', 'inspect', sys.argv[1]])\n"
        "assert status == 1 and 'torch' in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=60)
