"""The transformers engine when something goes wrong: a model that fails, callers that leave."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from envkit import clock
from envkit.types import Completion, SamplingParams
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
            ("z", [1, 9, 9, *kept.token_ids.tolist(), 5], params(3, n=3)),
        ]
        for (_, prompt, how), got in zip(requests, await watched.all_of(requests), strict=True):
            agrees_with_the_slow_way(reference, prompt, how, got)
        return errors

    assert sorted(clock.run(main, virtual=True)) == [f"{name}: out of memory" for name in "abc"]


@pytest.mark.parametrize("leaver", ["a", "b"])  # the first caller runs the batch for the others
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


def test_a_batch_whose_callers_were_all_cancelled_is_cut_between_two_decode_steps(tiny_folder: Path) -> None:
    async def main() -> int:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        scope = anyio.CancelScope()

        def cancel_in_the_third_pass() -> None:
            if len(watched.fed) == 3:
                anyio.from_thread.run_sync(scope.cancel)
                anyio.from_thread.run(anyio.sleep, 0)  # until the callers know

        watched.before_pass = cancel_in_the_third_pass
        with scope:
            await watched.all_of([(name, [1, 5, 6], params(number, n=50)) for number, name in enumerate("abc")])
        assert scope.cancelled_caught
        passes = len(watched.fed)
        watched.before_pass = lambda: None
        (later,) = await watched.all_of([("a", [1, 5, 6], params(4, n=2))])
        agrees_with_the_slow_way(reference, [1, 5, 6], params(4, n=2), later)
        return passes

    assert clock.run(main, virtual=True) == 3


@pytest.mark.parametrize("others", [0, 63])  # with 64 sessions, every slot is taken
def test_a_session_that_is_forgotten_while_it_runs_keeps_its_slot_until_it_ends(tiny_folder: Path, others: int) -> None:
    async def main() -> None:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        late: list[Completion] = []

        async def ask() -> None:
            late.append(await watched.engine.generate([4, 8, 9], params(9, n=3), session="late"))

        async with anyio.create_task_group() as tasks:

            def forget_and_send_another() -> None:
                if len(watched.fed) == 1:
                    anyio.from_thread.run_sync(watched.engine.forget, "b")
                    anyio.from_thread.run_sync(tasks.start_soon, ask)

            watched.before_pass = forget_and_send_another
            requests = [("b", [1, 5, 6], params(1, n=5))]
            requests += [(f"c{number}", [2, 3 + number % 16, 7], params(number, n=5)) for number in range(others)]
            got = await watched.all_of(requests)
        agrees_with_the_slow_way(reference, [1, 5, 6], params(1, n=5), got[0])
        agrees_with_the_slow_way(reference, [4, 8, 9], params(9, n=3), late[0])

    clock.run(main, virtual=True)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_request_without_a_session_that_ends_early_keeps_no_slot(tiny_folder: Path, end: str) -> None:
    async def main() -> None:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        scope = anyio.CancelScope()

        def end_it() -> None:
            if len(watched.fed) == 2:
                if end == "failed":
                    raise RuntimeError("out of memory")
                anyio.from_thread.run_sync(scope.cancel)

        watched.before_pass = end_it
        with scope:
            try:
                await watched.engine.generate([1, 5, 6], params(1, n=2))
            except RuntimeError:
                assert end == "failed"
        watched.before_pass = lambda: None
        later = await watched.engine.generate([1, 5, 6, 7, 8], params(1, n=2))
        agrees_with_the_slow_way(reference, [1, 5, 6, 7, 8], params(1, n=2), later)
        assert watched.engine._slots == {}

    clock.run(main, virtual=True)
