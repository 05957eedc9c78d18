"""Which replica completes a prompt."""

from __future__ import annotations

from envkit.trainer_bridge.engines.vllm.routing import Routing

LONG = list(range(200))
OTHER = list(range(1000, 1200))


def test_the_least_busy_replica_is_chosen_and_the_first_of_equals() -> None:
    routing = Routing()
    assert routing.choose(LONG, None, {0: 3, 1: 1, 2: 1}) == 1
    assert routing.choose([1, 2], None, {0: 0, 1: 0}) == 0


def test_a_session_keeps_its_replica_however_busy_it_is() -> None:
    routing = Routing()
    assert routing.choose(LONG, "a", {0: 1, 1: 0}) == 1
    assert routing.choose(OTHER, "a", {0: 0, 1: 50}) == 1
    assert routing.choose(OTHER, "b", {0: 0, 1: 50}) == 0


def test_a_session_moves_when_its_replica_cannot_take_it_and_keeps_the_new_one() -> None:
    routing = Routing()
    assert routing.choose(LONG, "a", {0: 1, 1: 0}) == 1
    assert routing.choose(LONG, "a", {0: 9}) == 0
    assert routing.choose(LONG, "a", {0: 9, 1: 0}) == 0


def test_a_forgotten_session_has_no_replica() -> None:
    routing = Routing()
    assert routing.choose([1], "a", {0: 1, 1: 0}) == 1
    routing.forget("a")
    assert routing.choose([1], "a", {0: 0, 1: 1}) == 0


def test_the_replica_that_knows_the_longest_beginning_is_chosen() -> None:
    routing = Routing()
    routing.choose(LONG[:64], None, {0: 0})
    routing.choose(LONG[:128], None, {1: 0})
    assert routing.choose(LONG, None, {0: 0, 1: 3, 2: 0}) == 1
    assert routing.choose([*LONG[:64], *OTHER], None, {0: 1, 1: 1, 2: 0}) == 0


def test_a_beginning_counts_only_if_the_replica_is_not_much_busier() -> None:
    routing = Routing()
    routing.choose(LONG, None, {1: 0})
    assert routing.choose(LONG, None, {0: 0, 1: 4}) == 1
    routing = Routing()
    routing.choose(LONG, None, {1: 0})
    assert routing.choose(LONG, None, {0: 0, 1: 5}) == 0


def test_a_replica_whose_cache_was_cleared_knows_nothing() -> None:
    routing = Routing()
    routing.choose(LONG, None, {1: 0})
    routing.clear(1)
    assert routing.choose(LONG, None, {0: 0, 1: 0}) == 0


def test_a_beginning_is_only_known_if_all_tokens_before_it_are_the_same() -> None:
    routing = Routing()
    routing.choose([0, *LONG[1:]], None, {1: 0})
    assert routing.choose([9, *LONG[1:]], None, {0: 0, 1: 0}) == 0
