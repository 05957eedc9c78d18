"""An engine that records its forward passes, and a comparison with slow generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.types import Completion, FinishReason, SamplingParams
from tests.trainer_bridge.models import open_model, slow_generate


class Watched:
    """An engine with a record of the rows and tokens of each forward pass."""

    def __init__(self, folder: Path, *, batch_tokens: int = 65536, attention: str | None = None) -> None:
        self.model = open_model(folder, attention=attention)
        self.engine = TransformersEngine(self.model, pad_id=0, batch_tokens=batch_tokens)
        self.fed: list[tuple[int, int]] = []
        self.before_pass: Callable[[], object] = lambda: None
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        self.fed.append((rows, width))
        self.before_pass()

    async def all_of(self, requests: Sequence[tuple[str | None, Sequence[int], SamplingParams]]) -> list[Completion]:
        """Send all requests at the same moment."""
        done: dict[int, Completion] = {}

        async def one(number: int, session: str | None, prompt: Sequence[int], params: SamplingParams) -> None:
            done[number] = await self.engine.generate(prompt, params, session=session)

        async with anyio.create_task_group() as tasks:
            for number, request in enumerate(requests):
                tasks.start_soon(one, number, *request)
        return [done[number] for number in range(len(requests))]


def params(seed: int = 0, *, n: int = 4, **changes: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=n, **changes)


def agrees_with_the_slow_way(model: Any, prompt: Sequence[int], how: SamplingParams, got: Completion) -> None:
    expected, logps = slow_generate(model, prompt, how)
    assert got.token_ids.tolist() == expected
    assert got.logprobs.tolist() == pytest.approx(logps, abs=1e-5)
    stopped = expected[-1] in how.stop
    assert got.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
