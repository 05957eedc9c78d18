"""The data that flows through envkit: frozen, slotted, plain, JSON-able and picklable.

Axes: B samples, L tokens, T turns, G siblings. Tokens are append-only: the prompt of a turn begins with everything
before it, so a trajectory stores each token once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

import msgspec

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
Info: TypeAlias = dict[str, JSON]
Options: TypeAlias = Mapping[str, JSON]

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")


def stable_hash(*parts: JSON) -> int:
    """Return a 64-bit hash that is the same in every process and on every machine.

    Python's own ``hash`` of a string is salted per process, which is how levels come to differ between workers.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Task:
    """What to play. The same task gives the same episode in any process on any machine.

    Attributes:
        env_id: Id of a registered environment, such as ``"Sokoban-v0"``.
        seed: Non-negative seed of the level and of its chances.
        options: What the environment is to do differently from its defaults.
    """

    env_id: str
    seed: int
    options: Options = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A canonical text, equal for equal tasks."""
        return json.dumps([self.env_id, self.seed, dict(self.options)], sort_keys=True, separators=(",", ":"))


class Observation(msgspec.Struct, frozen=True):  # made for every step, in an eighth of a dataclass's time
    """What the player sees.

    Attributes:
        text: What a language model reads.
        legal_moves: Names of the moves that the world understands; empty when they cannot be listed.
        images: PNG files, base64; empty for text worlds.
    """

    text: str
    legal_moves: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


class Reset(NamedTuple):
    """The start of an episode."""

    observation: Observation
    info: Info


class Step(NamedTuple):
    """The world's answer to one action; unpacks as Gymnasium's five."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Info

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Smallest set of tokens whose probability reaches this is kept, in (0, 1].
        top_k: Number of likeliest tokens kept; 0 keeps all.
        max_tokens: Bound on the completion, in tokens.
        stop: Token ids that end the completion (and belong to it).
        seed: The completion is a function of prompt, weights, parameters and this.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[int, ...] = ()
    seed: int = 0


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """The engine was told to stop; the tokens so far are valid."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned.

    Attributes:
        token_ids: Sampled tokens [N].
        logprobs: Their log-probabilities (nats) [N] under the distribution that was sampled from, before top-p and
            top-k but after temperature.
        finish: Why it ended.
        versions: Policy version of the tokens, as ranges of (version, number of tokens) in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the step that it caused.

    Attributes:
        new_ids: Tokens since the last completion (observation and its frame), never the whole prompt again.
        completion: What the policy said.
        action: What was handed to the world.
        step: What the world answered; None when the episode was cut off before it did.
        generate_s: Seconds that the completion took.
        step_s: Seconds that the step took.
    """

    new_ids: tuple[int, ...]
    completion: Completion
    action: str
    step: Step | None
    generate_s: float = 0.0
    step_s: float = 0.0


class StopReason(StrEnum):
    """Why an episode is over."""

    TERMINATED = "terminated"
    """The world ended it."""
    TRUNCATED = "truncated"
    """The world's own limit was reached."""
    MAX_TURNS = "max_turns"
    """The caller's limit of turns was reached."""
    MAX_TOKENS = "max_tokens"
    """The next prompt would not fit into the caller's limit of tokens."""
    TIMEOUT = "timeout"
    """A step or the whole episode took longer than the caller allowed."""
    ENV_ERROR = "env_error"
    """The world raised."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox died under it; the episode is void."""

    @property
    def is_void(self) -> bool:
        """Whether the episode says nothing about the policy, so that no loss may come from it."""
        return self in (StopReason.TIMEOUT, StopReason.ENV_ERROR, StopReason.SANDBOX_LOST)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one episode.

    Attributes:
        task: What was played.
        member: Index in its group, from 0.
        turns: What happened [T].
        stop: Why it is over.
        reward: Sum of the rewards.
        metrics: The world's own metrics, folded over the episode.
        error: One line when infrastructure failed, otherwise None.
    """

    task: Task
    member: int
    turns: tuple[Turn, ...]
    stop: StopReason
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All plays of one task that are compared with each other [G]."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence to learn from.

    Attributes:
        group: Key that samples of the same task share.
        token_ids: Whole sequence [L].
        mask: 1 on tokens that the policy produced, 0 on prompt and observation [L].
        logprobs: Behaviour log-probabilities (nats), 0 where the mask is 0 [L].
        turn_ids: Number of the turn that a token belongs to [L].
        rewards: Reward of each turn [T].
        versions: Policy version of each token, -1 where the mask is 0 [L].
    """

    group: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn_ids: tuple[int, ...]
    rewards: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy's weights.

    Attributes:
        version: Number of train steps behind them.
        location: Path of a folder or safetensors file that the engine can read.
    """

    version: int
    location: str


SandboxUser: TypeAlias = Literal["agent", "grader", "root"]
"""Who runs a program in a sandbox: uid 1000 without any capability, uid 1001 likewise, or the root of the box."""
GRADER_HOME = "/run/envkit-grader"
"""Where a sandbox that isolates has the folder that only a grader can enter."""

FileUser: TypeAlias = Literal["agent", "grader"]
"""Whose rights hold when files are written to a sandbox or read from it, and whom they belong to then."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is to be.

    A bound that is None is the backend's own (1,024 MiB of memory, 256 processes, 256 MiB in each writable place, all
    processors) where this machine can hold it, and none where it cannot; a bound that is given and cannot be held is
    refused.

    Attributes:
        command: Program that runs in it, as the agent's user; when it ends the box does. Its sockets' folder is in
            ``$ENVKIT_SOCKETS``. Empty for a box that only waits for `Sandbox.exec`.
        image: Image whose files it sees; None takes the backend's default.
        env: Environment variables of everything in it; nothing is inherited from the host.
        cpus: Bound on processors, such as 0.5.
        memory_mib: Bound on the memory of all that runs in it, MiB.
        pids: Bound on the number of processes and threads.
        disk_mib: Bound on what may be written, MiB for each writable place.
        network: ``"none"``; ``"open"``; or the names of the hosts that can be reached, all by way of a proxy of ours.
        profile: ``"strict"``, or ``"system"`` for tasks that need root and a writable root file system.
        runtime: Docker's runtime, such as ``"runsc"``; None takes its default.
        untrusted: Whether what runs inside may be hostile; refused where the backend cannot hold it.
        ttl_s: Seconds after which it ends itself, whatever becomes of us; None for never.
        stay: Whether it outlives the process that started it.
        lonely_s: Seconds without anybody connected to it after which a box that stays ends itself; None for never.
        start_timeout_s: Seconds until a box that is not ready counts as failed.
        ledger: Id of the ledger in which a box that stays is written down; who opens that next may end it. Empty for
            none.
    """

    command: tuple[str, ...] = ()
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    network: str | tuple[str, ...] = "none"
    profile: Literal["strict", "system"] = "strict"
    runtime: str | None = None
    untrusted: bool = False
    ttl_s: float | None = None
    stay: bool = False
    lonely_s: float | None = None
    start_timeout_s: float = 30.0
    ledger: str = ""


def is_host(text: str) -> bool:
    """Say whether a text can be the name of a host, or an address of IPv4; capitals are none."""
    return _HOST.fullmatch(text) is not None


def why_no_network(network: str | tuple[str, ...]) -> str | None:
    """Return why `SandboxSpec.network` cannot be this, in one line; None where it can."""
    if isinstance(network, str):
        known = network in ("none", "open")
        return None if known else f"network={network!r} is refused: it is 'none', 'open' or a tuple of hosts"
    for host in network:
        if not is_host(host.lower().removeprefix("*.")):
            return (
                f"{host[:100]!r} is no name of a host, such as example.org, nor of all below one, such as *.example.org"
            )
    return None


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    STARTING = "starting"
    READY = "ready"
    """It answers, and waits to be lent."""
    LEASED = "leased"
    """Somebody has it."""
    SUSPECT = "suspect"
    """Somebody has it, and it has been silent for longer than it should."""
    LOST = "lost"
    """It was healthy and is gone."""
    STOPPED = "stopped"
    """It was ended, or never became healthy."""


class Phase(NamedTuple):
    """One entry of a sandbox's history: since when it is in a state (seconds since 1970, UTC), and why."""

    state: SandboxState
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SandboxView:
    """A sandbox of a pool, from outside.

    Attributes:
        id: The name by which it is asked for.
        box_id: What its backend calls it; empty until it has been started.
        node: Name of the node that it is on; empty until it has been placed.
        tenant: Who holds it; empty for nobody.
        spec: What it is.
        phases: Its history, oldest first; the last one is now.
        expires_at_s: When its lease ends unless it is used, in seconds since 1970; None for never.
    """

    id: str
    box_id: str
    node: str
    tenant: str
    spec: SandboxSpec
    phases: tuple[Phase, ...]
    expires_at_s: float | None = None

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happened in a fleet.

    Attributes:
        number: Counts from 1, without gaps, as long as the process lives.
        at_s: When, in seconds since 1970.
        kind: ``"state"`` for another state of a sandbox; otherwise what is to be looked at, such as ``"memory"``.
        sandbox_id: Which sandbox; empty where it is about no single one.
        tenant: Whose it is; empty for nobody's.
        text: One line for people: the reason, or the figure and its bound.
        state: The sandbox's new state, where `kind` is ``"state"``.
    """

    number: int
    at_s: float
    kind: str
    sandbox_id: str
    tenant: str
    text: str
    state: SandboxState | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did.

    Attributes:
        exit_code: Its exit code, negative for a signal; None when it was stopped because of the timeout.
        stdout_bytes: What it wrote, byte for byte; the end of it where `truncated_bytes` says that some was dropped.
        stderr_bytes: The same for standard error.
        timed_out: Whether it was stopped because of the timeout.
        truncated_bytes: Number of bytes that were dropped in front, of both outputs together.
        duration_s: Seconds it ran.
        is_shell_lost: Whether the shell that it ran in is gone with its variables and folder, so that the next command
            begins in a new one.
        is_out_of_memory: Whether something in it was killed because memory ran out.
    """

    exit_code: int | None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    timed_out: bool = False
    truncated_bytes: int = 0
    duration_s: float = 0.0
    is_shell_lost: bool = False
    is_out_of_memory: bool = False

    @property
    def stdout(self) -> str:
        """What it wrote, undecodable bytes replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """The same for standard error."""
        return self.stderr_bytes.decode(errors="replace")
