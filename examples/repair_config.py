"""Repair-v0: repair a broken configuration file. An environment whose tasks are judged in a second sandbox.

A package with an entry point of the group ``envkit.envs`` that names `register` makes the commands know it:
docs/write-an-environment.md shows such a package, and explains the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import envkit
from envkit.environments.tasks import Cheat, Plan, SandboxTask, TaskEnv, Verdict
from envkit.protocols import Sandbox
from envkit.types import Options, stable_hash

FILE = "service.toml"
LOAD = "import sys, tomllib; print(sorted(tomllib.load(sys.stdin.buffer)['service'].items()))"
FAULTS = (("= ", ""), ("]", ""), ('"\n', "\n"))  # no equals sign, an open bracket, an open string


class Repair(SandboxTask[Mapping[str, bytes]]):
    """A TOML file with one fault of syntax. The work is the file; the judge parses it in its own sandbox."""

    paths = (FILE,)

    def __init__(self, seed: int) -> None:
        rng = Random(stable_hash("Repair", seed))
        self.name = f"repair-{seed}"
        self.values = {"host": f"node{rng.randrange(100)}", "port": rng.randrange(1024, 65536)}
        self.whole = f'[service]\nhost = "{self.values["host"]}"\nport = {self.values["port"]}\n'
        self.broken = self.whole.replace(*rng.choice(FAULTS), 1)
        self.statement = f"{FILE} is not valid TOML. Repair its syntax, keep all values, and call submit."

    async def prepare(self, sandbox: Sandbox) -> None:
        await sandbox.write(FILE, self.broken.encode())

    async def judge(self, sandbox: Sandbox, work: Mapping[str, bytes]) -> Verdict:
        result = await sandbox.exec(["python3", "-I", "-c", LOAD], stdin=work.get(FILE, b""), timeout_s=10)
        return Verdict(reward=float(result.stdout.strip() == str(sorted(self.values.items()))), log=result.stderr)

    @property
    def solution(self) -> Plan:
        return Plan(files={FILE: self.whole.encode()})


class RepairConfig(TaskEnv):
    max_turns = 10

    @classmethod
    def task_of(cls, seed: int, options: Options) -> Repair:
        return Repair(seed)


empty_values = Cheat("Writes a valid file with other values.", files=((FILE, '[service]\nhost = ""\nport = 0\n'),))


def register() -> None:
    envkit.register(
        "Repair-v0",
        RepairConfig,
        needs={"sandbox"},
        replayable=False,  # what commands print may differ
        players={"oracle": RepairConfig.oracle, **RepairConfig.cheats({"empty_values": empty_values})},
    )
