"""Players of episodes: the policy, an expert, random moves, and scripts. See `envkit.protocols.Player`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from envkit.errors import PlayerStoppedError, UsageError
from envkit.protocols import Engine, EpisodePlayer, Expert, Player, Renderer, expert_for
from envkit.types import (
    Action,
    Exchange,
    Observation,
    Prompt,
    Reset,
    RolloutRequest,
    SamplingParams,
    StopReason,
    stable_hash,
)

from .episode import RolloutLimits


@dataclass(frozen=True, slots=True)
class PolicyPlayer(Player):
    """The policy: an engine that samples completions, and a renderer that builds prompts and reads actions.

    Sampling depends on the request and the turn.
    """

    engine: Engine
    renderer: Renderer
    limits: RolloutLimits

    @property
    def repeats(self) -> bool:
        return self.engine.repeats

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        with_prompt = start.system is not None or start.tools
        renderer = self.renderer.for_episode(start) if with_prompt else self.renderer
        return _PolicyEpisode(self, request, renderer)


@dataclass(slots=True)
class _PolicyEpisode(EpisodePlayer):
    """An episode of the policy. `ids` are the tokens of the current sample, `history` the turns so far."""

    policy: PolicyPlayer
    request: RolloutRequest
    renderer: Renderer
    ids: list[int] = field(default_factory=list)
    history: list[Exchange] = field(default_factory=list)

    async def act(self, observation: Observation) -> Action:
        policy, limits, request, history = self.policy, self.policy.limits, self.request, self.history
        if history:
            prompt = self.renderer.extend(history, observation)
        else:
            prompt = Prompt(self.renderer.open(observation), starts_sample=True)
        if prompt.starts_sample:
            self.ids = []
        if len(self.ids) + len(prompt.ids) + limits.turn_tokens > limits.max_tokens:
            raise PlayerStoppedError(StopReason.CONTEXT_OVERFLOW)
        self.ids += prompt.ids
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=limits.turn_tokens,
            stop=policy.renderer.stop,
            seed=stable_hash(request.seed, len(history)),
            timeout_s=limits.completion_timeout_s or math.inf,
        )
        completion = await policy.engine.generate(self.ids, params, session=request.session)
        token_ids = completion.token_ids.tolist()
        self.ids += token_ids
        history.append(Exchange(observation, tuple(token_ids)))
        return Action(self.renderer.action(token_ids), prompt.ids, completion, prompt.starts_sample)

    async def abort(self) -> None:
        await self.policy.engine.abort(self.request.session)

    def end(self) -> None:
        self.policy.engine.forget(self.request.session)


@dataclass(frozen=True, slots=True)
class RandomPlayer(Player):
    """Chooses each legal move with equal probability.

    Attributes:
        expert: Formats each move as an answer; if None, the action is the name of the move.
    """

    expert: Expert | None

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return Chooser(partial(self.choose, rng=random.Random(request.seed)))

    def choose(self, observation: Observation, rng: random.Random) -> str:
        """Choose a move.

        Raises:
            UsageError: The environment lists no legal moves.
        """
        if not observation.legal_moves:
            raise UsageError(
                "the environment lists no legal moves for a random policy; use the policy expert if it has an expert, "
                "or a language model (model:NAME-OR-PATH), or add legal_moves to its info"
            )
        move = observation.legal_moves[int(rng.random() * len(observation.legal_moves))]
        return move if self.expert is None else self.expert.answer(move)


@dataclass(frozen=True, slots=True)
class ExpertPlayer(Player):
    """Chooses the expert's best move, or a random move if the expert finds none."""

    expert: Expert
    otherwise: RandomPlayer

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        expert = expert_for(self.expert, request.task)
        rng = random.Random(request.seed)

        def choose(observation: Observation) -> str:
            moves = expert.moves(observation)
            return expert.answer(moves[0]) if moves else self.otherwise.choose(observation, rng)

        return Chooser(choose)


@dataclass(frozen=True, slots=True)
class ScriptedPlayer(Player):
    """Plays given actions, and stops after the last one.

    Attributes:
        scripts: The actions of each episode, by `RolloutRequest.index`.
    """

    scripts: Sequence[Sequence[str]]
    stop: StopReason = StopReason.MAX_TURNS

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        left = iter(self.scripts[request.index])

        def choose(observation: Observation) -> str:
            if (action := next(left, None)) is None:
                raise PlayerStoppedError(self.stop)
            return action

        return Chooser(choose)


@dataclass(frozen=True, slots=True)
class Chooser(EpisodePlayer):
    """One episode of a player that computes each action from the latest observation, without waiting."""

    choose: Callable[[Observation], Action | str]

    async def act(self, observation: Observation) -> Action | str:
        return self.choose(observation)
