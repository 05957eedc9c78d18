"""What saves a language model time at play changes no completion: shared prompts, rows that leave, copied weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from envkit import clock
from envkit.trainer_bridge.engines import transformers as engines
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.weights.files import INDEX, load_weights
from envkit.types import SamplingParams, Weights
from tests.trainer_bridge.models import open_model, shake
from tests.trainer_bridge.watched import Watched, agrees_with_the_slow_way, params

END = 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_groups_with_long_tails_say_what_each_row_would_say_alone_over_several_turns(
    seed: int, tiny_folder: Path
) -> None:
    rng = random.Random(seed)

    async def main() -> int:
        watched, reference = Watched(tiny_folder, is_large=True), open_model(tiny_folder)
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
                prompts[name] += [*got.token_ids, *(rng.randrange(3, 19) for _ in range(rng.randint(1, 3)))]
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
        watched, reference = Watched(tiny_folder, is_large=True), open_model(tiny_folder)
        system = [1, *(3 + number % 16 for number in range(11))]
        asked = [[*system, 4, 5], [*system, 6], [*system, 4, 5], system]
        requests = [(str(number), prompt, params(number, n=3)) for number, prompt in enumerate(asked)]
        for (_, prompt, how), got in zip(requests, await watched.all_of(requests), strict=True):
            agrees_with_the_slow_way(reference, prompt, how, got)
        return watched.fed[:2]

    # One prompt is the beginning itself, and its last token has to be fed for its first answer.
    assert clock.run(main, virtual=True) == [(1, 11), (3, 3)]


def test_rows_are_sampled_in_parts_as_they_are_at_once() -> None:
    vocabulary = engines._SAMPLED_NUMBERS // 2  # two rows a part
    logits_BV = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1))
    requests = [
        engines._GenerationRequest(
            [1], SamplingParams(seed=row, temperature=0.7 * (row % 3), top_p=0.9 if row == 3 else 1.0), ""
        )
        for row in range(5)
    ]
    apart = [engines._sample(logits_BV[row : row + 1], requests[row : row + 1], 3)[0] for row in range(5)]
    assert engines._sample(logits_BV, requests, 3) == apart


def test_weights_without_a_location_are_copied_from_the_trainer_s_model(tiny_folder: Path) -> None:
    learning, playing = open_model(tiny_folder), open_model(tiny_folder).bfloat16()
    engine = TransformersEngine(playing, pad_id=0, source=learning)
    shake(learning, 21)

    async def main() -> None:
        await engine.load(Weights(3, ""))
        got = await engine.generate([1, 5, 6], params(1, n=2))
        assert got.versions == ((3, 2),)

    clock.run(main, virtual=True)
    for learned, played in zip(learning.parameters(), playing.parameters(), strict=True):
        assert torch.equal(learned.bfloat16(), played)


def test_weights_without_a_location_need_a_model_to_copy_from(tiny_folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="the weights have no location, and the engine has no source"):
            await TransformersEngine(open_model(tiny_folder), pad_id=0).load(Weights(1, ""))

    clock.run(main, virtual=True)


@pytest.mark.parametrize("damage", ["missing", "shape", "unknown"])
def test_a_load_that_fails_leaves_every_weight_as_it_was(damage: str, tiny_folder: Path, tmp_path: Path) -> None:
    model = open_model(tiny_folder)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    tensors = {name: weight + 1.0 for name, weight in load_file(tiny_folder / "model.safetensors").items()}
    last = sorted(tensors)[-1]
    if damage == "unknown":
        tensors["something.else"] = torch.zeros(2)
    elif damage == "shape":
        tensors[last] = torch.zeros(*tensors[last].shape, 2)
    else:
        del tensors[last]
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(RuntimeError, match=r"something\.else is unknown" if damage == "unknown" else last):
        load_weights(model, tmp_path / "weights.safetensors")
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_a_model_folder_of_several_files_is_read(tiny_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_folder / "model.safetensors")
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    model = open_model(tiny_folder)
    shake(model, 5)
    load_weights(model, tmp_path)
    for name, weight in open_model(tiny_folder).named_parameters():
        assert torch.equal(weight, model.get_parameter(name))
