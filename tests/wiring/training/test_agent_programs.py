"""Programs of agents in sandboxes: what they reach, and what becomes of episodes that lose program or sandbox."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from envkit.config.parts import AgentSection
from envkit.protocols import Sandbox
from envkit.trainer_bridge.scheduler.accounting import fate_before_training
from envkit.types import StopReason
from tests.trainer_bridge.agents.agents import LetterEngine
from tests.wiring.training.agent_stage import Stage, on_stage

CLIENT = """
import json, os, re, socket, sys, threading, time, urllib.error, urllib.request
BASE = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
HOST, OWN = BASE.split("/e/")

def send(route, body=None, base=BASE + "/v1", headers={}):
    content = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{base}/{route}", content, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError as error:
        return 0, type(getattr(error, "reason", error)).__name__

def ask(text="a?", **where):
    return send("chat/completions", {"messages": [{"role": "user", "content": text}]}, **where)
"""
KILLS_ITSELF = f"""{CLIENT}
ask()
threading.Thread(target=ask, args=["b?"], daemon=True).start()
while not os.path.exists("now"):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
ATTACK = (
    CLIENT
    + """
import glob, subprocess
own = {"authorization": "Bearer " + OWN}

def reached(*address):
    try:
        socket.create_connection(address, timeout=5).close()
        return True
    except OSError:
        return False

def raw(head):
    with socket.create_connection(("127.0.0.1", int(HOST.rpartition(":")[2])), timeout=5) as stream:
        stream.sendall(head.encode() + b"\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
        return int(stream.makefile("rb").readline().split()[1])

def secrets():
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path) as file:
                yield from {*re.findall("sk-[0-9a-f]{32}", file.read())} - {OWN, ended}
        except OSError:
            pass

other = HOST + "/e/sk-" + "0" * 32 + "/v1"
gone = HOST + "/e/" + ended + "/v1"
json.dump({
    "base": BASE,
    "own call": ask()[0],
    "call of another episode": ask(base=other, headers=own)[0],
    "step of another episode": send("step", {"action": "up"}, other, own)[0],
    "call of an ended episode": ask(base=gone, headers=own)[0],
    "step of an ended episode": send("step", {"action": "up"}, gone, own)[0],
    "call of no episode": ask(base=HOST + "/v1")[0],
    "port of this machine through the proxy": raw(f"GET http://127.0.0.1:{port}/x HTTP/1.1"),
    "tunnel through the proxy": raw(f"CONNECT 127.0.0.1:{port} HTTP/1.1"),
    "port of this machine": reached("127.0.0.1", port),
    "network": reached("1.1.1.1", 53) or reached("192.168.0.1", 80),
    "secrets of others": [*secrets()],
    "trainer": os.path.exists(f"/proc/{trainer}/environ"),
}, open("found.json", "w"))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(86407)"], start_new_session=True)
"""
)
"""Writes to a file what it reaches. Needs ``ended``, a secret, ``port``, of a server here, and ``trainer``, a pid."""
FOUND = {
    "own call": 200,
    **dict.fromkeys(("call of another episode", "step of another episode", "call of no episode"), 401),
    **dict.fromkeys(("call of an ended episode", "step of an ended episode"), 410),
    "port of this machine through the proxy": 401,
    "tunnel through the proxy": 400,
    **dict.fromkeys(("port of this machine", "network", "trainer"), False),
    "secrets of others": [],
}
pytestmark = pytest.mark.bwrap


def played(main: Callable[[Stage], Awaitable[None]], *answers: str) -> None:
    """Run `main` with a stage whose agents are the programs that their tasks are."""
    on_stage(main, AgentSection(command=["python3", "-c", "{task}"]), LetterEngine(*answers))


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not is_so():  # noqa: ASYNC110 - what it waits for sets no event
            await anyio.sleep(0.01)


def test_a_program_reaches_its_own_episode_until_its_end_and_nothing_else() -> None:
    found: dict[str, Any] = {}
    seen: list[str] = []

    async def read_secret(sandbox: Sandbox) -> None:
        seen.append((await sandbox.read("secret")).decode())

    async def look_around(sandbox: Sandbox) -> None:
        found.update(json.loads(await sandbox.read("found.json")))
        env = {"OPENAI_BASE_URL": f"{found.pop('base')}/v1"}
        late = await sandbox.exec(
            ["python3", "-c", f"{CLIENT}\nprint(*ask(), *send('step', {{'action': 'up'}}))"], env=env
        )
        running = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])
        seen.extend([late.stdout.strip(), str("86407" in running.stdout)])

    async def main(stage: Stage) -> None:
        await stage.play(f"{CLIENT}\nopen('secret', 'w').write(OWN)\nask()", read_secret)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.play, f"{CLIENT}\nask()")  # a neighbour, whose secret is in its environment
            await until(lambda: stage.engine.num_waiting == 1)
            with socket.create_server(("127.0.0.1", 0)) as other:
                facts = {"ended": seen.pop(), "port": other.getsockname()[1], "trainer": os.getpid()}
                done = await stage.play(
                    "".join(f"{name} = {fact!r}\n" for name, fact in facts.items()) + ATTACK, look_around
                )
            stage.engine.release()
        assert (done.rows, done.trajectory.outcome.reward) == (["U:a?| A:[two|]"], 1.0)

    played(main, "one", "~neighbour", "two")
    assert found == FOUND
    assert seen == ["0 ConnectionRefusedError 0 ConnectionRefusedError", "False"]


def test_a_program_that_is_killed_ends_its_episode_which_counts_with_the_calls_that_were_answered() -> None:
    async def main(stage: Stage) -> None:
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await until(lambda: stage.engine.num_waiting == 1)
                await stage.host.sandboxes[0].write("now", b"")

            tasks.start_soon(kill)
            done = await stage.play(KILLS_ITSELF)
        assert done.rows == ["U:a?| A:[one|]"]
        assert (done.masked, done.trajectory.outcome.stop) == ({"aborted": 4}, StopReason.TERMINATED)
        assert fate_before_training(done.trajectory) is None
        ((error, count),) = stage.player.failures.items()
        assert (error.partition(":")[0], count) == ("exit code -9", 1)

    played(main, "one", "~two")
