"""``envkit tasks ENV check``: correct tasks pass; a player that does not do what it must is named with its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import pytest

import envkit
from envkit.checks.tasks import check_tasks, unplayable
from envkit.environments.tasks import OwnCheats, Plan, SandboxTask
from envkit.errors import SandboxRefusedError, UsageError
from envkit.types import Observation, Options, Reset, Step, Task
from tests.checks.guessing import Guess, Says
from tests.cli.commands import called


def problems(env_id: str, players: dict[str, Says]) -> Sequence[str]:
    envkit.register(env_id, Guess, players=players)
    results, _ = check_tasks(env_id, tasks=3, repeat=3)
    return [line for one in results for line in one.problems()]


def test_players_that_do_what_they_must_give_no_problem() -> None:
    assert problems("GuessRight-v0", {"oracle": Says("seed"), "nop": Says(""), "cheat:x": Says("?")}) == []


@pytest.mark.parametrize(
    ("name", "player", "problem"),
    [
        ("nop", Says("", task_2="seed"), "nop must fail: task 2: 1 of 1: reward 1, success True"),
        ("oracle", Says("seed", task_1="?"), "oracle must succeed: task 1: 3 of 3: reward 0, success False"),
        ("oracle", Says("seed", task_0="sometimes"), "oracle must succeed: task 0: 1 of 3: reward 0, success False"),
        (
            "oracle",
            Says("seed", task_0="void"),
            "oracle was not checked: task 0: 3 of 3: void: the grader could not run",
        ),
        ("cheat:half", Says("half"), "cheat:half must earn 0: task 0: 1 of 1: reward 0.5, success False"),
        ("cheat:void", Says("void"), "cheat:void was not checked: task 0: 1 of 1: void: the grader could not run"),
    ],
)
def test_a_player_that_does_not_is_named_with_its_task(name: str, player: Says, problem: str) -> None:
    found = problems(f"Guess{abs(hash(problem))}-v0", {name: player})
    assert found[0] == problem
    assert len(found) == (3 if name.startswith("cheat") else 1)


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        (
            ["GuessGood-v0", "1", "--repeat", "2"],
            0,
            ["oracle   2         2        ok", "nop      1         0        ok"],
        ),
        (["GuessBad-v0", "--count", "1"], 1, ["nop     1         1        fail", "GuessBad-v0 has no player oracle"]),
        (["FrozenLake-v0"], 2, []),
    ],
)
def test_the_command_prints_a_table_and_its_exit_code_is_the_verdict(
    words: list[str], code: int, lines: list[str]
) -> None:
    good = {"oracle": Says("seed"), "nop": Says(""), "cheat:x": Says("?")}
    if words[0] == "GuessBad-v0":
        envkit.register("GuessBad-v0", Guess, players={"nop": BAD})
    elif all(one.id != "GuessGood-v0" for one in envkit.registered()):
        envkit.register("GuessGood-v0", Guess, players=good)
    found, out, _ = called("tasks", words[0], "check", *words[1:])
    assert found == code
    for line in lines:
        assert line in out


BAD = Says("seed")


def test_an_environment_without_players_or_splits_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="has no players to check tasks with; register players="):
        check_tasks("FrozenLake-v0")
    with pytest.raises(UsageError, match="Code-v0 has no split 'test'; there are: "):
        check_tasks("Code-v0", split="test")


class EasyGuess(Guess):
    """A task that an empty answer solves."""

    async def grade(self) -> float | None:
        return 1.0


def test_an_environment_without_a_nop_is_checked_with_empty_actions() -> None:
    envkit.register("GuessEasy-v0", EasyGuess, players={"oracle": Says("seed")})
    results, missing = check_tasks("GuessEasy-v0", tasks=1, repeat=1)
    problems = [line for one in results for line in one.problems()]
    assert problems == ["nop must fail: task 0: 1 of 1: reward 1, success True"]
    assert missing == ["cheat"]


class LoggedGuess(Guess):
    """The grader prints the answer that it got, as the tests of Terminal-v0 do."""

    async def grade(self) -> float | None:
        self.grader_output += "cut off\n" + "line\n" * 9 + f"got {self.action}"
        return await super().grade()


def test_the_end_of_the_graders_output_shows_why_a_player_did_not_do_what_it_must() -> None:
    envkit.register("GuessLogged-v0", LoggedGuess, players={"oracle": Says("seed", task_1="2"), "nop": Says("")})
    results, _ = check_tasks("GuessLogged-v0", tasks=2, repeat=2)
    problem = "oracle must succeed: task 1: 2 of 2: reward 0, success False"
    printed = "\n  the grader printed:" + "\n    line" * 9 + "\n    got 2"
    assert [one.problems() for one in results] == [[problem + printed], []]
    assert [one.outcome.grader_output.count("got") for one in results[0].episodes] == [1, 1, 1, 1]


class NamedGuess(Guess):
    """Only some tasks can be played here, and steps print the answer."""

    running = most = 0

    async def reset(self, *, seed: int, options: Options) -> Reset:
        if seed == 1:
            raise UsageError("needs a program")
        if seed == 2:
            raise SandboxRefusedError("a", "needs docker")
        NamedGuess.running += 1
        NamedGuess.most = max(self.most, self.running)
        await anyio.sleep(0.01)
        return await super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Step:
        NamedGuess.running -= 1
        await super().step(action)
        return Step(Observation(f"checked\n{action}\n"), 0.0, True, False, {})


class Named:
    """Three tasks in ``eval``, and one in ``train``."""

    splits = ("train", "eval")

    def count(self, split: str) -> int:
        return len(self.names(split))

    def task(self, split: str, index: int) -> Task:
        return Task("GuessNamed-v0", index + 5 * (split == "train"), {})

    def names(self, split: str) -> list[str]:
        return ["zero", "one", "two"] if split == "eval" else ["other"]


def test_tasks_have_names_and_those_that_cannot_be_played_here_blame_no_player() -> None:
    players = {"oracle": Says("seed", task_5="wrong"), "nop": Says(""), "cheat:a": Says("a"), "cheat:b": Says("b")}
    envkit.register("GuessNamed-v0", NamedGuess, players=players, task_set=Named)
    results, _ = check_tasks("GuessNamed-v0", tasks=0, repeat=3)
    assert [(one.player, one.played, one.verdict) for one in results] == [
        *(("oracle", 3, "ok"), ("nop", 1, "ok"), ("cheat:a", 1, "ok"), ("cheat:b", 1, "ok"))
    ]
    assert unplayable(results) == [
        "task one: void: GuessNamed-v0 raised UsageError: needs a program",
        "task two: void: sandbox a did not start: needs docker",
    ]
    assert NamedGuess.most == 4  # of the players together

    code, out, _ = called("tasks", "GuessNamed-v0", "check", "other", "0", "--player", "oracle", "--repeat", "1")
    assert code == 1
    assert out.splitlines()[1:] == [
        "oracle  2         1        fail",
        "oracle must succeed: task other: 1 of 1: reward 0, success False",
        *("  the solution printed:", "    checked", "    wrong"),
    ]
    with pytest.raises(UsageError, match="GuessNamed-v0 has no task 'zer'; did you mean 'zero'"):
        check_tasks("GuessNamed-v0", ["zer"])
    with pytest.raises(UsageError, match="has no player 'orcle'; did you mean 'oracle'"):
        check_tasks("GuessNamed-v0", players=["orcle"])


class TaskWithCheats(SandboxTask[bytes]):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def cheats(self) -> Mapping[str, Plan]:
        return {"b": Plan(["b"]), "a": Plan(["half"]), "c": Plan()} if self.seed else {}

    def answer(self, plan: Plan, commands: Sequence[str]) -> str:
        return "".join(commands)


def test_each_of_a_tasks_own_cheats_is_played_and_the_problem_names_the_cheat() -> None:
    own = OwnCheats(lambda seed, options: TaskWithCheats(seed), {"max_turns": 1})
    envkit.register("GuessOwn-v0", Guess, players={"cheat:own": lambda **options: own})
    (result,), _ = check_tasks("GuessOwn-v0", [0, 1], players=["cheat"])
    assert [(one.task, one.cheat) for one in result.episodes] == [("1", "a"), ("1", "b"), ("1", "c")]
    assert result.problems() == ["cheat:own must earn 0: task 1: 1 of 3, such as a: reward 0.5, success False"]
