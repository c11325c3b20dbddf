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
from pathlib import Path

import pytest

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
        # Called after a file of `main` was asked for: (repository, file).
        self.after_request = lambda name, file: None
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
        if not is_api and revision == "main":
            self.after_request(name, rest[-1])

    def reply(self, request, status, body, headers, *, with_body=True):
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.server.shutdown()
    server.server.server_close()


def run(hub, tmp_path, script):
    """Run a script against the server, with a cache of its own; return what it prints as JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    script = "import json\nfrom automodel import NeMoAutoConfig, NeMoAutoModelForCausalLM\n" + script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_branch_that_moves_while_the_hub_is_asked(hub, tmp_path, checkpoints):
    hub.commits["org/tiny"] = dict(checkpoints)
    hub.branches["org/tiny"] = FIRST

    def move(name, file):
        hub.branches[name] = SECOND

    hub.after_request = move
    loads = run(
        hub,
        tmp_path,
        "def load(**options):\n"
        "    model = NeMoAutoModelForCausalLM.from_pretrained('org/tiny', **options)\n"
        "    return [model.config.rms_norm_eps, model.lm_head.weight[0, 0].item()]\n"
        "config = NeMoAutoConfig.from_pretrained('org/tiny')\n"
        "first = load(config=config)\n"
        "fresh = load()\n"
        "forced = load(force_download=True)\n"
        "cached = load(local_files_only=True)\n"
        "old = load(revision='1' * 40, local_files_only=True)\n"
        "print(json.dumps([first, fresh, forced, cached, old]))\n",
    )
    # The second load asks the Hub again and sees that the branch moved: nothing is forced offline.
    assert loads == [[0.001, 1.0], [0.002, 2.0], [0.002, 2.0], [0.002, 2.0], [0.001, 1.0]]
    weights = [request for request in hub.requests if "safetensors" in request and request.startswith("GET")]
    assert {request.split("/resolve/")[1].partition("/")[0] for request in weights} == {FIRST, SECOND}


@pytest.fixture
def custom_code(tmp_path, checkpoints):
    """Two commits of a repository that brings its own model class, each with its version of it."""
    folders = {}
    for version, commit in enumerate((FIRST, SECOND), start=1):
        folder = folders[commit] = tmp_path / f"custom_{version}"
        shutil.copytree(checkpoints[commit], folder)
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


def test_code_of_a_repository(hub, tmp_path, custom_code):
    hub.commits["org/custom"] = custom_code
    hub.branches["org/custom"] = FIRST

    def move(name, file):
        hub.branches[name] = SECOND

    hub.after_request = move
    seen = run(
        hub,
        tmp_path,
        "refused = []\n"
        f"for source in ('org/custom', {str(custom_code[FIRST])!r}):\n"
        "    try:\n"
        "        NeMoAutoConfig.from_pretrained(source, revision='1' * 40)\n"
        "    except ValueError as error:\n"
        "        refused.append('trust_remote_code' in str(error))\n"
        "config = NeMoAutoConfig.from_pretrained('org/custom', trust_remote_code=True)\n"
        "built = NeMoAutoModelForCausalLM.from_config(config, trust_remote_code=True)\n"
        "loaded = NeMoAutoModelForCausalLM.from_pretrained('org/custom', config=config, trust_remote_code=True)\n"
        f"local = NeMoAutoModelForCausalLM.from_pretrained({str(custom_code[SECOND])!r}, trust_remote_code=True)\n"
        "print(json.dumps([refused, built.version, loaded.version, loaded.lm_head.weight[0, 0].item(),\n"
        "    local.version, local.lm_head.weight[0, 0].item()]))\n",
    )
    assert seen == [[True, True], 1, 1, 1.0, 2, 2.0]
