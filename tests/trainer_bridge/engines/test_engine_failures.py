"""The transformers engine when something goes wrong: a model that fails, callers that leave."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from envkit import clock
from envkit.types import SamplingParams
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.watched import Watched, agrees_with_the_slow_way, params


def test_a_failing_model_raises_in_every_waiting_caller_and_the_engine_works_afterwards(tiny_folder: Path) -> None:
    async def main() -> list[str]:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        (kept,) = await watched.all_of([("z", [1, 9, 9], params(7, n=1))])
        errors: list[str] = []

        async def fails(name: str) -> None:
            with pytest.raises(RuntimeError, match="out of memory") as caught:
                await watched.engine.generate([1, 5, 6], params(1, n=3), session=name)
            errors.append(f"{name}: {caught.value}")

        def break_the_second_pass() -> None:
            if len(watched.fed) == 3:
                raise RuntimeError("out of memory")

        watched.before_pass = break_the_second_pass
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(fails, name)

        requests = [
            ("a", [1, 5, 6], params(1, n=3)),
            ("b", [1, 5, 6, 7, 8], params(2, n=3)),
            ("z", [1, 9, 9, *kept.token_ids, 5], params(3, n=3)),
        ]
        for (_, prompt, how), got in zip(requests, await watched.all_of(requests), strict=True):
            agrees_with_the_slow_way(reference, prompt, how, got)
        return errors

    assert sorted(clock.run(main, virtual=True)) == [f"{name}: out of memory" for name in "abc"]


@pytest.mark.parametrize("leaver", ["a", "b", "c"])  # the first caller runs the batch for the others
def test_a_caller_that_is_cancelled_does_not_break_the_others(tiny_folder: Path, leaver: str) -> None:
    async def main() -> set[str]:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        done: set[str] = set()
        scopes = {name: anyio.CancelScope() for name in "abc"}

        async def one(name: str, prompt: list[int], how: SamplingParams) -> None:
            with scopes[name]:
                got = await watched.engine.generate(prompt, how, session=name)
                agrees_with_the_slow_way(reference, prompt, how, got)
                done.add(name)

        def cancel_in_the_second_pass() -> None:
            if len(watched.fed) == 2:
                anyio.from_thread.run_sync(scopes[leaver].cancel)

        watched.before_pass = cancel_in_the_second_pass
        async with anyio.create_task_group() as tasks:
            for number, name in enumerate("abc"):
                tasks.start_soon(one, name, [1, 5 + number, 6], params(number, n=4))

        (later,) = await watched.all_of([("d", [1, 8], params(4, n=2))])
        agrees_with_the_slow_way(reference, [1, 8], params(4, n=2), later)
        return done

    assert clock.run(main, virtual=True) == set("abc") - {leaver}


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_batch_whose_callers_were_all_cancelled_is_cut_between_two_decode_steps(
    tiny_folder: Path, names: str
) -> None:
    async def main() -> int:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        scope = anyio.CancelScope()

        def cancel_in_the_third_pass() -> None:
            if len(watched.fed) == 3:
                anyio.from_thread.run_sync(scope.cancel)
                anyio.from_thread.run(anyio.sleep, 0)  # until the callers know

        watched.before_pass = cancel_in_the_third_pass
        with scope:
            await watched.all_of([(name, [1, 5, 6], params(number, n=50)) for number, name in enumerate(names)])
        assert scope.cancelled_caught
        passes = len(watched.fed)
        watched.before_pass = lambda: None
        (later,) = await watched.all_of([("a", [1, 5, 6], params(4, n=2))])
        agrees_with_the_slow_way(reference, [1, 5, 6], params(4, n=2), later)
        return passes

    assert clock.run(main, virtual=True) == 3


def test_a_session_can_be_forgotten_while_its_batch_runs(tiny_folder: Path) -> None:
    async def main() -> list[tuple[int, int]]:
        watched, reference = Watched(tiny_folder, batch_tokens=1), open_model(tiny_folder)
        first = await watched.all_of([("a", [1, 5], params(1, n=1)), ("b", [1, 6], params(2, n=1))])
        requests = [
            (name, [1, 5 + number, *first[number].token_ids, 9], params(number, n=2))
            for number, name in enumerate("ab")
        ]
        watched.before_pass = lambda: anyio.from_thread.run_sync(watched.engine.forget, "b")
        second = await watched.all_of(requests)
        for (_, prompt, how), got in zip(requests, second, strict=True):
            agrees_with_the_slow_way(reference, prompt, how, got)
        watched.before_pass = lambda: None
        watched.fed.clear()
        for (name, prompt, how), got in zip(requests, second, strict=True):
            await watched.all_of([(name, [*prompt, *got.token_ids, 5], how)])
        return watched.fed

    # a goes on from its cache, b is read from the start.
    assert clock.run(main, virtual=True) == [(1, 2), (1, 1), (1, 7), (1, 1)]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_request_without_a_session_that_comes_to_nothing_leaves_nothing_behind(tiny_folder: Path, end: str) -> None:
    async def main() -> list[tuple[int, int]]:
        watched = Watched(tiny_folder, batch_tokens=1)
        prompt = [1, 5, 6]  # the same list again and again, so that its place in memory names nobody
        scope = anyio.CancelScope()

        def end_it() -> None:
            if len(watched.fed) == 2:
                if end == "failed":
                    raise RuntimeError("out of memory")
                anyio.from_thread.run_sync(scope.cancel)

        watched.before_pass = end_it
        with scope:
            try:
                await watched.engine.generate(prompt, params(1, n=2))
            except RuntimeError:
                assert end == "failed"
        watched.fed.clear()
        watched.before_pass = lambda: None
        prompt += [7, 8]
        await watched.engine.generate(prompt, params(1, n=1))
        return watched.fed

    assert clock.run(main, virtual=True) == [(1, 5)]
