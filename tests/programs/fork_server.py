"""Forks programs from a process that has imported their slow modules, for `tests.programs.program`.

A client connects, sends the program and its files, and receives its process id, and later its wait status. The slow
modules are imported at the first request. The server ends with the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from io import TextIOWrapper
from types import ModuleType
from typing import Any

MODULES = (
    *("envkit.trainer_bridge", "torch", "torch._dynamo", "torch.optim", "torch.utils.tensorboard"),
    *("transformers.generation", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("matplotlib.backends.backend_agg", "uvicorn", "fastapi", "httpx", "anyio._backends._asyncio", "hypothesis"),
    *("envkit.cli", "envkit.environments.frozen_lake", "envkit.checks", "envkit.wiring.gateway.gateway"),
    *("envkit.wiring.evaluation", "envkit.wiring.training.run", "envkit.wiring.training.torch_parts"),
    "envkit.trainer_bridge.run_folder.plots",
)
FILES = 3  # standard input, output and errors


def serve(listener: socket.socket, parent: int) -> dict[str, Any] | None:
    """Fork what is asked for until `parent` ends. Return None then, and in each new process its request."""
    children: dict[int, socket.socket] = {}
    has_imported = False
    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        for source in (listener, wakes, os.pidfd_open(parent)):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wakes in ready:
                wakes.recv(4096)
                report_ended(children)
            if listener in ready:
                client, _ = listener.accept()
                try:
                    request, files = receive(client)
                except ValueError:  # the client has ended before it had sent all
                    client.close()
                    continue
                if not has_imported:
                    for name in MODULES:
                        with suppress(ImportError):  # torch may be missing
                            importlib.import_module(name)
                    gc.freeze()
                    has_imported = True
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    return {**request, "files": files}
                for file in files:
                    os.close(file)
                children[pid] = client
                with suppress(BrokenPipeError):
                    client.send(pid.to_bytes(4, "little"))
            if ready - {listener, wakes}:
                return None


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Take a request: its length, then JSON; its files come with the length."""
    head, files, _, _ = socket.recv_fds(client, 4, FILES)
    left, content = int.from_bytes(head, "little"), b""
    while len(content) < left and (piece := client.recv(left - len(content))):
        content += piece
    return json.loads(content), files


def report_ended(children: dict[int, socket.socket]) -> None:
    """Send the wait status of each program that has ended to its client."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as client, suppress(BrokenPipeError):  # the test has ended without waiting
            client.send(status.to_bytes(4, "little"))


def become(request: dict[str, Any]) -> None:
    """Run a program in this new process as the interpreter would have started it."""
    if request["new_session"]:
        os.setsid()
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
    os.closerange(FILES, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "wb" if number else "rb"
        raw = open(number, mode, closefd=False)  # noqa: SIM115 - open to the end of the program
        stream = TextIOWrapper(raw, old.encoding, old.errors, line_buffering=number == 2 or raw.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[:0] = [one for one in request["env"].get("PYTHONPATH", "").split(os.pathsep) if one]
    program, *words = request["argv"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    if words[:1] == ["-c"]:
        sys.argv = words[:1] + words[2:]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
        return
    from envkit.__main__ import main as run

    sys.argv = [program, *(words[2:] if words[:2] == ["-m", "envkit"] else words)]
    run()


def end(code: int) -> None:
    """End as the interpreter does, but without freeing each object of torch, which takes a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])), os.getppid())
    if asked is not None:
        try:
            become(asked)
            end(0)
        except SystemExit as ended:
            if not isinstance(ended.code, int):
                raise
            end(ended.code)
