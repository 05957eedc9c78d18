"""Players that an environment brings along, graded episodes, and rewards that are computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from envkit import registry
from envkit.env import AsyncEnv
from envkit.errors import EnvkitError, UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.trainer_bridge.evaluation.rescore import totals
from envkit.types import Observation, Options, Reset, RolloutRequest, Step, Task
from envkit.wiring.api import evaluate, rescore


class Parity(AsyncEnv):
    """Asks whether the seed is even. Its grader gives `points` for the right answer, and fails for seed `broken`."""

    def __init__(self, points: float = 1.0, broken: int = -1) -> None:
        self._defaults: Options = {"points": points, "broken": broken}
        self._right = False

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self._options = {**self._defaults, **options}
        self._seed = seed
        return Reset(Observation(f"even: {seed}?"), {}, is_graded=True)

    async def step(self, action: str) -> Step:
        self._right = action == ("yes" if self._seed % 2 == 0 else "no")
        return Step(Observation(""), 0.0, True, False, {})

    async def grade(self) -> float | None:
        if self._options["broken"]:
            return None
        return float(self._right) * float(str(self._options["points"]))

    async def close(self) -> None: ...


class Oracle(Player, EpisodePlayer):
    """Knows the answer from the task."""

    def __init__(self, **options: object) -> None:
        self.seed = 0

    def begin(self, request: RolloutRequest, start: Reset) -> Oracle:
        player = Oracle()
        player.seed = request.task.seed
        return player

    async def act(self, observation: Observation) -> str:
        return "yes" if self.seed % 2 == 0 else "no"


@pytest.fixture(autouse=True)
def parity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setattr(registry, "_SPECS", dict(registry._SPECS))
        registry.register("Parity-v0", Parity, options={"broken": 0}, players={"oracle": Oracle})
        yield


class Few:
    splits = ("eval",)

    def __init__(self, **options: object) -> None: ...

    def count(self, split: str) -> int:
        return 3

    def task(self, split: str, index: int) -> Task:
        return Task("Few-v0", index, {})


@pytest.mark.parametrize(("asked", "is_shown"), [(None, False), (3, False), (4, True)])
def test_fewer_tasks_than_were_asked_for_are_announced(
    asked: int | None, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.register("Few-v0", Parity, options={"broken": 0}, players={"oracle": Oracle}, task_set=Few)
    assert evaluate("Few-v0", "oracle", episodes=asked).episodes == 3
    assert ("Few-v0 has only 3 tasks in the split eval" in capsys.readouterr().err) == is_shown


class Shelved(Parity):
    def __init__(self, *, data: Mapping[str, Path], points: float = 1.0) -> None:
        super().__init__(points, broken=0)


class Reader(Oracle):
    """An expert and a player that finds its answers in the data, and must get the options."""

    def __init__(self, *, data: Mapping[str, Path], points: float) -> None:
        super().__init__()
        self.answers = (data["answers"] / "all.txt").read_text().split() if points == 0.5 else []

    def begin(self, request: RolloutRequest, start: Reset) -> Reader:
        return self

    def moves(self, observation: Observation) -> Sequence[str]:
        return [self.answers[int(observation.text.removeprefix("even: ").removesuffix("?")) % 2]]

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return move

    async def act(self, observation: Observation) -> str:
        return self.moves(observation)[0]


@pytest.mark.parametrize("policy", ["expert", "reader"])
def test_experts_and_players_get_the_data_of_the_environment(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "all.txt").write_text("yes no")
    monkeypatch.setenv("ENVKIT_DATA", str(tmp_path))
    options = {"points": 0.5}
    registry.register(
        "Shelved-v0", Shelved, options=options, expert=Reader, players={"reader": Reader}, data={"answers": print}
    )
    assert evaluate("Shelved-v0", policy, episodes=10).metrics["return"].mean == 0.5


@pytest.mark.parametrize(("policy", "nearest"), [("oracel", "oracle"), ("cheat:skpi", "cheat:skip"), ("npo", "nop")])
def test_a_player_that_the_environment_does_not_have_is_refused_with_the_nearest(policy: str, nearest: str) -> None:
    registry.register("Cheated-v0", Parity, players={"oracle": Oracle, "cheat:late": Oracle, "cheat:skip": Oracle})
    known = "random, nop, oracle, cheat:late, cheat:skip"
    with pytest.raises(UsageError, match=rf"there is no '{policy}'; did you mean '{nearest}'\? .*Cheated-v0: {known}$"):
        evaluate("Cheated-v0", policy, episodes=1)


def test_an_episode_without_a_grade_is_void_and_several_in_a_row_end_the_evaluation() -> None:
    with pytest.raises(Exception, match=r"0 of 2 episodes of Parity-v0 finished.*the grader could not run"):
        evaluate("Parity-v0", "oracle", episodes=2, options={"broken": 1})
    with pytest.raises(EnvkitError, match=r"^4 episodes in a row were void, .*the grader could not run; repeat"):
        evaluate("Parity-v0", "oracle", episodes=90, options={"broken": 1}, overrides=["env.num_envs=4"])


def test_rewards_are_computed_again_from_recorded_actions(tmp_path: Path) -> None:
    evaluate("Parity-v0", "oracle", episodes=6, output=tmp_path)
    (_, same), (_, other) = rescore(tmp_path), rescore(tmp_path, options={"points": 0.5})
    assert not any(one.is_changed or one.differs_at is not None for one in same)
    assert totals(same) == {"success": (1, 1), "reward": (1, 1)}
    assert all(one.is_changed for one in other)
    assert totals(other) == {"success": (1, 0), "reward": (1, 0.5)}


def test_episodes_whose_observations_differ_are_named(tmp_path: Path) -> None:
    evaluate("Arithmetic-v0", "expert", episodes=3, options={"instructions": False}, output=tmp_path)
    _, again = rescore(tmp_path, options={"instructions": True})
    assert [one.differs_at for one in again] == [0, 0, 0]


class Silent(Parity):
    """Is not graded, and reports no success."""

    async def reset(self, *, seed: int, options: Options) -> Reset:
        return replace(await super().reset(seed=seed, options=options), is_graded=False)


def test_successful_episodes_become_dialogues_for_imitation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("Arithmetic-v0", "expert", episodes=2, options={"instructions": False}, dialogues=tmp_path / "sums.jsonl")
    dialogues = [json.loads(line)["messages"] for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert [[one["role"] for one in messages] for messages in dialogues] == [["user", "assistant"]] * 2
    assert all(messages[0]["content"].startswith("What is ") for messages in dialogues)
    evaluate("Parity-v0", "nop", episodes=2, dialogues=tmp_path / "none.jsonl")
    assert "none.jsonl" not in capsys.readouterr().err
    registry.register("Silent-v0", Silent, options={"broken": 0}, players={"oracle": Oracle})
    evaluate("Silent-v0", "oracle", episodes=2, dialogues=tmp_path / "none.jsonl")
    assert (tmp_path / "none.jsonl").read_text() == ""
    why = "none.jsonl: has no dialogues, because success is unknown: the environment reports no metric success"
    assert why in capsys.readouterr().err


class Toolful(Parity):
    """Has a tool, and counts its episodes."""

    played = 0

    async def reset(self, *, seed: int, options: Options) -> Reset:
        type(self).played += 1
        tool = {"type": "function", "function": {"name": "submit", "parameters": {}}}
        return replace(await super().reset(seed=seed, options=options), tools=(tool,))

    async def step(self, action: str) -> Step:
        await anyio.sleep(0.001)  # so that other episodes begin only as this one ends
        return await super().step(action)


def test_dialogues_of_an_environment_with_tools_are_refused_at_the_first_success(tmp_path: Path) -> None:
    registry.register("Toolful-v0", Toolful, options={"broken": 0}, players={"oracle": Oracle})
    with pytest.raises(UsageError, match="Toolful-v0 has tools, whose calls a dialogue cannot contain"):
        evaluate("Toolful-v0", "oracle", episodes=2000, dialogues=tmp_path / "calls.jsonl")
    assert Toolful.played < 1000
    assert not (tmp_path / "calls.jsonl").exists()


def test_a_file_of_dialogues_that_cannot_be_written_is_refused_before_the_first_episode(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sums.jsonl: No such file or directory; choose a file that can be written"):
        evaluate(
            "Parity-v0",
            "oracle",
            episodes=2,
            dialogues=tmp_path / "no folder" / "sums.jsonl",
            output=tmp_path / "evaluation",
        )
    assert not (tmp_path / "evaluation").exists()
