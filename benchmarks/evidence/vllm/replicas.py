"""Kill vLLM servers with SIGKILL while two replicas play 64 episodes of FrozenLake-v0, and count what is lost.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/replicas.py

The policy has the shape of Qwen2 with 4 layers, random weights and the tokenizer of SmolLM2. In each part, 64 episodes
of up to 10 turns with 32 tokens each are played, and new weights are pushed in the middle of the completions. A process
of a server is killed before, while or after the weights are loaded. No episode is retried, so a lost one would show.
``tokens arrived`` is counted where the client reads the server's events, and ``tokens in completions`` in what the
rollout gets. The tokens of every fourth episode are scored by the trainer under the weights of the version that the
completion names, and under the other version. Takes 20 minutes on a quiet machine.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
import anyio
import numpy as np
import torch
from parts import new_qwen2, perturb, server_settings, trainer
from record import Evidence, parser
from record.processes import descendants, name_of, port_of

from envkit import clock
from envkit.config.parts import AutoRendererSection
from envkit.protocols import Renderer
from envkit.trainer_bridge.engines.vllm.client import Part, VllmClient
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine, VllmSettings
from envkit.trainer_bridge.engines.vllm.server import VllmServer
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.samples import samples_of
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.trainer_bridge.weights.channel import WeightChannel, weights_folder
from envkit.types import Completion, PauseMode, Sample, SamplingParams, Task
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.contexts import RendererContext
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.training.torch_parts import find_model, open_renderer

NAME = "vllm-replicas"
STALE_AFTER = ("trainer_bridge/engines/vllm", "trainer_bridge/rollout", "trainer_bridge/weights/channel.py")
TWIN = (
    "tests/trainer_bridge/engines/vllm/test_losses.py::"
    "test_no_token_of_many_completions_is_lost_when_one_of_two_servers_dies"
)
ENV_ID = "FrozenLake-v0"
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LIMITS = RolloutLimits(max_turns=10, max_tokens=1024, turn_tokens=32, step_timeout_s=600.0, retries=0)
EVERYTHING = "all processes"
MAX_NATS = 1e-3
SCORED_EVERY = 4

Figures = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What happens in a part.

    Attributes:
        replicas: Which replicas are killed.
        process: The process that is killed.
        kill_at: Number of tokens after which it is killed; None: while weights are loaded.
        push_at: Number of tokens after which weights are pushed.
    """

    replicas: tuple[int, ...]
    process: str
    kill_at: int | None
    push_at: int


PLANS = {
    "API server, then an update": Plan((0,), "vLLM APIServer", 1500, 4000),
    "both servers": Plan((0, 1), EVERYTHING, 3000, 1500),
    "engine process, after an update": Plan((1,), "vLLM EngineCore", 4000, 1500),
    "worker, while weights are loaded": Plan((0,), "vLLM Worker", None, 3000),
    "API server, while weights are loaded": Plan((1,), "vLLM APIServer", None, 3000),
    "all processes of a server": Plan((0,), EVERYTHING, 3000, 1500),
}


@dataclass
class Tap:
    """Counts what clients receive, and records what the engine returns."""

    engine: VllmEngine
    arrived: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    completions: list[Completion] = field(default_factory=list)
    repeats: bool = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **others: Any) -> Completion:
        completion = await self.engine.generate(prompt_ids, params, **others)
        self.completions.append(completion)
        return completion

    def forget(self, session: str) -> None:
        self.engine.forget(session)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of all clients during the block."""
        read, generate = VllmClient._read, VllmClient.generate

        def counted(client: VllmClient, chunk: Mapping[str, Any], into: Part) -> None:
            before = len(into.tokens)
            read(client, chunk, into)
            self.arrived += len(into.tokens) - before

        async def counted_part(client: VllmClient, request_id: str, *words: Any, into: Part, **others: Any) -> None:
            try:
                await generate(client, request_id, *words, into=into, **others)
            finally:
                self.parts[request_id.rpartition("-")[0]] += bool(into.tokens)

        VllmClient._read, VllmClient.generate = counted, counted_part  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            VllmClient._read, VllmClient.generate = read, generate  # type: ignore[method-assign]

    def reached(self, count: int) -> bool:
        """Return whether at least `count` tokens have arrived."""
        return self.arrived >= count


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.005)


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=PLANS, help="measure only this part")
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    arguments.add_argument("--episodes", type=int, default=64, help="number of episodes of a part")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    names = [name for name in PLANS if options.only in (None, name) and not evidence.has(name)]
    with TemporaryDirectory() as folder:
        if names:
            anyio.run(play_all, evidence, names, Path(folder), options)
    if all(map(evidence.has, PLANS)):
        evidence.part("claims", lambda: claims({name: evidence.part(name, dict) for name in PLANS}))


async def play_all(evidence: Evidence, names: Sequence[str], folder: Path, options: Any) -> None:
    """Start two servers, and measure the given parts with them."""
    sizes = {**SIZES, "intermediate_size": 512, "max_position_embeddings": LIMITS.max_tokens}
    model = new_qwen2(folder / "model", dtype="float32", initializer_range=0.15, **sizes)
    renderer = open_renderer(RendererContext(section=AutoRendererSection(), model=find_model(str(folder / "model"))))
    settings = server_settings(folder / "model", options.python, dtype="float32", max_tokens=LIMITS.max_tokens)
    servers = [VllmServer(settings, launcher=LocalLauncher(), announce=print) for _ in range(2)]
    engine = VllmEngine(
        VllmSettings(max_tokens=LIMITS.max_tokens, max_num_seqs=64, dtype="float32", max_restarts=len(PLANS)),
        servers=servers,
        announce=partial(print, flush=True),
    )
    with weights_folder(folder) as weights:
        async with engine.running():
            run = Run(model, engine, servers, renderer, weights, options.episodes)
            await run.push()
            for number, name in enumerate(names):
                figures = await run.play(number, PLANS[name])
                print(name, figures, flush=True)
                evidence.part(name, lambda figures=figures: figures)  # type: ignore[misc]


class Run:
    """Two replicas and a trainer, which are used for all parts."""

    def __init__(
        self,
        model: Any,
        engine: VllmEngine,
        servers: Sequence[VllmServer],
        renderer: Renderer,
        weights: Path,
        episodes: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._servers = servers
        self._renderer = renderer
        self._trainer = trainer(model, weights)
        self._channel = WeightChannel(self._trainer, engine, mode=PauseMode.KEEP)
        self._episodes = episodes
        self._states: dict[int, Mapping[str, torch.Tensor]] = {}

    async def push(self) -> float:
        """Change the weights and push them in the middle of completions; return the exposed seconds."""
        self._trainer.version += 1
        perturb(self._model, self._trainer.version, share=0.05)
        self._states[self._trainer.version] = {
            name: weight.clone() for name, weight in self._model.state_dict().items()
        }
        return (await self._channel.push()).exposed_s

    async def play(self, number: int, plan: Plan) -> Figures:
        """Play the episodes of a part, and return its figures."""
        tap = Tap(self._engine)
        found: Figures = {"killed": plan.process, "replicas": len(plan.replicas)}
        began = clock.now()
        with tap.counting():
            async with environments.slots(self._episodes) as host, anyio.create_task_group() as tasks:
                tasks.start_soon(self._push_later, tap, plan, found)
                tasks.start_soon(self._kill_later, tap, plan, found)
                rollout = Rollout(host, PolicyPlayer(tap, self._renderer, LIMITS), LIMITS, self._episodes)  # type: ignore[arg-type]
                counts: Counter[str] = Counter()
                result = await rollout.groups(
                    self._tasks(number),
                    4,
                    phase=f"part-{number}",
                    temperature=1.0,
                    seed=number,
                    on_begin=lambda request: counts.update(["begun"]),
                    on_episode=lambda trajectory: counts.update(["ended"]),
                )
                found["rollout_s"] = round(clock.now() - began, 1)
        found |= self._accounts(result, tap, counts)
        found["nats"] = await self._agreement(samples_of(result.groups)[::SCORED_EVERY])
        return found

    def _tasks(self, number: int) -> list[Task]:
        spec = environments.find(ENV_ID)
        return list(task_sets.all_tasks(spec, {}, "train", number, self._episodes // 4))

    async def _push_later(self, tap: Tap, plan: Plan, found: Figures) -> None:
        await until(partial(tap.reached, plan.push_at))
        found["push_exposed_s"] = round(await self.push(), 2)

    async def _kill_later(self, tap: Tap, plan: Plan, found: Figures) -> None:
        if plan.kill_at is None:
            await until(self._engine._loading.locked)
        else:
            await until(partial(tap.reached, plan.kill_at))
        found["completions_in_progress_there"] = sum(self._engine._replicas[index].running for index in plan.replicas)
        began = clock.now()
        found["processes_killed"] = sum(self._kill(index, plan.process) for index in plan.replicas)
        await until(lambda: len(self._engine.completers) < 2)
        found["noticed_s"] = round(clock.now() - began, 2)
        await until(lambda: len(self._engine.completers) == 2)
        found["back_s"] = round(clock.now() - began, 1)

    def _kill(self, index: int, process: str) -> int:
        port = self._servers[index].url.rpartition(":")[2]
        root = next(pid for pid in descendants(os.getpid()) if port_of(pid) == port)
        chosen = [pid for pid in descendants(root) if process in (EVERYTHING, name_of(pid))]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(chosen)

    def _accounts(self, result: RolloutResult, tap: Tap, counts: Mapping[str, int]) -> Figures:
        keys = [one.key for one in result.trajectories]
        turns = [turn.completion for one in result.trajectories for turn in one.turns]
        return {
            "episodes": {
                **counts,
                "different": len(set(keys)),
                "void": sum(one.is_void for one in result.trajectories),
            },
            "completions": len(tap.completions),
            "completions_continued": sum(count > 1 for count in tap.parts.values()),
            "completions_with_two_versions": sum(len(one.versions) > 1 for one in tap.completions),
            "tokens_arrived": tap.arrived,
            "tokens_in_completions": sum(len(one.token_ids) for one in tap.completions),
            "tokens_in_episodes": sum(len(one.token_ids) for one in turns),
            "tokens_by_version": dict(
                sorted(sum((Counter(dict(one.versions)) for one in tap.completions), Counter[int]()).items())
            ),
        }

    async def _agreement(self, samples: Sequence[Sample]) -> Figures:
        """Return the differences between the engine's and the trainer's log-probabilities, by whose weights."""
        version_N = np.concatenate([one.versions[one.mask] for one in samples])
        sampled_N = np.concatenate([one.logprobs[one.mask] for one in samples])
        scorer = trainer(self._model, None)
        gaps: dict[int, np.ndarray[Any, Any]] = {}
        for version in sorted(set(version_N.tolist())):
            self._model.load_state_dict(self._states[version])
            gaps[version] = np.abs(np.concatenate(await scorer.score(samples)) - sampled_N)
        self._model.load_state_dict(self._states[self._trainer.version])
        own_N = np.concatenate([gaps[version][version_N == version] for version in gaps])
        other_N = np.concatenate([gaps[one][version_N != one] for one in gaps])
        return {
            "under the version of the token": {"mean": float(own_N.mean()), "max": float(own_N.max())},
            "under another version": {"mean": float(other_N.mean())} if len(other_N) else {},
        }


def claims(parts: Mapping[str, Figures]) -> Figures:
    """Return whether anything was lost in any part."""
    return {
        "every episode ended once, and none is void": all(
            part["episodes"]["begun"] == part["episodes"]["ended"] == part["episodes"]["different"]
            and not part["episodes"]["void"]
            for part in parts.values()
        ),
        "every token that arrived is in a completion, and in an episode": all(
            part["tokens_arrived"] == part["tokens_in_completions"] == part["tokens_in_episodes"]
            for part in parts.values()
        ),
        f"every token was sampled with the weights of its version, within {MAX_NATS} nats": all(
            part["nats"]["under the version of the token"]["max"] <= MAX_NATS for part in parts.values()
        ),
        "tokens": sum(part["tokens_arrived"] for part in parts.values()),
        "completions continued after a loss or an update": sum(
            part["completions_continued"] for part in parts.values()
        ),
        "seconds until the server is back": [part["back_s"] for part in parts.values()],
    }


if __name__ == "__main__":
    main()
