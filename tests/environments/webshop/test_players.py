"""The players of the shop: the rules to compare with, and the expert."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from envkit import clock
from envkit.environments.webshop import WebShop
from envkit.environments.webshop.catalogue.generate import generate
from envkit.environments.webshop.catalogue.store import write_catalogue
from envkit.environments.webshop.players import FirstHit, RulePlayer, WebShopExpert
from envkit.errors import UsageError
from envkit.protocols import Expert, TaskExpert
from envkit.types import JSON, Info, Observation, Reset, RolloutRequest, Task

VIEWS = ("text", "text_rich", "compact")
SEEDS = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A catalogue of 500 generated products."""
    folder = tmp_path_factory.mktemp("shop")
    write_catalogue(folder, generate(500, 0), source="generated", announce=lambda line: None)
    return {"webshop": folder}


def expert_of(data: dict[str, Path], seed: int, view: str, **options: str) -> Expert:
    expert = WebShopExpert(data=data, observation=view)
    assert isinstance(expert, TaskExpert)
    return expert.for_task(Task("WebShop-v0", seed, options))


def begin(shop: WebShop, seed: int, **options: str) -> Observation:
    text, info = shop.reset(seed=seed, options=dict(options))
    return seen(text, info)


def seen(text: str, info: Info) -> Observation:
    moves = info["legal_moves"]
    assert isinstance(moves, list)
    return Observation(text, tuple(map(str, moves)))


def play(shop: WebShop, seed: int, act: Callable[[Observation], str], **options: str) -> float:
    """Play an episode whose actions must all be valid, and return its score; -1 if nothing was bought."""
    observation, is_over, info = begin(shop, seed, **options), False, dict[str, JSON]()
    while not is_over:
        text, _, bought, is_late, info = shop.step(act(observation))
        assert info["action_is_valid"]
        observation, is_over = seen(text, info), bought or is_late
    return float(str(info["score"])) if info["bought"] else -1.0


def best(expert: Expert) -> Callable[[Observation], str]:
    return lambda observation: expert.answer(expert.moves(observation)[0])


@pytest.mark.parametrize(("view", "goals"), [*((view, "synthetic") for view in VIEWS), ("text_rich", "human")])
def test_the_expert_buys_what_the_goal_asks_for(data: dict[str, Path], view: str, goals: str) -> None:
    shop = WebShop(data=data, observation=view)
    scores = [play(shop, seed, best(expert_of(data, seed, view, goals=goals)), goals=goals) for seed in range(SEEDS)]
    assert sum(scores) / SEEDS > 0.95  # its searches do not find every product
    assert scores.count(1.0) > 0.85 * SEEDS


def test_the_expert_goes_on_after_moves_of_others(data: dict[str, Path]) -> None:
    shop = WebShop(data=data, max_turns=100)
    rng = random.Random(0)
    scores = []
    for seed in range(SEEDS):
        expert = expert_of(data, seed, "text_rich")

        def act(observation: Observation, expert: Expert = expert) -> str:
            good = expert.moves(observation)
            # A random purchase would end the episode.
            others = [move for move in observation.legal_moves if move != "click[buy now]"]
            return rng.choice(others) if rng.random() < 0.5 else expert.answer(good[0])

        scores.append(play(shop, seed, act))
    assert sum(scores) / SEEDS > 0.95


def test_without_a_task_the_expert_knows_no_moves(data: dict[str, Path]) -> None:
    assert not WebShopExpert(data=data).moves(begin(WebShop(data=data), 0))


def request(seed: int) -> RolloutRequest:
    return RolloutRequest("eval/0/0", Task("WebShop-v0", seed), 0)


def scores_of(player: FirstHit, data: dict[str, Path], view: str) -> list[float]:
    shop = WebShop(data=data, observation=view)

    def score(seed: int) -> float:
        playing = player.begin(request(seed), Reset(begin(shop, seed), {}))
        return play(shop, seed, lambda observation: str(clock.run(partial(playing.act, observation))))

    return [score(seed) for seed in range(SEEDS)]


def test_the_rule_beats_the_first_hit_and_both_score_the_same_on_all_pages(data: dict[str, Path]) -> None:
    first = [scores_of(FirstHit(data=data, observation=view), data, view) for view in VIEWS]
    rule = [scores_of(RulePlayer(data=data, observation=view), data, view) for view in VIEWS]
    assert first[0] == first[1] == first[2]
    assert rule[0] == rule[1] == rule[2]
    assert all(ours >= theirs for ours, theirs in zip(rule[0], first[0], strict=True))
    assert sum(rule[0]) > sum(first[0]) + 1


def test_players_refuse_a_shop_with_another_catalogue(data: dict[str, Path], tmp_path: Path) -> None:
    write_catalogue(tmp_path, generate(600, 1), source="another", announce=lambda line: None)
    shop = WebShop(data={"webshop": tmp_path})
    observation = begin(shop, 3)
    with pytest.raises(UsageError, match="has another catalogue or version than this machine"):
        expert_of(data, 3, "text_rich").moves(observation)
    with pytest.raises(UsageError, match="has another catalogue or version than this machine"):
        FirstHit(data=data).begin(request(3), Reset(observation, {}))
