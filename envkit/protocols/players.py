"""Protocols of players: policies, experts, scripts and people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from envkit.protocols.environments import Episode
from envkit.types import Action, Observation, Reset, RolloutRequest, Task


class Expert(Protocol):
    """A policy that solves an environment. It gives hints to people and writes demonstrations for training."""

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return the moves that begin a shortest path to success, best first; empty if no path leads to success."""
        ...

    def is_hazardous(self, observation: Observation) -> bool:
        """Return whether a careless move can lose the game here. Demonstrations should include such observations."""
        ...

    def answer(self, move: str) -> str:
        """Return the text that a language model should generate to play `move`."""
        ...


@runtime_checkable
class TaskExpert(Expert, Protocol):
    """An expert that knows more about a task than its observations show, such as the goal."""

    def for_task(self, task: Task) -> Expert:
        """Return an expert for one episode of `task`. It is asked for moves at every observation, in their order."""
        ...


def expert_for(expert: Expert, task: Task) -> Expert:
    """Return the expert of one episode of `task`: a new one if it knows tasks, otherwise `expert`."""
    return expert.for_task(task) if isinstance(expert, TaskExpert) else expert


class EpisodePlayer(Protocol):
    """Chooses the actions of one episode. Inherit from it to get the defaults."""

    def enter(self, episode: Episode) -> None:
        """Receive the episode before the first action. A player must not step it, but an agent may use its sandbox."""
        return

    async def act(self, observation: Observation) -> Action | str:
        """Return the action to play after `observation`. May take long, for example if a model server has to answer.

        Raises:
            PlayerStoppedError: The episode ends here, for the reason that the error gives.
            DeadlineError: The model did not answer in time. The episode is void.
            Exception: Any other error ends the program that plays, such as a training run.
        """
        ...

    def calls(self) -> Sequence[Action]:
        """Return calls of a foreign agent that are turns without a step, before the action that `act` has returned.

        Called after each `act`, even after one that failed, and after `end`.
        """
        return ()

    async def abort(self) -> None:
        """Let the `act` in progress return what was sampled so far. An `act` that does not return is cancelled."""
        return

    def end(self) -> None:
        """Release what the episode holds. Called once, after the last action; the grader may still run."""
        return


class Player(Protocol):
    """Plays episodes. Inherit from it to get the defaults."""

    @property
    def repeats(self) -> bool:
        """Whether concurrent episodes repeat exactly only if their turns begin together; see `Engine.repeats`."""
        return False

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        """Return a new player for one episode, after the episode was reset with the result `start`.

        All random choices must depend on ``request.seed`` only.
        """
        ...
