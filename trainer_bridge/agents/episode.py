"""One episode of a foreign agent: the calls that it makes are answered, and become the turns of the episode.

The agent decides when it calls the policy, with what, and when it is done. Each call is a turn. An agent beside the
sandbox also plays actions in the environment: such an action belongs to the last call before it. When the agent ends,
the episode ends, and is graded.

Not all that was sampled is trained on. `AgentCall.cause` names why: ``probe`` (a request of one token), ``unread`` (the
client never received it), ``aborted`` (the sampling was stopped), ``stop`` (it follows a text at which the client asked
to stop), or ``not_selected`` (the run does not train this kind of call). If the client continued an earlier part of an
answer, the rest of the answer is not trained on either; this is called ``rewritten``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from envkit.errors import PlayerStoppedError, SandboxLostError
from envkit.protocols import Engine, Episode, EpisodePlayer, Player
from envkit.types import (
    JSON,
    Action,
    AgentCall,
    FinishReason,
    Observation,
    Reset,
    RolloutRequest,
    SamplingParams,
    StopReason,
    stable_hash,
)

from ..render.chat import ChatRenderer
from ..rollout.episode import RolloutLimits
from .conversation import UNREAD, Call, CallPrompt, Conversation, reply_of, trained_part
from .messages import CallRefusedError, ChatMessage, EpisodeCalls, ModelRequest, Reply, RunningCall

_LEAVES = ("aborted", "probe", "unread")
"""Causes of calls that no later prompt continues, if they are not trained on at all."""


class AgentEndedError(Exception):
    """An agent ended by an error of its own; the message says which."""


class Agent(Protocol):
    """A foreign agent."""

    async def run(self, task: AgentEpisode) -> None:
        """Work on a task until done. It is cancelled if the episode ends first.

        Raises:
            AgentEndedError: The agent ended by an error. The episode is graded nevertheless, if the agent has called
                the policy.
        """
        ...


@dataclass(slots=True, eq=False)
class AgentPlayer(Player):
    """A player whose turns are the calls of a foreign agent: a program or function that calls the policy over HTTP.

    Attributes:
        limits: Limits of an episode: `max_turns` calls, `max_tokens` of a prompt with its answer, `turn_tokens` of an
            answer, and `player_timeout_s` of the agent.
        tasks: Runs the agents, until it is cancelled.
        selects: Chooses the calls to train on.
        stable: Returns a message without what changes between calls.
        unused: Number of requests by the name of a field that had no effect.
        models: Number of requests by the model's name in them and whether they are trained on, without probes.
        changed: Number of requests with a message that `stable` changed.
        failures: Number of episodes by the error that their agent ended with.
    """

    agent: Agent
    engine: Engine
    renderer: ChatRenderer
    limits: RolloutLimits
    tasks: TaskGroup
    selects: Callable[[ModelRequest], bool] = lambda request: True
    stable: Callable[[ChatMessage], ChatMessage] = lambda message: message
    unused: Counter[str] = field(default_factory=Counter)
    models: Counter[tuple[str, bool]] = field(default_factory=Counter)
    changed: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def begin(self, request: RolloutRequest, start: Reset) -> AgentEpisode:
        return AgentEpisode(self, request, start)


@dataclass(slots=True, eq=False)
class _Running(RunningCall):
    """A request in progress."""

    episode: AgentEpisode = field(kw_only=True)
    prompt: CallPrompt = field(kw_only=True)
    calls: dict[int, Call] = field(default_factory=dict)

    async def replies(self) -> Sequence[Reply]:
        await self.is_over.wait()
        if self.episode.is_over:
            raise CallRefusedError("ended", "the episode is over")
        return await RunningCall.replies(self)

    def delivered(self, index: int = 0, characters: int | None = None) -> None:
        call = self.calls[index]
        if call.number is None:  # otherwise it is recorded as what it was
            call.read = characters
            self.episode.changed()


class AgentEpisode(EpisodePlayer, EpisodeCalls):
    """One episode.

    Attributes:
        reset: Result of the reset.
        episode: The episode, whose sandbox the agent may use; None before its first action.
        is_over: Whether it has ended, so that no call is answered.
    """

    def __init__(self, player: AgentPlayer, request: RolloutRequest, reset: Reset) -> None:
        self.player, self.request, self.reset = player, request, reset
        self.episode: Episode | None = None
        self.is_over = False
        self._conversation = Conversation(player.renderer)
        self._running: list[_Running] = []
        self._finished: list[Call] = []
        self._recorded: list[Action] = []
        self._asked = self._free = self._sessions = self._turns = 0
        self._session_of: dict[Call, str] = {}
        self._action: str | None = None
        self._observation: Observation | None = None
        self._scope: anyio.CancelScope | None = None
        self._has_ended = False
        self._error: Exception | None = None
        self._change = anyio.Event()

    # --- EpisodePlayer ------------------------------------------------------------------------------------------------

    def enter(self, episode: Episode) -> None:
        self.episode = episode

    async def act(self, observation: Observation) -> Action:
        """Return the agent's next action in the environment."""
        self._observation = observation
        self.changed()
        if self._scope is None:
            self._scope = anyio.CancelScope()
            self.player.tasks.start_soon(self._run)
        while self._error is None and self._action is None and (self._running or not self._has_ended):
            await self._change.wait()
        if self._error is not None:
            raise self._error
        if self._action is None:
            raise PlayerStoppedError(StopReason.ABORTED if self.is_over else StopReason.TERMINATED)
        text, self._action = self._action, None
        settled = [call for call in self._finished if call.read != UNREAD]
        for call in settled[:-1]:
            self._record(call)
        return replace(self._turn_of(settled[-1]), text=text) if settled else self._numbered(Action(text))

    def calls(self) -> Sequence[Action]:
        if self.is_over or self._has_ended or self._error is not None:
            for call in [*self._finished]:
                self._record(call)
        found, self._recorded = self._recorded, []
        return found

    async def abort(self) -> None:
        self._end()

    def end(self) -> None:
        self._end()
        for session in {*self._session_of.values()}:
            self.player.engine.forget(session)

    # --- EpisodeCalls -------------------------------------------------------------------------------------------------

    def start(self, request: ModelRequest) -> RunningCall:
        limits, player = self.player.limits, self.player
        if self.is_over or self._has_ended:
            raise CallRefusedError("ended", "the episode is over")
        player.unused.update(request.unused)
        prompt = self._prompt(request)
        length, most = len(prompt.ids()), min(limits.turn_tokens, request.max_tokens or limits.turn_tokens)
        if length + most > limits.max_tokens:
            why = f"{length} tokens of the prompt and {most} of the answer exceed the context of {limits.max_tokens}"
            raise CallRefusedError("context", why)
        if not request.is_probe:
            if self._asked - self._free + request.n > limits.max_turns:
                raise CallRefusedError("budget", f"the episode's limit of {limits.max_turns} calls is reached")
            self._asked += request.n
            player.models[request.model, player.selects(request)] += 1
            player.changed += prompt.request.messages != request.messages
        running = _Running(player.engine, player.tasks, request.n, episode=self, prompt=prompt)
        self._running.append(running)
        player.tasks.start_soon(self._answer, running, most)
        return running

    def count(self, request: ModelRequest) -> int:
        return len(self._prompt(request).ids())

    async def step(self, action: str) -> dict[str, JSON]:
        if self._observation is None:
            raise CallRefusedError("request", "another action is in progress")
        self._action, self._observation = action, None
        self.changed()
        return {"observation": (await self._next_observation()).text}

    # --- Inside -------------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Wake those that wait for a change."""
        self._change.set()
        self._change = anyio.Event()

    async def _run(self) -> None:
        """Run the agent to its end. What is in progress then is not answered any more."""
        assert self._scope is not None, "set before it starts"
        try:
            with self._scope:
                await self.player.agent.run(self)
        except AgentEndedError as ended:
            self.player.failures[str(ended)] += 1
            if not self._asked:
                stopped = PlayerStoppedError(StopReason.AGENT_FAILED, f"the agent ended before its first call: {ended}")
                self._error = self._error or stopped
        except SandboxLostError as error:
            if not error.cause.by_agent:  # otherwise the grader says what that is worth
                self._error = self._error or PlayerStoppedError(StopReason.SANDBOX_LOST, str(error))
        except Exception as error:
            self._error = self._error or error
        self._has_ended = True
        self._stop_sampling()

    async def _next_observation(self) -> Observation:
        while self._observation is None:
            if self.is_over:
                raise CallRefusedError("ended", "the episode is over")
            await self._change.wait()
        return self._observation

    def _end(self) -> None:
        self.is_over = True
        if self._scope is not None:
            self._scope.cancel()
        self._stop_sampling()

    def _stop_sampling(self) -> None:
        for running in self._running:
            running.abort()
        self.changed()

    def _prompt(self, request: ModelRequest) -> CallPrompt:
        return self._conversation.prompt(replace(request, messages=tuple(map(self.player.stable, request.messages))))

    async def _answer(self, running: _Running, most: int) -> None:
        try:
            await running.sample(partial(self._sample, running, most))
        finally:
            self._running.remove(running)
            self.changed()

    async def _sample(self, running: _Running, most: int, index: int) -> None:
        player, prompt = self.player, running.prompt
        if running.why_not:
            self._free += 1
            return
        number, self._sessions = self._sessions, self._sessions + 1
        session = f"{self.request.session}.{number}"
        if prompt.parent is not None and not index:  # the engine may have the cache of the call that this one continues
            session = self._session_of.pop(prompt.parent, session)
        running.sessions.append(session)
        params = SamplingParams(
            temperature=self.request.temperature,
            max_tokens=most,
            stop=player.renderer.stop,
            seed=stable_hash(self.request.seed, number),
            timeout_s=player.limits.completion_timeout_s or math.inf,
        )
        try:
            completion = await player.engine.generate(prompt.ids(), params, session=session)
        except Exception as error:
            self._error = self._error or error
            player.engine.forget(session)
            return
        if completion.finish is FinishReason.ABORTED:
            self._free += 1
        if self.is_over:
            player.engine.forget(session)
        call = Call(prompt, completion, reply_of(player.renderer, prompt, completion))
        running.calls[index] = call
        self._session_of[call] = session
        self._finished.append(call)
        if completion.finish is not FinishReason.ABORTED:
            running.found[index] = call.reply
            if not prompt.request.is_probe:
                self._conversation.add(call)

    # --- Turns --------------------------------------------------------------------------------------------------------

    def _record(self, call: Call) -> None:
        self._recorded.append(self._turn_of(call))

    def _turn_of(self, call: Call) -> Action:
        """Return a call as a turn, which is recorded next."""
        self._finished.remove(call)
        prompt, parent = call.prompt, call.prompt.parent
        trains, cause = trained_part(self.player.renderer, call, is_selected=self.player.selects(prompt.request))
        note = AgentCall(trains=trains, cause=cause)
        if cause in _LEAVES and trains == 0:  # no later prompt continues it
            new_ids: Sequence[int] = ()
        elif parent is None or parent.number is None or parent.is_continued:
            new_ids = prompt.ids()
        else:
            parent.is_continued = True
            new_ids, note = prompt.new_ids, replace(note, follows=parent.number, keeps=prompt.keeps)
        call.number = self._turns
        return self._numbered(
            Action(call.reply.content, new_ids, call.completion, starts_sample=note.follows is None, call=note)
        )

    def _numbered(self, action: Action) -> Action:
        self._turns += 1
        return action
