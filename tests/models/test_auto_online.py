"""Loads from a real HTTP server that speaks the part of the Hub's protocol that a download needs.

huggingface_hub reads its endpoint when it is imported, and so does transformers its folder of downloaded code: the
loads run in a process of their own.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = "1" * 40, "2" * 40

CONFIGURATION = """
from transformers import LlamaConfig
class TinyConfig(LlamaConfig):
    model_type = "tiny_custom"
"""
MODEL = """
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig
class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
    version = {version}
"""


class Hub:
    """Repositories as folders: commits[name][commit] is the folder, branches[name] the commit of `main`."""

    def __init__(self):
        self.commits: dict[str, dict[str, Path]] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[str] = []
        # Called with the repository after `main` was asked for.
        self.after_request = lambda name: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                hub.answer(self, with_body=False)

            def do_GET(self):
                hub.answer(self, with_body=True)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request, *, with_body):
        path = request.path.partition("?")[0].strip("/").split("/")
        self.requests.append(f"{request.command} {request.path}")
        is_api = path[:2] == ["api", "models"]
        name, rest = ("/".join(path[2:4]), path[4:]) if is_api else ("/".join(path[:2]), path[2:])
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.branches.get(name) if revision == "main" else revision
        folder = self.commits.get(name, {}).get(commit)
        if folder is None:
            self.reply(
                request, 404, b"", {"X-Error-Code": "RepoNotFound" if name not in self.commits else "RevisionNotFound"}
            )
        elif is_api:
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            body = json.dumps({"id": name, "sha": commit, "siblings": files}).encode()
            self.reply(request, 200, body if with_body else b"", {"Content-Type": "application/json"})
        elif not (folder / rest[-1]).is_file():
            self.reply(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            body = (folder / rest[-1]).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit}
            self.reply(request, 200, body, headers, with_body=with_body)
        if revision == "main":
            self.after_request(name)

    def reply(self, request, status, body, headers, *, with_body=True):
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)


SCRIPT = """
import json
from automodel import NeMoAutoConfig, NeMoAutoModelForCausalLM

def load(source, **options):
    model = NeMoAutoModelForCausalLM.from_pretrained(source, **options)
    weight = model.lm_head.weight[0, 0].item()
    return [model.config.rms_norm_eps, weight, getattr(model, "version", None)]

def refuses(source):
    try:
        NeMoAutoConfig.from_pretrained(source, revision="1" * 40)
    except ValueError as error:
        return "trust_remote_code" in str(error)

seen = {}
config = NeMoAutoConfig.from_pretrained("org/tiny")
seen["first"] = load("org/tiny", config=config)
seen["fresh"] = load("org/tiny")
seen["forced"] = load("org/tiny", force_download=True)
seen["cached"] = load("org/tiny", local_files_only=True)
seen["old"] = load("org/tiny", revision="1" * 40, local_files_only=True)

trust = {"trust_remote_code": True}
seen["refused"] = [refuses("org/custom"), refuses(FOLDER)]
config = NeMoAutoConfig.from_pretrained("org/custom", **trust)
seen["custom_built"] = NeMoAutoModelForCausalLM.from_config(config, **trust).version
seen["custom_loaded"] = load("org/custom", config=config, **trust)
seen["custom_folder"] = load(FOLDER, **trust)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def custom_code(tmp_path_factory, checkpoints):
    """Two commits of a repository that brings its own model class, each with its version of it."""
    folders = {}
    for version, commit in enumerate((FIRST, SECOND), start=1):
        folder = folders[commit] = tmp_path_factory.mktemp("custom")
        shutil.copytree(checkpoints[commit], folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = "tiny_custom"
        config["auto_map"] = {
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "configuration_tiny.py").write_text(CONFIGURATION)
        (folder / "modeling_tiny.py").write_text(MODEL.format(version=version))
    return folders


@pytest.fixture(scope="module")
def hub(checkpoints, custom_code):
    """A server whose branches move to the second commit as soon as somebody has asked for the first."""
    server = Hub()
    for name, folders in (("org/tiny", checkpoints), ("org/custom", custom_code)):
        server.commits[name] = dict(folders)
        server.branches[name] = FIRST
    server.after_request = lambda name: server.branches.update({name: SECOND})
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="module")
def seen(hub, custom_code, tmp_path_factory):
    """What the script saw, in a process with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    script = f"FOLDER = {str(custom_code[SECOND])!r}\n" + SCRIPT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_follow_the_config_when_the_branch_moves(seen):
    assert seen["first"] == [0.001, 1.0, None]


def test_a_load_without_a_config_asks_the_hub_again(seen):
    assert seen["fresh"] == seen["forced"] == [0.002, 2.0, None]


def test_what_was_downloaded_is_found_without_the_hub(seen):
    assert seen["cached"] == [0.002, 2.0, None]
    assert seen["old"] == [0.001, 1.0, None]


def test_weights_are_only_asked_for_by_commit(seen, hub):
    revisions = {
        request.split("/resolve/")[1].partition("/")[0] for request in hub.requests if "safetensors" in request
    }
    assert revisions == {FIRST, SECOND}


def test_force_download_downloads_again(seen, hub):
    weights = [request for request in hub.requests if request.startswith("GET /org/tiny") and "safetensors" in request]
    assert len(weights) == 3


def test_code_of_a_repository_needs_permission(seen):
    assert seen["refused"] == [True, True]


def test_code_of_a_repository_is_read_at_the_commit_of_its_config(seen):
    assert seen["custom_built"] == 1
    assert seen["custom_loaded"] == [0.001, 1.0, 1]


def test_code_of_a_folder(seen):
    assert seen["custom_folder"] == [0.002, 2.0, 2]
