"""An environment played by a person: its state, the actions, and the end."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, ClassVar

import gymnasium
import pytest

from envkit.cli.environments.game import Game, Scene, open_game
from envkit.env import AsyncEnv
from envkit.local_host import SlotHost
from envkit.protocols import EnvHost
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, Task
from envkit.wiring.blocking_env import BlockingEnv

ANSWER = "<answer>{}</answer>"


class Echo(gymnasium.Env[str, str]):
    """Returns the action as text; ``win``, ``fall`` and ``stop`` end the episode, ``crash`` raises."""

    def __init__(self, *, render_mode: str | None = None, tells_success: bool = True) -> None:
        self.metadata = {"render_modes": ["ansi"], "metrics": {"success": "last"} if tells_success else {}}
        self.observation_space = self.action_space = Utf8Text(1000)
        self.render_mode = render_mode
        self._tells_success = tells_success

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self._last = f"level {seed}"
        return f"The rules.\n\n[{self._last}]", {"legal_moves": ["up", "Jump"], "level": {"shortest": 2}}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if action == "crash":
            raise RuntimeError("it broke")
        self._last = action
        info: Info = {"action_is_valid": True, "action_is_effective": False}
        if self._tells_success:
            info["success"] = action == "win"
        return f"Well.\n[{action}]", 0.5, action in ("win", "fall"), action == "stop", info

    def render(self) -> str:
        return f"\x1b[1;34m[\x1b[0m{self._last}]\n"


class EchoExpert:
    def moves(self, observation: Observation) -> Sequence[str]:
        return ["up"] if "level" in observation.text else []

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return ANSWER.format(move)


def after(action: str, env: gymnasium.Env[Any, Any] | None = None) -> Scene:
    with closing(Game(env or Echo(), "Echo-v0")) as game:
        game.begin(0)
        return game.act(action)


def test_turns_and_rewards_add_up_and_begin_anew_with_every_level() -> None:
    with closing(Game(Echo(), "Echo-v0")) as game:
        first = game.begin(7)
        assert (first.seed, first.turns, first.total, first.reward, first.shortest) == (7, 0, 0.0, None, 2)
        game.act("one")
        second = game.act("two")
        assert (second.turns, second.total, second.reward, second.shortest) == (2, 1.0, 0.5, 2)
        assert (second.is_valid, second.is_effective, second.end) == (True, False, None)
        assert game.begin(8) == Scene(8, "The rules.\n\n[level 8]", None, "", ("up", "Jump"), shortest=2)


@pytest.mark.parametrize(
    ("action", "tells_success", "end"),
    [
        ("win", True, "solved"),
        ("fall", True, "lost"),
        ("stop", True, "out of moves"),
        ("stop", False, "out of moves"),
        ("win", False, "over"),
        ("on", True, None),
    ],
)
def test_the_end_has_a_reason(action: str, tells_success: bool, end: str | None) -> None:
    assert after(action, Echo(tells_success=tells_success)).end == end


def test_text_that_is_drawn_is_not_repeated() -> None:
    with closing(Game(Echo(render_mode="ansi"), "Echo-v0")) as game:
        scene = game.begin(1)
        assert (scene.drawing, scene.notes) == ("\x1b[1;34m[\x1b[0mlevel 1]\n", "The rules.")
        assert game.act("on").notes == "Well."


def test_without_a_drawing_the_observation_is_all_there_is() -> None:
    scene = after("on", Echo(render_mode=None))
    assert (scene.drawing, scene.notes, scene.text) == (None, "", "Well.\n[on]")


@pytest.mark.parametrize(
    ("typed", "sent"),
    [("up", "<answer>up</answer>"), (" jUMP ", "<answer>Jump</answer>"), ("left", "left"), (" up up", " up up")],
)
def test_a_bare_move_gets_the_experts_format_and_other_text_is_unchanged(typed: str, sent: str) -> None:
    with closing(Game(Echo(), "Echo-v0", expert=EchoExpert())) as game:
        game.begin(0)
        assert game.answer(typed) == sent


def test_without_an_expert_a_bare_move_is_sent_by_its_name_and_there_are_no_hints() -> None:
    with closing(Game(Echo(), "Echo-v0")) as game:
        game.begin(0)
        assert (game.answer("JUMP "), game.hint()) == ("Jump", ())


def test_a_hint_is_for_the_current_observation() -> None:
    with closing(Game(Echo(), "Echo-v0", expert=EchoExpert())) as game:
        game.begin(0)
        assert game.hint() == ["up"]
        game.act("on")
        assert game.hint() == []


class CountingExpert(EchoExpert):
    """Answers with the seed of the task and what it saw of the episode."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.seen = ""

    def for_task(self, task: Task) -> CountingExpert:
        return CountingExpert(task.seed)

    def moves(self, observation: Observation) -> Sequence[str]:
        self.seen += f"[{observation.text}]"
        return [f"{self.seed} {self.seen}"]


def test_an_expert_of_tasks_gets_every_observation_before_it_gives_a_hint() -> None:
    with closing(Game(Echo(), "Echo-v0", expert=CountingExpert())) as game:
        first = game.begin(3).text
        texts = [first, *(game.act(action).text for action in ("on", "up"))]
        assert game.hint() == ["3 " + "".join(f"[{text}]" for text in texts)]
        again = game.begin(4).text
        assert game.hint() == [f"4 [{again}]"]


def test_a_game_that_is_closed_or_begun_anew_in_an_episode_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with closing(Game(Echo(), "Echo-v0")) as game:
        for seed in range(3):
            game.begin(seed)
            game.act("on")
    assert set(threading.enumerate()) <= before


class Waiting(AsyncEnv):
    """Lists its moves in the observation only."""

    metrics: ClassVar[Mapping[str, Any]] = {}

    async def reset(self, *, seed: int, options: Options) -> Reset:
        return Reset(Observation("go", ("on",)), {})

    async def step(self, action: str) -> Step:
        return Step(Observation("gone", ("on", "back")), 1.0, False, False, {})

    async def close(self) -> None:
        pass


def test_an_async_environment_lists_its_moves_too() -> None:
    @asynccontextmanager
    async def host() -> AsyncIterator[EnvHost]:
        async with SlotHost(lambda env_id: Waiting(), 1) as slots:
            yield slots

    with closing(BlockingEnv("Waiting-v0", host)) as env, closing(Game(env, "Waiting-v0")) as game:
        assert game.begin(0).legal_moves == ("on",)
        assert game.act("on").legal_moves == ("on", "back")


def test_an_open_game_draws_in_colours_has_its_expert_and_plays_with_the_options() -> None:
    options: Options = {"map": ["SFF", "FHF", "FFG"], "symbols": ".ogpx*"}
    with open_game("FrozenLake-v0", options=options) as game:
        scene = game.begin(0)
        assert scene.text.endswith("p..\n.o.\n..g")
        assert scene.drawing is not None
        assert "\x1b[" in scene.drawing
        assert scene.notes.endswith("<answer>up</answer>")
        assert list(game.hint()) == ["down", "right"]
        for move in ("right", "right", "down", "down"):
            scene = game.act(game.answer(move))
    assert (scene.end, scene.turns, scene.shortest) == ("solved", 4, 4)


def test_an_open_game_plays_the_levels_of_one_split() -> None:
    texts = set()
    for split in ("train", "eval"):
        with open_game("FrozenLake-v0", options={"instructions": False}, split=split) as game:
            texts.add(game.begin(3).text)
    assert len(texts) == 2
