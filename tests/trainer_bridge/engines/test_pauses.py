"""The transformers engine interrupted: continuations, callers that leave in a pause, deadlines.

What every engine promises of aborts, pauses and new weights is in ``tests/contract/engines``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import safetensors.torch

from envkit import clock
from envkit.errors import DeadlineError
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.types import Completion, FinishReason, PauseMode, SamplingParams, Weights
from tests.trainer_bridge.models import open_model, shake, slow_generate
from tests.trainer_bridge.watched import Watched, agrees_with_the_slow_way, params

PROMPTS = {"a": [1, 5, 6], "b": [1, 7, 8, 9], "c": [2, 10]}
LONG = 8


@dataclass
class Scene:
    """An engine that generates for several sessions, while something happens during one of its forward passes."""

    watched: Watched
    done: dict[str, Completion] = field(default_factory=dict)
    at_s: dict[str, float] = field(default_factory=dict)

    async def ask(self, name: str, how: SamplingParams, so_far: Completion | None = None) -> None:
        self.done[name] = await self.watched.engine.generate(PROMPTS[name], how, session=name, so_far=so_far)
        self.at_s[name] = clock.now()

    async def run(self, during: int, event: Callable[[], Coroutine[Any, Any, object]], *, names: str = "abc") -> None:
        """Generate for `names`, and start `event` while the forward pass number `during` (from 1) runs."""
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                tasks.start_soon(event)
                await anyio.lowlevel.checkpoint()  # until the event waits for the engine

            def start_in_the_pass() -> None:
                if len(self.watched.fed) == during:
                    anyio.from_thread.run(start)

            self.watched.before_pass = start_in_the_pass
            for name in names:
                tasks.start_soon(self.ask, name, how(name))
        self.watched.before_pass = lambda: None


def how(name: str, n: int = LONG) -> SamplingParams:
    return params(ord(name), n=n)


def whole(folder: Path, name: str, n: int = LONG) -> list[int]:
    tokens, _ = slow_generate(open_model(folder), PROMPTS[name], how(name, n))
    return tokens


def begins(folder: Path, name: str, got: Completion) -> int:
    """Check that an aborted completion is the beginning of the uninterrupted one; return its length."""
    count = len(got.token_ids)
    assert got.finish is FinishReason.ABORTED
    assert got.token_ids.tolist() == whole(folder, name)[:count]
    assert len(got.logprobs) == count == sum(tokens for _, tokens in got.versions)
    return count


@pytest.fixture
def other_weights(tiny_folder: Path, tmp_path: Path) -> tuple[Any, Weights]:
    """Another model, and its weights in a file, as version 1."""
    other = open_model(tiny_folder)
    shake(other, seed=99)
    safetensors.torch.save_model(other, str(tmp_path / "version-1.safetensors"))
    return other, Weights(1, str(tmp_path / "version-1.safetensors"))


# --- Continuations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("during", "keeps_its_cache"), [(1, True), (6, True), (6, False)])
def test_a_continuation_ends_with_the_tokens_of_an_uninterrupted_completion(
    during: int, keeps_its_cache: bool, tiny_folder: Path
) -> None:
    async def main() -> tuple[Completion, int]:
        scene = Scene(Watched(tiny_folder))
        await scene.run(during, lambda: scene.watched.engine.abort("a"), names="a")
        partial = scene.done["a"]
        assert begins(tiny_folder, "a", partial) < LONG
        if not keeps_its_cache:
            scene.watched.engine._cache.clear()
        fed = (await scene.watched.engine.health()).fed_tokens
        await scene.ask("a", how("a"), partial)
        return scene.done["a"], (await scene.watched.engine.health()).fed_tokens - fed

    got, fed = clock.run(main, virtual=True)
    agrees_with_the_slow_way(open_model(tiny_folder), PROMPTS["a"], how("a"), got)
    assert got.versions == ((0, LONG),)
    if keeps_its_cache:
        assert fed <= LONG  # one token for each that is missing, and nothing of the prompt


def test_a_completion_that_is_whole_already_is_returned_as_it_is(tiny_folder: Path) -> None:
    async def main() -> None:
        watched = Watched(tiny_folder)
        (got,) = await watched.all_of([("a", PROMPTS["a"], how("a"))])
        passes = len(watched.fed)
        for finish in (got.finish, FinishReason.ABORTED):  # an abort after the last token
            so_far = replace(got, finish=finish)
            again = await watched.engine.generate(PROMPTS["a"], how("a"), session="a", so_far=so_far)
            assert (again.token_ids.tolist(), again.finish) == (got.token_ids.tolist(), got.finish)
        assert len(watched.fed) == passes

    clock.run(main, virtual=True)


# --- Pause -----------------------------------------------------------------------------------------------------------


def test_a_caller_that_is_cancelled_during_a_pause_does_not_block_the_others(tiny_folder: Path) -> None:
    async def main() -> None:
        scene = Scene(Watched(tiny_folder))
        engine = scene.watched.engine
        await engine.pause(PauseMode.KEEP)
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(5):
                async with anyio.create_task_group() as cancelled:
                    cancelled.start_soon(scene.ask, "b", how("b"))
                    tasks.start_soon(scene.ask, "a", how("a"))
            await engine.resume()
        assert list(scene.done) == ["a"]
        agrees_with_the_slow_way(open_model(tiny_folder), PROMPTS["a"], how("a"), scene.done["a"])

    clock.run(main, virtual=True)


# --- Deadlines and frozen engines ------------------------------------------------------------------------------------


def test_a_deadline_counts_the_passes_after_the_first_token_but_no_pause(tiny_folder: Path) -> None:
    watched = Watched(tiny_folder)
    pass_s = 0.02
    watched.before_pass = lambda: threading.Event().wait(pass_s)

    async def main() -> None:
        nonlocal pass_s
        engine = watched.engine
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.ask, "a", replace(how("a", 3), timeout_s=2.0))
            await anyio.sleep(0.03)
            await engine.pause(PauseMode.KEEP)
            await anyio.sleep(2.5)
            await engine.resume()
        pass_s = 0.5
        with pytest.raises(DeadlineError, match="did not complete a prompt within 2 s of its first token"):
            await engine.generate(PROMPTS["b"], replace(how("b", 12), timeout_s=2.0))
        assert (await engine.health()).running == 0

    scene = Scene(watched)
    clock.run(main)
    assert len(scene.done["a"].token_ids) == 3


def test_a_frozen_engine_keeps_the_weights_that_it_was_made_with(
    tiny_folder: Path, other_weights: tuple[Any, Weights]
) -> None:
    async def main() -> None:
        other, weights = other_weights
        engine = TransformersEngine(open_model(tiny_folder), pad_id=0)
        async with engine.frozen() as frozen:
            await engine.load(weights)
            old = await frozen.generate(PROMPTS["a"], how("a"))
            new = await engine.generate(PROMPTS["a"], how("a"))
        agrees_with_the_slow_way(open_model(tiny_folder), PROMPTS["a"], how("a"), old)
        agrees_with_the_slow_way(other, PROMPTS["a"], how("a"), new)
        assert (old.versions, new.versions) == (((0, LONG),), ((1, LONG),))

    clock.run(main)
