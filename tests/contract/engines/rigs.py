"""Engines with six layers of SmolLM2 for the tests of what all engines promise, and the trainer's view of them."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from envkit import clock
from envkit.protocols import PolicyEngine
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.trainer_bridge.engines.vllm.replica import VllmSettings
from envkit.trainer_bridge.trainers.token_logps import TokenScorer
from envkit.trainer_bridge.weights.files import save_weights
from envkit.types import Completion, SamplingParams, Weights
from tests.contract.engines.vllm_server import VllmProcess
from tests.trainer_bridge.models import open_model, sample

PROMPT = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2)
TOLERANCE_NATS = 1e-4
_LAYERS = (0, 1, 2, 27, 28, 29)
STOPPED_PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 19842, 351, 253, 1230, 30)
"""A prompt after which the model with six layers most likely ends its text within some tokens."""
_EOS, _LIKELY = 2, 354


def prompt_of(session: str) -> tuple[int, ...]:
    """A prompt of the same length for each session (a letter), of which no engine has cached anything."""
    return (3000 + ord(session), *PROMPT)


def write_six_layers(smollm2: Path, folder: Path) -> Path:
    """Write SmolLM2 with six of its thirty layers, since all of them cost the tests three times as much.

    Without the others, it ends no text. So the token that ends a text changes places with a likely one.
    """
    weights = {}
    for name, weight in load_file(smollm2 / "model.safetensors").items():
        start, _, rest = name.partition(".layers.")
        layer, _, end = rest.partition(".")
        if not rest:
            weights[name] = weight
        elif int(layer) in _LAYERS:
            weights[f"{start}.layers.{_LAYERS.index(int(layer))}.{end}"] = weight
    embedding = weights["model.embed_tokens.weight"]
    embedding[[_EOS, _LIKELY]] = embedding[[_LIKELY, _EOS]]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(_LAYERS)}), encoding="utf-8")
    return folder


@dataclass
class Policies:
    """Two versions of the policy as the trainer has them, and their weights in files.

    Attributes:
        models: The models, by version.
        weights: Their weights, by version.
    """

    models: list[Any]
    weights: list[Weights]

    @classmethod
    def make(cls, model: Path, folder: Path) -> Policies:
        base, other = open_model(model), open_model(model)
        disturb(other, seed=1)
        save_weights(other, folder / "other.safetensors", torch.float32)
        weights = [Weights(0, str(model / "model.safetensors")), Weights(1, str(folder / "other.safetensors"))]
        return cls([base, other], weights)

    def gaps(self, got: Completion, *, prompt: Sequence[int] = PROMPT, temperature: float = 1.0) -> list[float]:
        """The mean absolute difference to the trainer's log-probabilities (nats), for each range of `versions`."""
        begin, gaps = 0, []
        for version, count in got.versions:
            scored = score(self.models[version], got, prompt=prompt, temperature=temperature)
            gaps.append(float(np.abs(scored - got.logprobs)[begin : begin + count].mean()))
            begin += count
        assert begin == len(got.token_ids) == len(got.logprobs)
        return gaps

    def agree(self, got: Completion, *, prompt: Sequence[int] = PROMPT, temperature: float = 1.0) -> bool:
        """Whether the trainer has the same log-probabilities for all tokens, with the weights that sampled them."""
        return max(self.gaps(got, prompt=prompt, temperature=temperature)) <= TOLERANCE_NATS


@torch.inference_mode()
def score(model: Any, got: Completion, *, prompt: Sequence[int] = PROMPT, temperature: float = 1.0) -> Any:
    """The trainer's log-probabilities of the tokens of a completion, in nats."""
    scorer = TokenScorer(model, temperature=temperature)
    return scorer.score([[sample(prompt, (got.token_ids.tolist(), ()))]]).logp_N.numpy()


@torch.no_grad()
def disturb(model: Any, seed: int, *, scale: float = 0.003) -> None:
    """Change all weights a little."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)


class Rig(ABC):
    """Runs a test with an engine that samples from version 0 of the policy.

    Attributes:
        long: Tokens of a completion that takes many times as long as a call of the engine.
    """

    long: int

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.is_changed = False
        """Whether the engine may have other weights than those of version 0."""

    @abstractmethod
    def opened(self) -> Any:
        """Return a context manager of the engine, whose weights are the last ones that were loaded."""

    def run(self, test: Callable[[PolicyEngine], Awaitable[None]], *, timeout_s: float = 60.0) -> None:
        async def main() -> None:
            with anyio.fail_after(timeout_s):
                async with self.opened() as engine:
                    if self.is_changed:
                        await engine.load(self.policies.weights[0])
                        self.is_changed = False
                    await test(engine)

        clock.run(main)


class TransformersRig(Rig):
    """The engine of this process."""

    long = 20

    def __init__(self, policies: Policies, model: Path) -> None:
        super().__init__(policies)
        self._model = open_model(model)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[TransformersEngine]:
        yield TransformersEngine(self._model, pad_id=2, threads=1)


class VllmRig(Rig):
    """The engine on the server of the test run."""

    long = 120

    def __init__(self, policies: Policies, process: VllmProcess) -> None:
        super().__init__(policies)
        self.process = process

    def opened(self, *, lines: list[str] | None = None, **changes: Any) -> Any:
        settings = VllmSettings(**{"max_tokens": 512, "max_num_seqs": 16, "dtype": "float32", "seeds": True, **changes})
        announce = print if lines is None else lines.append
        return VllmEngine(settings, urls=[self.process.url], announce=announce).running()


async def fed_at_least(engine: PolicyEngine, count: int, since: int) -> None:
    """Wait until the model has processed `count` tokens more than `since`."""
    with anyio.fail_after(20):
        while (await engine.health()).fed_tokens < since + count:  # noqa: ASYNC110 - there is no event
            await anyio.sleep(0.01)


async def is_still(engine: PolicyEngine, *, for_s: float = 0.3) -> bool:
    """Whether the model processes no token for some time."""
    before = (await engine.health()).fed_tokens
    await anyio.sleep(for_s)
    return (await engine.health()).fed_tokens == before


class Asked:
    """Completions in progress, by session; open it as a context manager, whose end waits for all of them."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._tasks = anyio.create_task_group()
        self.done: dict[str, Completion] = {}

    async def __aenter__(self) -> Asked:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._tasks.__aexit__(*error)

    def ask(self, session: str, how: SamplingParams, *, prompt: Sequence[int] = ()) -> None:
        async def one() -> None:
            self.done[session] = await self._engine.generate(prompt or prompt_of(session), how, session=session)

        self._tasks.start_soon(one)

    async def begun(self, sessions: str, how: SamplingParams) -> None:
        """Ask for each session (a letter), and wait until their completions have some tokens."""
        fed = (await self._engine.health()).fed_tokens
        for session in sessions:
            self.ask(session, how)
        await fed_at_least(self._engine, len(sessions) * (len(prompt_of("a")) + 3), fed)

    async def ended(self, sessions: str) -> None:
        """Wait until the completions of sessions (letters) have returned."""
        with anyio.fail_after(20):
            while not self.done.keys() >= set(sessions):  # noqa: ASYNC110 - there is no event
                await anyio.sleep(0.01)
