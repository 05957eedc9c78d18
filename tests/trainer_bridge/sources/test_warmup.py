"""Warm-up: what is drawn for an update, and that imitation learns it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from envkit.trainer_bridge.warmup.warmup import Imitator, LessonBook, Stage
from envkit.wiring.training.warmup import warm_up
from safetensors.torch import load_model, save_model

from envkit import clock, config
from envkit.config import RunConfig
from envkit.errors import UsageError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.sources.demonstrations import Lesson, unscored_sample
from envkit.types import JSON, Observation, Sample, SamplingParams, Weights
from envkit.wiring.training import resolve
from tests.trainer_bridge.models import open_model
from tests.trainer_bridge.plain import plain
from tests.trainer_bridge.policies import LocalPolicy, load_policy, open_policy
from tests.trainer_bridge.trainees import completion_logps

GOOD, OTHER = ((50,), (51,)), ((50,), (51,), (52,), (53,))


def lesson(number: int, *, is_hazardous: bool) -> Lesson:
    """A lesson whose prompt names it and whether it is tricky."""
    kind = 1 if is_hazardous else 0
    return Lesson((kind, number, 7), (kind, number, 8), GOOD, OTHER, is_hazardous)


BOOK = [lesson(number, is_hazardous=number % 10 == 0) for number in range(40)]


def draw(share: float, *, lessons: Sequence[Lesson] = BOOK, size: int = 50, noise: float = 0.0) -> list[Sample]:
    batch = LessonBook(lessons, share, noise, seed=3).batches(size)
    return [one for update in range(20) for one in batch(update)]


# --- Lessons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_tricky_share_of_every_update_is_exact_however_rare_they_are(share: float) -> None:
    batch = LessonBook(BOOK, share, 0.0, seed=3).batches(50)
    for update in range(5):
        assert sum(one.token_ids[0] for one in batch(update)) == round(50 * share)
        assert len(batch(update)) == 50


@pytest.mark.parametrize("is_hazardous", [True, False])
def test_a_book_of_one_kind_gives_that_kind(is_hazardous: bool) -> None:
    book = [lesson(number, is_hazardous=is_hazardous) for number in range(5)]
    assert {tuple(one.token_ids[:2].tolist()) for one in draw(0.4, lessons=book)} == {
        (int(is_hazardous), number) for number in range(5)
    }


@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0])
def test_so_many_lessons_show_a_random_move(noise: float) -> None:
    samples = draw(0.5, noise=noise)
    good = sum((int(one.token_ids[-1]),) in GOOD for one in samples) / len(samples)
    # A random move is one of four, and two of them are good.
    assert good == (pytest.approx(1 - noise / 2, abs=0.05) if noise else 1.0)


def test_only_the_answer_carries_loss() -> None:
    one = draw(0.5)[0]
    assert one.token_ids[2] == 7
    assert one.mask.tolist() == [False, False, False, True]
    assert one.turn_ids.tolist() == [0, 0, 0, 0]


def test_strung_lessons_are_turns_of_one_sequence_each_with_its_own_answer() -> None:
    batch = LessonBook(BOOK, 0.5, 0.0, seed=3).batches(10, states=4)
    samples = batch(0)
    assert [len(one.token_ids) for one in samples] == [16, 16, 8]  # four, four and the two that are left
    for one in samples:
        turns = len(one.token_ids) // 4
        assert one.mask.tolist() == [False, False, False, True] * turns
        assert one.turn_ids.tolist() == [turn for turn in range(turns) for _ in range(4)]
        assert one.token_ids[2::4].tolist() == [7] + [8] * (turns - 1)
    assert sum(tricky for one in samples for tricky in one.token_ids[::4]) == 5


def test_strung_lessons_mix_the_tricky_with_the_others() -> None:
    batch = LessonBook(BOOK, 0.5, 0.0, seed=3).batches(40, states=4)
    tricky = [sum(one.token_ids[::4]) for one in batch(0)]
    assert sum(tricky) == 20
    assert set(tricky) & {1, 2, 3}


def test_an_update_draws_the_same_again_and_every_update_something_else() -> None:
    batch = LessonBook(BOOK, 0.5, 0.5, seed=3).batches(20)
    assert plain(batch(4)) == plain(LessonBook(BOOK, 0.5, 0.5, seed=3).batches(20)(4))
    assert plain(batch(4)) != plain(batch(5))
    assert plain(batch(4)) != plain(LessonBook(BOOK, 0.5, 0.5, seed=4).batches(20)(4))


# --- Imitation -------------------------------------------------------------------------------------------------------


def echo(update: int) -> list[Sample]:
    """A task that can be learned: say the last token of the prompt."""
    rng = random.Random(update)
    prompts = [[1, *(rng.randrange(3, 19) for _ in range(rng.randint(1, 3)))] for _ in range(32)]
    return [unscored_sample((*ids, ids[-1]), (0,) * len(ids) + (1,), (0,) * (len(ids) + 1)) for ids in prompts]


def imitate(folder: Path, stage: Stage, *, micro_tokens: int = 10**6, stop_at: int = 10**6) -> tuple[int, list[float]]:
    losses: list[float] = []
    numbers: list[int] = []
    imitator = Imitator(open_model(folder), max_grad_norm=1.0, micro_tokens=micro_tokens)

    async def after(update: int, loss: float) -> bool:
        numbers.append(update)
        losses.append(loss)
        return update == stop_at

    made = clock.run(lambda: imitator.run(stage, echo, after=after), virtual=True)
    assert numbers == list(range(1, made + 1))
    return made, losses


def test_thirty_updates_learn_to_say_the_last_token_again(tiny_folder: Path) -> None:
    made, losses = imitate(tiny_folder, Stage(updates=30, batch=32, learning_rate=0.05))
    assert made == 30
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < math.log(16)  # better than not knowing which of the sixteen


def test_the_loss_is_in_nats_a_token_whatever_the_size_of_the_passes(tiny_folder: Path) -> None:
    model = open_model(tiny_folder)
    logps = [logp for one in echo(0) for logp in completion_logps(model, one)]
    for micro_tokens in (1, 30, 10**6):
        _, losses = imitate(tiny_folder, Stage(2, 32, 1e-3), micro_tokens=micro_tokens)
        assert losses[0] == pytest.approx(-math.fsum(logps) / len(logps), abs=1e-5)


def test_imitation_ends_when_it_is_asked_to_stop(tiny_folder: Path) -> None:
    made, losses = imitate(tiny_folder, Stage(30, 32, 1e-3), stop_at=4)
    assert made == len(losses) == 4


def test_tokens_without_a_mask_are_not_learned(tiny_folder: Path) -> None:
    """Prompts that differ after the last answer give the same update."""
    ends: list[Any] = []
    for tail in ((5, 6), (9, 9)):
        model = open_model(tiny_folder)
        imitator = Imitator(model, max_grad_norm=1.0, micro_tokens=1000)
        longer = unscored_sample([1, 5, 6, 7, *tail], [0, 0, 0, 1, 0, 0], [0] * 6)

        async def never(update: int, loss: float) -> bool:
            return False

        clock.run(lambda imitator=imitator, longer=longer: run(imitator, longer, never), virtual=True)
        ends.append([weight.tolist() for name, weight in model.named_parameters() if "layers" in name])
    assert ends[0] == ends[1]


async def run(imitator: Imitator, one: Sample, after: Any) -> None:
    await imitator.run(Stage(2, 1, 1e-2), lambda update: [one], after=after)


@pytest.mark.parametrize("content", [b"", b"no such thing"])
def test_a_damaged_state_of_a_warm_up_is_refused(content: bytes, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "warmup.pt").write_bytes(content)
    imitator = Imitator(open_model(tiny_folder), max_grad_norm=1.0, micro_tokens=10)
    with pytest.raises(UsageError, match=r"warmup\.pt: damaged; start again with --force$"):
        imitator.restore(tmp_path)


# --- All stages ------------------------------------------------------------------------------------------------------

SMALL = {
    "seed": 5,
    "env": {"id": "FrozenLake-v0", "num_envs": 8, "options": {"size": 2, "frozen": 1.0}},
    "engine": {"hidden_size": 16, "layers": 1, "device": "cpu"},
    "threads": 1,
    "warmup": {
        "single_turn_states": 40,
        "batch": 16,
        "single_turn_updates": 3,
        "multi_turn_states": 2,
        "multi_turn_updates": 2,
        "episode_updates": 4,
        "check_episodes": 4,
        "greedy_goal": 0.0,
    },
}


async def nothing() -> None:
    """Save nothing."""


def test_a_pretrained_policy_is_moved_by_adamw_alone(chat_folder: Path) -> None:
    """The first step of AdamW moves every weight that has a gradient by the learning rate."""
    model = open_model(chat_folder)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    imitator = Imitator(model, max_grad_norm=1.0, micro_tokens=10**6, is_pretrained=True)

    async def never(update: int, loss: float) -> bool:
        return False

    clock.run(lambda: imitator.run(Stage(1, 1, 1e-3), echo, after=never), virtual=True)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        moved = (weight - before[name]).abs()[weight.grad.abs() > 1e-4]
        assert len(moved)
        assert moved.detach().numpy() == pytest.approx(1e-3, rel=0.01)


def warmed(**changes: Any) -> dict[str, JSON]:
    section = {**SMALL["warmup"], **changes}  # type: ignore[dict-item]
    run = resolve.resolve(config.parse({**SMALL, "warmup": section}))

    async def main() -> dict[str, JSON]:
        policy = open_policy(run)
        specs = resolve.specs_of(run)
        imitator = Imitator(policy.model, max_grad_norm=1.0, micro_tokens=10**6)
        return await warm_up(run, specs, policy, imitator, SilentDisplay(), save=nothing)

    return clock.run(main)


def test_a_warm_up_ends_at_the_first_look_that_is_good_enough() -> None:
    facts = warmed()
    assert (facts["single_turn_updates"], facts["episode_updates"]) == (5, 2)


def test_a_warm_up_that_never_gets_good_enough_ends_at_its_bound() -> None:
    facts = warmed(greedy_goal=1.0)
    assert (facts["single_turn_updates"], facts["episode_updates"]) == (5, 4)
    success, greedy = facts["demonstrator_success"], facts["greedy_validation"]
    assert isinstance(success, float)
    assert success in [number / 16 for number in range(17)]
    assert greedy in (0.0, 0.25, 0.5, 0.75)


class Cutting(SilentDisplay):
    """Cancels a scope at an advance."""

    def __init__(self, at: int, scope: anyio.CancelScope) -> None:
        self._at = at
        self._scope = scope
        self._count = 0

    def advance(self, count: int = 1, **shown: float | str) -> None:
        self._count += 1
        if self._count == self._at:
            self._scope.cancel()


def cuttable() -> RunConfig:
    return resolve.resolve(config.parse({**SMALL, "warmup": {**SMALL["warmup"], "greedy_goal": 1.0}}))  # type: ignore[dict-item]


async def warmed_part(folder: Path, cut_at: int, *, resume: bool = False) -> tuple[dict[str, JSON] | None, list[Any]]:
    """Warm up until an advance, or to the end if it is 0; return the facts, if it ended, and the weights."""
    run = cuttable()
    policy = open_policy(run)
    imitator = Imitator(policy.model, max_grad_norm=1.0, micro_tokens=10**6)
    if resume:
        load_model(policy.model, folder / "model.safetensors")
        imitator.restore(folder)

    async def save() -> None:
        save_model(policy.model, str(folder / "model.safetensors"))
        await imitator.save(str(folder))

    facts = None
    with anyio.CancelScope() as scope:
        display = Cutting(cut_at, scope)
        facts = await warm_up(run, resolve.specs_of(run), policy, imitator, display, save=save)
    return facts, [weight.tolist() for weight in policy.model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, JSON], list[Any]]:
    """The facts and the weights of a warm-up that was not cut."""
    facts, weights = clock.run(warmed_part, tmp_path_factory.mktemp("whole"), 0)
    assert facts is not None
    return facts, weights


# 40 lessons are prepared, then come 5 updates, 16 episodes in one part, and 4 updates with looks after 2 and 4.
@pytest.mark.parametrize("cut_at", [3, 41, 43, 46, 49])
def test_a_warm_up_that_is_cut_anywhere_saves_and_goes_on_as_if_it_had_not_been(
    cut_at: int, whole: tuple[dict[str, JSON], list[Any]], tmp_path: Path
) -> None:
    facts, weights = whole
    first, _ = clock.run(warmed_part, tmp_path, cut_at)
    assert first is None
    second, again = clock.run(partial(warmed_part, tmp_path, 0, resume=True))
    assert second is not None
    assert {**second, "wall_s": 0} == {**facts, "wall_s": 0}
    assert again == weights


# --- Pretrained policies ---------------------------------------------------------------------------------------------


def pretrained(folder: Path, display: SilentDisplay, **section: Any) -> tuple[LocalPolicy, dict[str, JSON]]:
    """Warm up the chat model of `folder`, which sees one state a prompt, on lakes of four cells."""
    content = {
        "seed": 5,
        "env": {
            "id": "FrozenLake-v0",
            "num_envs": 8,
            "options": {"size": 2, "frozen": 1.0, "spaced": True, "instructions": False},
        },
        "engine": {"model": str(folder), "device": "cpu"},
        "rollout": {"turn_tokens": 8, "max_turns": 6, "max_tokens": 120},
        "threads": 1,
        "warmup": {"check_episodes": 8, **section},
    }
    run = resolve.resolve(config.parse(content))

    async def main() -> tuple[LocalPolicy, dict[str, JSON]]:
        policy = load_policy(str(folder), device="cpu", threads=1)
        policy.renderer = ChatRenderer(policy.tokenizer, history=1)
        imitator = Imitator(policy.model, max_grad_norm=1.0, micro_tokens=4096, threads=1, is_pretrained=True)
        specs = resolve.specs_of(run)
        return policy, await warm_up(run, specs, policy, imitator, display, save=nothing)

    return clock.run(main)


def greedy(policy: LocalPolicy, text: str) -> str:
    """What the policy says to a text."""
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=policy.renderer.stop)
    prompt = policy.renderer.open(Observation(text))
    return policy.renderer.text(clock.run(lambda: policy.engine.generate(prompt, params)).token_ids.tolist())


def test_dialogues_of_a_file_are_learned(chat_folder: Path, tmp_path: Path) -> None:
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
    lines = [
        {"messages": [{"role": "user", "content": country}, {"role": "assistant", "content": capital}]}
        for country, capital in capitals.items()
    ]
    too_long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "." * 200}]}
    path = tmp_path / "capitals.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, too_long])))
    display = Noting()
    policy, facts = pretrained(
        chat_folder,
        display,
        kind="dialogues",
        file=str(path),
        batch=2,
        dialogue_epochs=30,
        learning_rate=1e-2,
        check_episodes=None,
    )
    assert {**facts, "wall_s": 0} == {
        "dialogues": 3,
        "dialogues_skipped": 1,
        "dialogue_updates": 60,
        "greedy_validation": None,
        "wall_s": 0,
    }
    assert display.lines == ["skipped 1 of 4 dialogues, which are longer than rollout.max_tokens (120)"]
    clock.run(lambda: policy.engine.load(Weights(1, "")))
    assert {country: greedy(policy, country) for country in capitals} == {
        country: f"{capital}<|im_end|>" for country, capital in capitals.items()
    }


class Noting(SilentDisplay):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def announce(self, line: str) -> None:
        self.lines.append(line)
