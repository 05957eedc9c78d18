"""Sharing changes no completion: groups, common beginnings, and what sessions out of step have cached."""

from __future__ import annotations

import random
from pathlib import Path

import anyio

from envkit import clock
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.watched import Watched, agrees_with_the_slow_way, params

END = 4


def test_groups_with_long_tails_say_what_each_row_would_say_alone_over_several_turns(tiny_folder: Path) -> None:
    rng = random.Random(0)

    async def main() -> int:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        openings = [[1, *(rng.randrange(3, 19) for _ in range(rng.randint(2, 6)))] for _ in range(3)]
        prompts = {f"{number:02d}": list(openings[number // 4]) for number in range(12)}
        seen = 0
        for turn in range(3):
            requests = [
                (name, list(prompt), params(int(name) + 100 * turn, n=rng.choice([1, 2, 5, 9]), stop=(END,)))
                for name, prompt in prompts.items()
            ]
            for (name, asked, how), got in zip(requests, await watched.all_of(requests), strict=True):
                agrees_with_the_slow_way(reference, asked, how, got)
                prompts[name] += [*got.token_ids.tolist(), *(rng.randrange(3, 19) for _ in range(rng.randint(1, 3)))]
                seen += 1
            if turn == 0:
                # Each of the openings is read once, and later passes lose rows.
                assert watched.fed[0][0] == 3
                rows = [count for count, _ in watched.fed[1:]]
                assert rows == sorted(rows, reverse=True)
                assert rows[-1] < rows[0]
                first_turn = len(watched.fed)
        # Caches were kept through all of that: the second turn reads what is new, all rows at once.
        assert watched.fed[first_turn][0] == 12
        assert watched.fed[first_turn][1] <= 4
        return seen

    assert clock.run(main, virtual=True) == 36


def test_what_all_prompts_begin_with_is_read_once(tiny_folder: Path) -> None:
    async def main() -> list[tuple[int, int]]:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        system = [1, *(3 + number % 16 for number in range(11))]
        asked = [[*system, 4, 5], [*system, 6], [*system, 4, 5], system]
        requests = [(str(number), prompt, params(number, n=3)) for number, prompt in enumerate(asked)]
        for (_, prompt, how), got in zip(requests, await watched.all_of(requests), strict=True):
            agrees_with_the_slow_way(reference, prompt, how, got)
        return watched.fed[:2]

    # One prompt is the beginning itself, and its last token has to be fed for its first answer.
    assert clock.run(main, virtual=True) == [(1, 11), (3, 3)]


def test_sessions_out_of_step_feed_at_most_1_1_times_the_new_tokens(tiny_folder: Path) -> None:
    """Each session waits for its environment between turns, for a different time."""
    rng = random.Random(0)
    new_tokens = 0

    async def episode(watched: Watched, reference: object, name: str) -> None:
        nonlocal new_tokens
        ids: list[int] = []
        for turn in range(4):
            await anyio.sleep(rng.random())
            observation = [rng.randrange(3, 19) for _ in range(rng.randint(4, 9))]
            how = params(int(name) * 10 + turn, n=rng.randint(1, 4), stop=(END,))
            ids += observation
            got = await watched.engine.generate(list(ids), how, session=name)
            agrees_with_the_slow_way(reference, ids, how, got)
            ids += got.token_ids.tolist()
            new_tokens += len(observation) + len(got.token_ids)
        watched.engine.forget(name)

    async def main() -> int:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(episode, watched, reference, str(number))
        return (await watched.engine.health()).fed_tokens

    assert clock.run(main, virtual=True) <= 1.1 * new_tokens
