"""Players that carry out plans: with a shell, with keys, or in one answer."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit.environments.tasks import Cheat, Nop, Oracle, OwnCheats, Plan, SandboxTask, Script, TaskEnv
from envkit.environments.tasks.players import write_commands
from envkit.environments.tools import bash, submit, tool_of, write_call
from envkit.errors import UsageError
from envkit.protocols import Player
from envkit.types import Observation, Options, Reset, RolloutRequest, Task

SUBMIT = write_call("submit")
LARGE = random.Random(0).randbytes(1_000_000)


def type_keys(keys: list[str], wait_s: float) -> str:
    """Type keys."""
    return ""


class Count(SandboxTask[bytes]):
    name = "count"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.later = [Count(3)] if seed == 2 else []

    @property
    def solution(self) -> Plan | None:
        return None if self.seed == 1 else Plan(["true"], {"data": LARGE})

    @property
    def cheats(self) -> Mapping[str, Plan]:
        return {"b": Plan(["echo b"]), "a": Plan(["echo a"])}

    @property
    def words(self) -> Mapping[str, str]:
        return {"SEED": str(self.seed)}


class CountEnv(TaskEnv):
    @classmethod
    def task_of(cls, seed: int, options: Options) -> Count:
        return Count(seed)


def actions_of(player: Player, *tools: Any, count: int = 1, seed: int = 0) -> list[str]:
    """Return the first actions of a player in an episode with these tools."""

    async def main() -> list[str]:
        start = Reset(Observation(""), {}, tools=tuple(tool_of(one).schema for one in tools))
        episode = player.begin(RolloutRequest("eval/0/0", Task("Count-v0", seed), 0), start)
        return [str(await episode.act(Observation(""))) for _ in range(count)]

    return anyio.run(main)


def test_a_script_plays_its_actions_in_every_episode_and_repeats_the_last() -> None:
    async def main() -> None:
        script = Script([write_call("bash", command="ls"), SUBMIT])
        for seed in (1, 2):
            request = RolloutRequest("eval/0/0", Task("Work-v0", seed), 0)
            player = script.begin(request, Reset(Observation(""), {}))
            actions = [await player.act(Observation("")) for _ in range(3)]
            assert actions == [write_call("bash", command="ls"), SUBMIT, SUBMIT]

    anyio.run(main)


def test_an_oracle_plays_what_its_function_returns_for_the_task() -> None:
    oracle = Oracle(lambda task, start: [f"echo {task.seed} {len(start.tools)}", SUBMIT])
    assert actions_of(oracle, bash, count=3, seed=7) == ["echo 7 1", SUBMIT, SUBMIT]


def test_a_plan_is_carried_out_with_the_tools_of_the_episode() -> None:
    own = CountEnv.own()
    assert isinstance(own, OwnCheats)
    cheats = own.players_of(Task("Count-v0", 0))
    first = write_call("bash", command="echo a")
    assert actions_of(cheats["a"], bash, submit, count=3) == [first, SUBMIT, SUBMIT]
    typed = json.loads(actions_of(own, type_keys, submit)[0])
    assert (typed["name"], typed["arguments"]["keys"]) == ("type_keys", ["echo a", "Enter"])
    assert actions_of(cheats["b"], count=2) == ["```bash\necho b\n```"] * 2
    assert [actions_of(Nop(), *tools) for tools in ((bash, submit), (bash,), ())] == [[SUBMIT], [""], [""]]


def test_the_words_of_a_cheat_stand_for_values_of_the_task() -> None:
    cheat = Cheat("", commands=("echo SEED",), files=(("file-SEED", "SEED\n"),))
    commands = [
        json.loads(action)["arguments"]["command"]
        for action in actions_of(CountEnv.player(cheat.plan_for), bash, submit, count=2, seed=7)
    ]
    assert commands == ["cat > file-7 <<'END'\n7\nEND", "echo 7"]


def test_the_tasks_that_follow_are_played_too_after_a_submission_each() -> None:
    player = CountEnv.player(Cheat("", commands=("echo SEED",)).plan_for)
    first, second = (write_call("bash", command=f"echo {seed}") for seed in (2, 3))
    assert actions_of(player, bash, submit, count=5, seed=2) == [first, SUBMIT, second, SUBMIT, SUBMIT]


def test_an_oracle_without_a_solution_or_with_one_that_cannot_be_played_is_an_error() -> None:
    with pytest.raises(UsageError, match="knows no solution of count"):
        actions_of(CountEnv.oracle(), bash, submit, seed=1)
    with pytest.raises(UsageError, match="needs 6 turns for count; raise max_turns, which is 4"):
        actions_of(CountEnv.oracle(max_turns=4), bash, submit)
    with pytest.raises(UsageError, match=r"an answer of 1,3.* characters is too large"):
        actions_of(CountEnv.oracle())


@pytest.mark.parametrize("content", [b"", b"text\n", b"END\n", b"no line end", b"\x00\xff\n", LARGE[:3000]])
def test_a_file_is_written_byte_for_byte(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a file"
    for command in write_commands(str(path), content, limit=1000):
        assert len(command) < 1000 + 200
        subprocess.run(["bash", "-c", command], check=True)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_long_command_is_read_from_a_file() -> None:
    cheat = Cheat("", commands=(f": {'x' * 600_000}",))
    actions = actions_of(CountEnv.player(cheat.plan_for), bash, submit, count=5)
    assert max(map(len, actions)) < 1_000_000
    assert json.loads(actions[actions.index(SUBMIT) - 1])["arguments"]["command"] == ". /tmp/command.sh"
