"""What the parts of envkit ask of each other. Matching a protocol is enough; nothing needs to be inherited."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from envkit.types import (
    Completion,
    ExecResult,
    Observation,
    Reset,
    Sample,
    SamplingParams,
    SandboxSpec,
    Step,
    Task,
    Weights,
)


class Episode(Protocol):
    """One play of one task, as everybody who plays sees it: in this process, over HTTP, or in a sandbox."""

    async def reset(self) -> Reset:
        """Start the episode; called once, before the first step.

        Raises:
            OptionError: The task has an option that the world refuses.
            EnvError: The world raised.
            SandboxLostError: The place it ran in is gone.
        """
        ...

    async def step(self, action: str) -> Step:
        """Play one action. A senseless action is answered with an observation, never an exception.

        Raises:
            StepOrderError: Before `reset`, or after the end.
            EnvError: The world raised.
            SandboxLostError: The place it ran in is gone.
        """
        ...


class EnvHost(Protocol):
    """Somewhere episodes can be played: slots in this process, a served fleet, sandboxes."""

    @property
    def capacity(self) -> int:
        """Number of episodes that can be leased at once."""
        ...

    def lease(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Give an episode of `task` for the length of the block, waiting while none is free.

        Raises:
            UnknownEnvError: No environment has the task's id.
        """
        ...


class Expert(Protocol):
    """A player that knows a world: plays the expert policy and teaches."""

    def moves(self, observation: Observation) -> Sequence[str]:
        """Return every move that lies on a shortest way to success, best known first; empty if there is none."""
        ...

    def is_tricky(self, observation: Observation) -> bool:
        """Say whether a careless player goes wrong here, so that the state is worth a lesson."""
        ...

    def answer(self, move: str) -> str:
        """Return the text that plays `move`, as a language model would write it."""
        ...


class Player(Protocol):
    """Chooses actions from observations: what `envkit eval` plays with."""

    def act(self, observation: Observation, rng: random.Random) -> str: ...


class Sandbox(Protocol):
    """One isolated place in which the spec's command runs."""

    @property
    def id(self) -> str: ...

    async def exec(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run another program beside the spec's command; a failing or slow program is a result, not an error.

        Raises:
            SandboxLostError: The sandbox died.
        """
        ...

    async def connect(self, name: str) -> socket.socket:
        """Return a connected, non-blocking stream to the Unix socket `name` inside. The caller closes it.

        Raises:
            SandboxLostError: The sandbox died.
            UnreachableError: Nothing listens there.
        """
        ...

    async def wait(self) -> str:
        """Return, once the sandbox is gone, the cause in one line (such as ``"killed by signal 9"``)."""
        ...

    async def stop(self) -> None:
        """End everything in it and remove its folder; safe to repeat."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start one; its command is running when this returns.

        Raises:
            SandboxStartError: The backend refused or the command ended at once.
        """
        ...

    def capabilities(self) -> Mapping[str, bool]:
        """Say what is really enforced on this machine: ``isolation``, ``network``, ``memory``, ``pids``."""
        ...


class Engine(Protocol):
    """Produces tokens."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Completion:
        """Complete `prompt_ids`.

        Args:
            prompt_ids: The whole prompt.
            params: How to sample.
            session: Name of the episode; a later prompt of the same session begins with this one and its completion,
                so an engine may keep its attention cache.
        """
        ...

    def forget(self, session: str) -> None:
        """Drop whatever is kept for `session`."""
        ...


class WeightSink(Protocol):
    """Takes new weights, between completions."""

    async def load(self, weights: Weights) -> None: ...


class Renderer(Protocol):
    """Words to tokens and back, one turn at a time; nothing is decoded and encoded again."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        ...

    def open(self, observation: Observation) -> tuple[int, ...]:
        """Return the first prompt."""
        ...

    def extend(self, said: Sequence[int], observation: Observation) -> tuple[int, ...]:
        """Return the tokens that follow the completion `said` up to where the next one begins."""
        ...

    def action(self, said: Sequence[int]) -> str:
        """Return the completion `said` as the text that the world is given."""
        ...

    def demonstrate(self, answer: str) -> tuple[int, ...]:
        """Return the tokens with which a policy would say `answer`."""
        ...


class Trainer(Protocol):
    """Changes weights."""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Take in samples for the next update."""
        ...

    def update(self) -> Mapping[str, float]:
        """Learn from what was accumulated, drop it, and report metrics (losses, entropy in nats, gradient norm)."""
        ...

    def publish(self) -> Weights:
        """Write the current weights where an engine can read them."""
        ...

    def save(self, folder: str) -> None:
        """Write all that `restore` needs into `folder`, which exists."""
        ...

    def restore(self, folder: str) -> None:
        """Continue exactly where `save` was called.

        Raises:
            UsageError: The folder does not hold a checkpoint of this policy and algorithm.
        """
        ...
