"""Runs a program on another node of a Ray cluster, as ``srun`` does on one of Slurm; a program by itself.

With the argument ``run``, it runs what the variable `ORDER` describes, in an actor on the node. Output and exit code
are those of the program; SIGTERM ends both. With ``nodes``, it prints the other nodes as JSON.

Ray has this process to itself: it ends the process in which it runs when the head of the cluster does not answer for a
minute, installs signal handlers, prints, and has calls that never return. When this process ends in any way, Ray ends
the actor; when the actor's process ends, the local launcher's supervisor on the node ends the program.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from envkit.installation import load
from envkit.types import Place
from envkit.wiring.launch.local import LAST_WORDS, LocalLauncher, LocalProcess

ORDER = "ENVKIT_RELAY"
"""Variable with the order as JSON: id of the node, program with arguments, variables, number of GPUs."""
_START_S = 60.0
_POLL_S = 0.5
_END_S = 8.0
"""Seconds that the program has to end in order; the launcher kills this process after 10."""
_BYTES = 1 << 20
_LINE = 300


class Runner:
    """The actor, which runs the program with the local launcher of its node."""

    _process: LocalProcess
    _watch: asyncio.Task[None]
    _read = 0

    async def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._watch = asyncio.create_task(_end_with(os.getppid()))  # noqa: TID251 - an actor has no task group
        self._process = await LocalLauncher().start(argv, env, place=Place(), name="ray")

    async def output(self) -> tuple[bytes, int | None]:
        """Return the next part of the output and, with the last one before the end, the exit code. May wait 0.5 s."""
        with anyio.move_on_after(_POLL_S):
            await self._process.wait()
        code = self._process.returncode
        with self._process.log.open("rb") as log:
            log.seek(self._read)
            data = log.read(_BYTES)
        self._read += len(data)
        if code is None or len(data) == _BYTES:
            return data, None
        self._process.log.unlink()
        return data, code

    async def end(self) -> None:
        await self._process.kill(grace_s=_END_S)


async def _end_with(parent: int) -> None:
    """End this process when its parent, Ray's daemon on the node, has ended: Ray itself then leaves its workers."""
    while os.getppid() == parent:  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(_POLL_S)
    os._exit(1)


def run(ray: Any, order: Mapping[str, Any]) -> int:
    """Run the order in an actor, until it has ended or SIGTERM arrives.

    Returns:
        The exit code of the program, or the negative number of the signal that ended it.
    """
    from envkit.wiring.launch.ray_relay import Runner  # not that of __main__, which would be sent to the node

    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))  # after `ray.init`, which sets its own

    def waited(ref: Any, timeout_s: float = float("inf")) -> bool:
        """Wait for a result, and raise its error if it is one; return False after the timeout, or after SIGTERM."""
        while not signals and timeout_s > 0:
            if ray.wait([ref], timeout=_POLL_S)[0]:
                ray.get(ref)
                return True
            timeout_s -= _POLL_S
        return False

    strategy = load("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(order["node"], soft=False)
    # By default, Ray would kill the supervisor of the program when the actor ends, and the program would go on.
    env = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
    gpus = order["gpus"]
    options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "runtime_env": env, "scheduling_strategy": strategy}
    actor = ray.remote(Runner).options(**options).remote()
    try:
        if not waited(actor.start.remote(order["argv"], order["env"]), _START_S) and not signals:
            why = f"Ray did not start an actor with {gpus} GPUs within {_START_S:g} s; see `ray status`"
            return _failed(why)
        while not signals:
            ref = actor.output.remote()
            if waited(ref):
                data, code = ray.get(ref)
                _write(1, data)
                if code is not None:
                    return int(code)
        ray.wait([actor.end.remote()], timeout=_END_S + 1)
        return -signal.SIGTERM
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        return _failed(f"lost the actor on its node: {cause}")


def main(what: str) -> int:
    """Do what the argument says, and return the exit code, or the negative number of a signal."""
    ray = load("ray")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        return _failed(f"cannot connect: {error}")
    if what == "run":
        return run(ray, json.loads(os.environ.pop(ORDER)))
    here = ray.get_runtime_context().get_node_id()
    found = [
        (
            int(node["Resources"].get("GPU", 0)),
            {"id": node["NodeID"], "host": node["NodeManagerHostname"], "address": node["NodeManagerAddress"]},
        )
        for node in sorted(ray.nodes(), key=lambda one: (one["NodeManagerAddress"], one["NodeID"]))
        if node["Alive"] and node["NodeID"] != here
    ]
    _write(1, f"{json.dumps(found)}\n".encode())
    return 0


def _failed(why: str) -> int:
    _write(2, f"\n{LAST_WORDS}{' '.join(why.split())[:_LINE]}\n".encode())
    return 1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    code = main(sys.argv[1])
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # Ray's own end may hang
