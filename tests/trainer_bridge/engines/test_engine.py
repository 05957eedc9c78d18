"""The transformers engine: batches and caches change the speed and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from envkit import clock
from envkit.types import Completion, SamplingParams
from tests.trainer_bridge.models import open_model, shake
from tests.trainer_bridge.plain import plain
from tests.trainer_bridge.watched import Watched, agrees_with_the_slow_way, params

END = 4
"""The token that the tests stop at."""


async def play(watched: Watched, reference: Any, rng: random.Random, *, sessions: int, turns: int, vocab: int) -> int:
    """Play some ragged episodes side by side and compare every completion; returns how many there were."""
    prompts: dict[str, list[int]] = {f"{number:02d}": [1] for number in range(sessions)}
    seen = 0
    for turn in range(turns):
        for prompt in prompts.values():
            prompt += [rng.randrange(3, vocab) for _ in range(rng.choice([1, 2, 5, 11]))]
        requests: list[tuple[str | None, Sequence[int], SamplingParams]] = [
            (
                name,
                list(prompt),
                params(
                    hash_of(name, turn),
                    n=rng.choice([1, 2, 3, 6]),
                    temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
                    top_p=rng.choice([1.0, 1.0, 0.8]),
                    top_k=rng.choice([0, 0, 3]),
                    stop=rng.choice([(), (END,), (END, 5)]),
                ),
            )
            for name, prompt in prompts.items()
        ]
        for name, (_, asked, how), got in zip(list(prompts), requests, await watched.all_of(requests), strict=True):
            agrees_with_the_slow_way(reference, asked, how, got)
            prompts[name] += got.token_ids.tolist()
            seen += 1
        for name in [name for name in prompts if len(prompts) > 2 and rng.random() < 0.15]:
            watched.engine.forget(name)
            del prompts[name]
    return seen


def hash_of(name: str, turn: int) -> int:
    return int(name) * 1000 + turn


# --- The same as the slow way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [65536, 40])
def test_ragged_episodes_side_by_side_say_what_each_would_say_alone(tiny_folder: Path, batch_tokens: int) -> None:
    async def main() -> int:
        watched = Watched(tiny_folder, batch_tokens=batch_tokens)
        reference = open_model(tiny_folder)
        return await play(watched, reference, random.Random(0), sessions=7, turns=5, vocab=19)

    assert clock.run(main, virtual=True) >= 15


@pytest.mark.parametrize("kind", ["eager attention", "sliding windows in one layer", "soft caps"])
def test_the_same_holds_for_other_kinds_of_attention(kind: str, tmp_path: Path) -> None:
    write_attention(tmp_path, kind)

    async def main() -> int:
        attention = "eager" if kind == "eager attention" else None
        watched, reference = Watched(tmp_path, attention=attention), open_model(tmp_path)
        return await play(watched, reference, random.Random(6), sessions=4, turns=4, vocab=40)

    assert clock.run(main, virtual=True) >= 8


def write_attention(folder: Path, kind: str) -> None:
    """Write a small model whose windows, if it has them, are shorter than the episodes."""
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
    }
    model: Any
    if kind == "eager attention":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "sliding windows in one layer":
        config = Qwen2Config(**sizes, sliding_window=5, use_sliding_window=True, max_window_layers=1)
        model = Qwen2ForCausalLM(config)
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=5))
    shake(model, 13)
    model.save_pretrained(folder)


def test_a_prompt_that_does_not_continue_its_session_is_read_from_where_it_differs(tiny_folder: Path) -> None:
    async def main() -> list[tuple[int, int]]:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        await watched.all_of([("a", [1, 5, 6, 7], params(1, n=2))])
        prompt = [1, 5, 8, 7, 9, 10, 11]
        for _ in range(2):
            (got,) = await watched.all_of([("a", prompt, params(2, n=2))])
            agrees_with_the_slow_way(reference, prompt, params(2, n=2), got)
        return watched.fed[2:]

    # Two tokens are as before. Of the same prompt again, only the last token is read, for its logits.
    assert clock.run(main, virtual=True) == [(1, 5), (1, 1), (1, 1), (1, 1)]


def test_sessions_that_were_forgotten_leave_their_slots_to_others(tiny_folder: Path) -> None:
    async def main() -> int:
        watched, reference = Watched(tiny_folder), open_model(tiny_folder)
        for number in range(80):
            prompt = [1, 3 + number % 16, 3 + number % 7, 5]
            (got,) = await watched.all_of([(str(number), prompt, params(number, n=2))])
            if number > 64:  # in a slot that another session had
                agrees_with_the_slow_way(reference, prompt, params(number, n=2), got)
            watched.engine.forget(str(number))
        return len(watched.engine._cache)

    assert clock.run(main, virtual=True) == 64


# --- What forms a batch ----------------------------------------------------------------------------------------------


def test_requests_of_one_moment_form_one_batch_whatever_order_they_come_in(tiny_folder: Path) -> None:
    async def main(order: Sequence[int]) -> tuple[list[Completion], list[tuple[int, int]]]:
        watched = Watched(tiny_folder)
        requests = [(f"{number:02d}", [1, *range(3, 5 + number)], params(number, n=3)) for number in range(6)]
        got = await watched.all_of([requests[number] for number in order])
        return [got[order.index(number)] for number in range(6)], watched.fed

    straight, fed = clock.run(main, range(6), virtual=True)
    mixed, fed_mixed = clock.run(main, (4, 0, 5, 2, 1, 3), virtual=True)
    assert fed == fed_mixed == [(6, 8), (6, 1), (6, 1)]
    assert plain(straight) == plain(mixed)  # to the last digit


def test_requests_that_come_while_others_run_join_them_at_the_next_token(tiny_folder: Path) -> None:
    async def main() -> list[tuple[int, int]]:
        watched = Watched(tiny_folder)
        reference = open_model(tiny_folder)
        late: dict[str, Completion] = {}

        async with anyio.create_task_group() as tasks:

            async def ask(prompt: list[int]) -> None:
                late[str(prompt)] = await watched.engine.generate(prompt, params(3, n=3), session=str(prompt))

            def send_two_more() -> None:
                if len(watched.fed) == 1:
                    for prompt in ([4, 5, 6], [4, 8, 9]):
                        anyio.from_thread.run_sync(tasks.start_soon, ask, prompt)

            watched.before_pass = send_two_more
            early = await watched.engine.generate([1, 7], params(2, n=4), session="early")
        agrees_with_the_slow_way(reference, [1, 7], params(2, n=4), early)
        for prompt in ([4, 5, 6], [4, 8, 9]):
            agrees_with_the_slow_way(reference, prompt, params(3, n=3), late[str(prompt)])
        return watched.fed

    # The first one's prompt; its second token beside the prompts of the other two; then all three together.
    assert clock.run(main, virtual=True) == [(1, 2), (1, 1), (2, 3), (3, 1), (3, 1)]


def test_prompts_are_read_in_passes_that_fit(tiny_folder: Path) -> None:
    async def main() -> list[tuple[int, int]]:
        watched = Watched(tiny_folder, batch_tokens=12)
        prompts = [[1, 5], [1, 5, 6], [1, 5, 6, 7, 8], [2, 5], [1, 5, 6, 7, 8, 9, 10] * 2]
        await watched.all_of([(str(number), prompt, params(number, n=1)) for number, prompt in enumerate(prompts)])
        return watched.fed

    # Two rows of 3; a third row would make 3 * 5. Two of 5 make 10. The last one does not fit, and goes alone.
    assert clock.run(main, virtual=True) == [(2, 3), (2, 5), (1, 14)]
