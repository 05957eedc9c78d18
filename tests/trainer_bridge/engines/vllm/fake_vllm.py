"""A program that behaves like vLLM's API server as seen from outside: it answers /health, and has other processes.

The name of the model chooses what else it does: see `PROGRAM`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from envkit.trainer_bridge.engines.vllm.launch import ServerSettings

PROGRAM = """
import http.server, pathlib, signal, subprocess, sys

model = pathlib.PurePath(sys.argv[sys.argv.index("--model") + 1]).name
port = int(sys.argv[sys.argv.index("--port") + 1])
if model == "too-large":
    print("(EngineCore pid=7) ERROR 11-26 09:00:00 [core.py:1] Traceback (most recent call last):")
    print("(EngineCore pid=7) ERROR 11-26 09:00:00 [core.py:1] ValueError: No available memory for the cache blocks.")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
if model == "unreadable":
    print("OSError: /models/unreadable has no config.json")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
child.stdout.readline()
if model in ("deaf", "never-ready"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    def end(*_):
        child.kill()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)

pathlib.Path(sys.argv[sys.argv.index("--model") + 1] + ".has-set-signals").touch()

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if model == "never-ready" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


SCRIPTED = """
import asyncio, os, pathlib, sys

sys.path.insert(0, {root!r})
from envkit.trainer_bridge.engines.vllm.plugin.envkit_fetch import Store
from tests.trainer_bridge.engines.vllm.fake_server import FakeServer

async def main():
    words = dict(zip(sys.argv, sys.argv[1:]))
    server = FakeServer(host=words["--host"], _port=int(words["--port"]), has_lora=False, store=Store())
    await server.start(5)
    with pathlib.Path({folder!r}, "pids").open("a") as pids:
        print(os.getpid(), file=pids)
    await server.wait_ended()

asyncio.run(main())
"""


async def until_signals_are_set(folder: Path, model: str) -> None:
    """Wait until the server with the files in `folder` handles SIGTERM as `model` says."""
    while not (folder / f"{model}.has-set-signals").exists():  # noqa: ASYNC110
        await anyio.sleep(0.05)


def settings(folder: Path, model: str = "good") -> ServerSettings:
    """Return the settings of a server that runs `PROGRAM` instead of vLLM; its files are in `folder`."""
    return ServerSettings(
        python=str(interpreter(folder, PROGRAM)),
        model=str(folder / model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
    )


def scripted(folder: Path, root: Path) -> Path:
    """Write an interpreter whose vLLM is a `FakeServer`. Servers write their pids into the file `pids` in `folder`."""
    return interpreter(folder, SCRIPTED.format(root=str(root), folder=str(folder)))


def interpreter(folder: Path, program: str) -> Path:
    """Write an interpreter into `folder` that seems to have a vLLM for CPUs, which is `program`."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True, exist_ok=True)
    (package / "api_server.py").write_text(program, encoding="utf-8")
    python = folder / "python"
    # The first argument is -I when the interpreter is asked for which devices its vllm is built.
    python.write_text(
        f'#!/bin/sh\n[ "$1" != -I ] || {{ echo cpu; exit; }}\n'
        f'PYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python
