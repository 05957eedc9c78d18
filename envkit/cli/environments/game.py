"""An environment played by a person: `Game` plays one level after another."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
from anyio.from_thread import start_blocking_portal

from envkit.checks.recorded import Recorder, play_in
from envkit.env import attributed
from envkit.errors import StepOrderError, UsageError
from envkit.protocols import EpisodePlayer, Expert, Player, expert_for
from envkit.trainer_bridge.evaluation.outcomes import shortest_of
from envkit.types import Info, Observation, Options, Outcome, Reset, RolloutRequest, StopReason, Task, Trajectory
from envkit.wiring.environments import make, make_here, open_expert
from envkit.wiring.evaluation.policies import spec_of
from envkit.wiring.tasks import ANY_SPLIT, with_split

SOLVED = "solved"
LOST = "lost"
OUT_OF_MOVES = "out of moves"
OVER = "over"

COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


@dataclass(frozen=True, slots=True)
class Scene:
    """State of an episode, as shown to a person. A value that the environment does not report is None.

    Attributes:
        text: The observation.
        drawing: The environment's own rendering: text with ANSI colours, or an HTML document.
        notes: Lines of the observation that are not in the drawing, such as the rules in the first observation. Empty
            if there is no drawing.
        total: Sum of the rewards so far.
        shortest: Number of moves of the level's shortest solution.
        reward: Reward of the last action; None before the first action.
        is_valid: Whether the last action was valid.
        is_effective: Whether the last action changed anything.
        end: `SOLVED`, `LOST`, `OUT_OF_MOVES`, or `OVER` if success is not reported; None while the episode runs.
    """

    seed: int
    text: str
    drawing: str | None
    notes: str
    legal_moves: tuple[str, ...]
    turns: int = 0
    total: float = 0.0
    shortest: int | None = None
    reward: float | None = None
    is_valid: bool | None = None
    is_effective: bool | None = None
    end: str | None = None


class Person(Player, EpisodePlayer):
    """A person, whose actions come from another thread.

    Attributes:
        asked: Done when the person has to act.
    """

    def __init__(self) -> None:
        self.asked: Future[None] = Future()

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return self

    async def act(self, observation: Observation) -> str:
        self._action = asyncio.get_running_loop().create_future()
        self.asked.set_result(None)
        action: str = await self._action
        return action

    async def send(self, action: str) -> None:
        """Play `action`, after the person was asked."""
        self.asked = Future()
        self._action.set_result(action)


class Game:
    """A game in an environment, created by `open_game`. Its episodes are played in another thread, until `close`.

    The environment has text actions and observations. The expert gives hints and formats moves as answers.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], env_id: str, *, expert: Expert | None = None, options: Options | None = None
    ) -> None:
        self.env_id = env_id
        self._env = env
        self.expert = self._playing = expert
        self._options = dict(options or {})
        self._scene: Scene | None = None
        self._hinted = 0
        self._played: Future[Trajectory] = Future()
        self._thread = ExitStack()
        self._portal = self._thread.enter_context(start_blocking_portal())

    def close(self) -> None:
        """End the episode and the thread. The caller closes the environment."""
        self._played.cancel()
        self._thread.close()

    @property
    def scene(self) -> Scene:
        """The current state; do not read this property before the first call of `begin`."""
        assert self._scene is not None, "begin comes first"
        return self._scene

    def begin(self, seed: int) -> Scene:
        """Start the level that `seed` selects. An episode that is not over ends."""
        self._played.cancel()
        self._person, task = Person(), Task(self.env_id, seed, self._options)
        self._episode = Recorder(self._env)
        self._played = self._portal.start_task_soon(play_in, self._episode, self._person, task)
        self._playing = None if self.expert is None else expert_for(self.expert, task)
        self._hinted = 0
        return self._next(seed)

    def act(self, action: str) -> Scene:
        """Play `action`, unchanged, and return the new state. Raises `StepOrderError` if the episode is over."""
        if self._played.done():
            raise StepOrderError("the episode is over; begin another one")
        self._portal.call(self._person.send, action)
        return self._next(self.scene.seed)

    def _next(self, seed: int) -> Scene:
        """Wait until the person has to act, or the episode is over, and return the state."""
        either: tuple[Future[Any], ...] = (self._played, self._person.asked)
        wait(either, return_when=FIRST_COMPLETED)
        outcome = self._played.result().outcome if self._played.done() else None
        seen, info = self._episode.seen, self._episode.seen[-1].info
        drawing, notes = self._drawn(seen[-1].observation)
        self._scene = Scene(
            seed,
            seen[-1].observation,
            drawing,
            notes,
            seen[-1].legal_moves,
            turns=len(seen) - 1,
            total=float(sum(one.reward for one in seen)) if outcome is None else outcome.reward or 0.0,
            shortest=shortest_of(seen[0].info),
            reward=float(seen[-1].reward) if len(seen) > 1 else None,
            is_valid=_truth(info, "action_is_valid"),
            is_effective=_truth(info, "action_is_effective"),
            end=None if outcome is None else _end(outcome),
        )
        return self._scene

    def answer(self, text: str) -> str:
        """Return the action for typed `text`. The expert formats the name of a legal move; other text is unchanged."""
        move = next((move for move in self.scene.legal_moves if move.lower() == text.strip().lower()), None)
        if move is None:
            return text
        return move if self.expert is None else self.expert.answer(move)

    def hint(self) -> Sequence[str]:
        """Return the expert's best moves; empty if the expert finds no move, or if there is no expert."""
        if self._playing is None:
            return ()
        last = len(self._episode.seen) - 1
        # A task expert tracks the episode: pass it every observation since the last hint.
        asked = self._episode.seen[self._hinted if self._playing is not self.expert else last :]
        self._hinted = last
        return [self._playing.moves(Observation(seen.observation, seen.legal_moves)) for seen in asked][-1]

    def _drawn(self, text: str) -> tuple[str | None, str]:
        """Return the environment's rendering, and the part of the observation that is not in the rendering."""
        with attributed(self.env_id, "render"):
            drawing = None if self._env.render_mode is None else self._env.render()
        if not isinstance(drawing, str) or not drawing.strip():
            return None, ""
        return drawing, text.rstrip().removesuffix(COLOURS.sub("", drawing).rstrip()).strip()


@contextmanager
def open_game(
    env_id: str, *, options: Options, split: str = ANY_SPLIT, url: str | None = None, render_mode: str = "ansi"
) -> Iterator[Game]:
    """Open an environment for a person.

    Args:
        env_id: Registered environment.
        options: Options of every episode.
        split: Split whose levels are played; ``"any"`` plays all levels.
        url: Address of an `envkit serve`; None plays in this process. Drawings exist only in this process.
        render_mode: ``"ansi"`` or ``"html"``. If the environment does not have this mode, there are no drawings.

    Raises:
        EnvkitError: There is no such environment, split or option, or the environment or the server fails.
    """
    spec = spec_of(env_id, url)
    if split != ANY_SPLIT and (spec is None or not spec.splits):
        raise UsageError(f"--split: {env_id} has no splits; leave it out")
    chosen = options if spec is None else with_split(spec, options, split)
    expert = None if spec is None or spec.expert is None else open_expert(env_id, chosen)
    with (
        closing(_open_env(env_id, chosen, url, render_mode)) as env,
        closing(Game(env, env_id, expert=expert, options=chosen)) as game,
    ):
        yield game


def _open_env(env_id: str, options: Options, url: str | None, render_mode: str) -> gymnasium.Env[Any, Any]:
    if url is not None:
        return make(env_id, url=url)
    # Pass the options here as well as to every reset, because an environment may accept some only in __init__.
    with attributed(env_id, "__init__"):
        env = make_here(env_id, options)
        if render_mode not in env.metadata.get("render_modes", ()):
            return env
        env.close()
        return make_here(env_id, {**options, "render_mode": render_mode})


def _truth(info: Info, name: str) -> bool | None:
    value = info.get(name)
    return bool(value) if isinstance(value, (bool, int, float)) else None


def _end(outcome: Outcome) -> str:
    if outcome.success:
        return SOLVED
    if outcome.stop is not StopReason.TERMINATED:
        return OUT_OF_MOVES
    return OVER if outcome.success is None else LOST
