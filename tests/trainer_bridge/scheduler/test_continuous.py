"""The training plan on virtual time: lag, admission, groups, filters, mixtures, accounts, and resuming."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import orjson
import pytest

from envkit import clock
from envkit.errors import EnvkitError
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.run_folder import checkpoint
from envkit.trainer_bridge.scheduler.continuous import Continuous
from envkit.trainer_bridge.scheduler.cursor import Cursor, Place, read_schedule, shares
from envkit.trainer_bridge.scheduler.filters import SuccessBand, TopVariance, ZeroVariance
from envkit.trainer_bridge.scheduler.pace import Batch, LagPolicy, Pace
from envkit.types import Completion, FinishReason, Group, SamplingParams, Task, floats, ints, stable_hash
from tests.trainer_bridge.fakes import LetterRenderer, ScriptedEngine
from tests.trainer_bridge.scheduler.schedules import problems, random_pace, random_run
from tests.trainer_bridge.scheduler.simulated import Latency, Simulation, SlowHost, heavy_tailed, seconds_of

HEAVY = Pace(steps=40, groups_per_step=16, group_size=8)
"""The heavy-tailed setting; `steps` is beyond the end of the tests, so that nothing is drained."""


def heavy(folder: Path, pace: Pace = HEAVY, latency: Latency = heavy_tailed, steps: int = 6) -> Simulation:
    """Train steps on a host with as many places as a batch has episodes."""
    return Simulation(folder, SlowHost(latency, seed=0, capacity=16 * 8), pace, steps=steps).run()


# --- Speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "max_lag", "policy", "seconds", "masked"),
    [
        (0, 0, "wait", 270.0, 0.0),
        (1, 1, "wait", 160.0, 0.0),
        (2, 4, "wait", 70.0, 0.0),
        (4, 8, "resume", 40.0, 0.05),
    ],
)
def test_a_train_step_takes_as_long_as_its_lag_allows(
    ahead: int, max_lag: int, policy: str, seconds: float, masked: float, tmp_path: Path
) -> None:
    pace = replace(HEAVY, ahead=ahead, max_lag=max_lag, lag_policy=LagPolicy(policy))
    run = heavy(tmp_path, pace)
    assert run.seconds / 6 <= seconds
    assert run.total("tokens_masked_lag") <= masked * 6 * 16 * 8 * 100
    assert max(row.get("lag_max", 0.0) for row in run.rows) <= max_lag


def test_the_duration_of_a_group_counts_from_its_opening_until_its_last_member_has_ended(tmp_path: Path) -> None:
    seconds = [3.0, 9.0, 1.0, 2.0]
    host = SlowHost(lambda rng: seconds.pop(0), seed=0, capacity=2)
    run = Simulation(tmp_path, host, Pace(steps=1, groups_per_step=2, group_size=2)).run()
    # The second group begins after 3 s, in the place of the first episode that ends. Its episodes take 1 and 2 s.
    assert run.scheduler.batches[0].group_s == (9.0, 6.0)


def test_extra_members_shorten_a_step_and_their_bias_is_visible(tmp_path: Path) -> None:
    plain = heavy(tmp_path / "plain", steps=3)
    extra = heavy(tmp_path / "extra", replace(HEAVY, group_extra=2), steps=3)
    assert extra.seconds < 0.5 * plain.seconds
    assert extra.total("episodes_aborted") == pytest.approx(3 * 16 * 2, abs=32)
    assert extra.total("episodes_trained") == 3 * 16 * 8


def test_a_straggler_is_replaced_and_the_first_to_end_counts(tmp_path: Path) -> None:
    def one_in_fifty(rng: random.Random) -> float:
        return 300.0 if rng.random() < 0.02 else 10.0

    plain = heavy(tmp_path / "plain", latency=one_in_fifty, steps=3)
    replaced = heavy(tmp_path / "replaced", replace(HEAVY, straggler=3.0), one_in_fifty, steps=3)
    assert replaced.seconds < 0.4 * plain.seconds
    assert replaced.total("episodes_trained") == 3 * 16 * 8
    assert 2 < replaced.total("episodes_aborted") < 25


# --- Any schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_keeps_its_promises(part: int, tmp_path: Path) -> None:
    for seed in range(part, 48, 4):
        assert problems(random_run(seed, tmp_path / str(seed))) == [], seed


@pytest.mark.parametrize(("seed", "ahead", "max_lag"), [(0, 0, 0), (1, 1, 1), (2, 2, 4)])
def test_every_length_that_was_asked_for_is_trained_on(seed: int, ahead: int, max_lag: int, tmp_path: Path) -> None:
    asked: list[float] = []

    def noted(rng: random.Random) -> float:
        asked.append(heavy_tailed(rng))
        return asked[-1]

    pace = Pace(steps=6, groups_per_step=4, group_size=4, ahead=ahead, max_lag=max_lag)
    run = Simulation(tmp_path, SlowHost(noted, seed=seed, capacity=40), pace).run()
    trained = [seconds_of(one) for batch in run.scheduler.batches for one in batch.trajectories]
    assert Counter(trained) == Counter(asked)


def test_no_episode_begins_before_the_engine_has_the_weights_of_the_run(tmp_path: Path) -> None:
    pace = Pace(steps=2, groups_per_step=2, group_size=2, ahead=1, max_lag=1)
    run = Simulation(tmp_path, SlowHost(heavy_tailed, seed=0), pace, publish_s=5.0).run()
    assert run.engine.calls[0].at_s == 5.0


# --- Killed and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_at_any_moment_trains_on_every_group_once(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    pace, how = random_pace(rng)
    pace, how = replace(pace, steps=8, filters=()), {**how, "step_timeout_s": math.inf}
    surviving: dict[int, list[int]] = {}
    for cut_s in [*(rng.uniform(1, 400) for _ in range(4)), math.inf]:
        host = SlowHost(heavy_tailed, seed=rng.randrange(1000), turns=3, capacity=20)
        run = Simulation(tmp_path, host, pace, cut_s=cut_s, **how).run()
        for batch in run.scheduler.batches:
            surviving[batch.version] = [group.trajectories[0].index for group in batch.groups]
    trained = sorted(number for numbers in surviving.values() for number in numbers)
    assert trained == list(range(8 * pace.groups_per_step))


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_that_is_replayed_has_the_same_groups_and_members(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    pace, how = random_pace(rng)
    pace, how = replace(pace, steps=5), {**how, "step_timeout_s": math.inf}
    first = Simulation(tmp_path / "first", SlowHost(heavy_tailed, seed=seed, turns=3, capacity=20), pace, **how).run()
    schedule = read_schedule([{"step": step, **row} for step, row in first.notes.schedules.items()])
    host = SlowHost(heavy_tailed, seed=seed + 100, turns=3, capacity=20)  # other latencies, so that other races are won
    again = Simulation(tmp_path / "again", host, pace, replay=schedule, **how).run()
    assert again.notes.schedules == first.notes.schedules
    assert again.total("episodes_aborted") == 0
    assert read_schedule([{"step": 1, "groups": [[0, 0, 0, []], [1, 0, 1, [0]]]}]) == {1: {Place(1, 0, 1): (0,)}}


def test_a_resumed_run_knows_what_its_filters_had_learned(tmp_path: Path) -> None:
    def part(steps: int) -> Simulation:
        top = TopVariance(0.5)
        pace = Pace(steps=6, groups_per_step=8, group_size=2, ahead=1, max_lag=2, filters=[SuccessBand(0, 1), top])
        return Simulation(tmp_path, SlowHost(heavy_tailed, seed=0), pace, steps=steps)

    cut = part(4).run()
    state = checkpoint.load_state(checkpoint.latest(tmp_path)).schedule
    kept, filters = cut.scheduler.state()["kept"], cut.scheduler.state()["filters"]
    assert len(state["filters"][1]) >= 4 * 8  # type: ignore[index, arg-type]
    assert False in state["kept"]  # type: ignore[operator]
    resumed = part(6).scheduler
    assert [resumed.state()[name] for name in ("kept", "filters")] == [state["kept"], state["filters"]]
    assert (kept, filters) == (state["kept"], state["filters"])
    older = {name: value for name, value in state.items() if name not in ("kept", "filters")}
    (path := checkpoint.latest(tmp_path) / "state.json").write_bytes(
        orjson.dumps({**orjson.loads(path.read_bytes()), "schedule": older})
    )
    assert list(part(6).run().notes.steps) == [5, 6]


# --- Filters, mixtures -----------------------------------------------------------------------------------------------


def test_rejected_groups_are_replaced_until_a_batch_is_full(tmp_path: Path) -> None:
    pace = Pace(steps=4, groups_per_step=8, group_size=2, filters=[ZeroVariance()])
    run = Simulation(tmp_path, SlowHost(heavy_tailed, seed=0), pace).run()
    assert all(len(batch.groups) == 8 for batch in run.scheduler.batches)
    assert run.total("groups_filtered") > 8
    for batch in run.scheduler.batches:
        for group in batch.groups:
            assert len({one.outcome.reward for one in group.trajectories}) == 2


def test_at_the_cap_a_batch_is_smaller_and_without_any_group_the_run_ends(tmp_path: Path) -> None:
    pace = Pace(steps=2, groups_per_step=4, group_size=2, filters=[SuccessBand(0.4, 0.6)], max_filtered=0.5)
    run = Simulation(tmp_path / "some", SlowHost(heavy_tailed, seed=3), pace).run()
    assert min(len(batch.groups) for batch in run.scheduler.batches) < 4
    never = replace(pace, filters=[SuccessBand(0.4, 0.45)])
    with pytest.raises(EnvkitError, match=r"the filters \(success_band\) rejected all \d groups since the last train"):
        Simulation(tmp_path / "none", SlowHost(heavy_tailed, seed=3), never).run()


def test_every_environment_has_its_share_of_every_batch(tmp_path: Path) -> None:
    pace = Pace(steps=10, groups_per_step=10, group_size=2, ahead=1, max_lag=4)
    run = Simulation(tmp_path, SlowHost(heavy_tailed, seed=0), pace, weights=(0.4, 0.3, 0.3)).run()
    for batch in run.scheduler.batches:
        assert Counter(group.task.env_id for group in batch.groups) == {"Slow0-v0": 4, "Slow1-v0": 3, "Slow2-v0": 3}


def test_metrics_of_an_environment_are_those_of_all_its_complete_groups(tmp_path: Path) -> None:
    # Extra members often end after their batch was taken, and rejected groups count as played.
    pace = Pace(steps=6, groups_per_step=6, group_size=2, group_extra=2, filters=[ZeroVariance()])
    run = Simulation(tmp_path, SlowHost(heavy_tailed, seed=0), pace, weights=(0.5, 0.5)).run()
    for batch, row in zip(run.scheduler.batches, run.rows, strict=True):
        played = [*batch.groups, *batch.filtered]
        for name in ("Slow0-v0", "Slow1-v0"):
            count = sum(len(group.trajectories) for group in played if group.task.env_id == name)
            assert row[f"episodes/{name}"] == count
        assert row["episodes"] == sum(row[f"episodes/Slow{env}-v0"] for env in (0, 1))


def test_the_shares_of_a_run_are_rounded_by_largest_remainder() -> None:
    assert shares([0.4, 0.3, 0.3], 100) == [40, 30, 30]
    assert shares([1.0, 1.0, 1.0], 10) == [4, 3, 3]
    for weights in ([5.0, 1.0], [0.5, 0.3, 0.2], [1.0] * 7):
        cursor = Cursor(weights, 97)
        assert list(cursor.planned(97)) == shares(weights, 97)
        for number in range(98):
            exact = [number * share / 97 for share in shares(weights, 97)]
            assert all(abs(one - two) < 1 for one, two in zip(cursor.planned(number), exact, strict=True))


# --- Aborts and errors -----------------------------------------------------------------------------------------------


class SlowEngine(ScriptedEngine):
    """Samples a token a second; a completion that is aborted returns those so far."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats = False
        self.aborts: dict[str | None, anyio.Event] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        began, length = clock.now(), params.seed % 50 + 2
        abort = self.aborts[session] = anyio.Event()
        with anyio.move_on_after(length):
            await abort.wait()
        finish = FinishReason.ABORTED if abort.is_set() else FinishReason.STOP
        count = min(length, int(clock.now() - began))
        return Completion(ints([1] * count), floats([-0.5] * count), finish, ((self.version, count),))

    async def abort(self, session: str) -> None:
        self.aborts[session].set()


def plan_of(engine: ScriptedEngine, pace: Pace, task: Callable[[int, int], Task]) -> Continuous:
    limits = RolloutLimits(max_turns=1, max_tokens=1000, turn_tokens=100)
    host = SlowHost(lambda rng: 0.0, seed=0)
    return Continuous(host, PolicyPlayer(engine, LetterRenderer(), limits), limits, 256, pace, task)


def test_the_tokens_of_a_completion_that_is_aborted_are_counted() -> None:
    pace = Pace(steps=1, groups_per_step=4, group_size=4, group_extra=2)
    plan = plan_of(SlowEngine(), pace, lambda env, number: Task("A-v0", number))

    async def main() -> Batch:
        async with clock.background_tasks() as tasks:
            tasks.start_soon(plan.run)
            batch = await plan.batch()
            await anyio.sleep(10)  # until the aborted ones have ended
            return batch

    batch = clock.run(main, virtual=True)
    counts = plan.ledger.counts()
    assert counts["aborted"] == 4 * 2
    assert counts["tokens_aborted"] > 4 * 2
    assert counts["tokens_finished"] == sum(len(one.turns[0].completion.token_ids) for one in batch.trajectories)
    assert plan.problems == []


def test_a_group_whose_task_cannot_be_made_is_played_by_the_resumed_run() -> None:
    def task(env: int, number: int) -> Task:
        if number == 1:
            raise OSError("no such file")
        return Task("A-v0", number)

    plan = plan_of(ScriptedEngine(), Pace(steps=1, groups_per_step=3, group_size=2, ahead=1, max_lag=1), task)
    assert plan.next_group() is not None
    with pytest.raises(OSError, match="no such file"):
        plan.next_group()
    again = plan.state()["again"]
    assert [place[0] for place in again] == [1]  # type: ignore[union-attr, index]


def test_with_filters_the_trainer_does_not_wait_for_groups_that_will_be_rejected(tmp_path: Path) -> None:
    pace = Pace(steps=40, groups_per_step=8, group_size=4, ahead=1, max_lag=4, filters=[TenPercent()], max_filtered=50)
    run = Simulation(tmp_path, SlowHost(heavy_tailed, seed=0, capacity=128), pace, steps=6).run()
    assert run.seconds / 6 < 82.0  # 89 s if all groups in progress count as kept


class TenPercent:
    """Keeps one group of ten."""

    name = "ten_percent"

    def keeps(self, group: Group) -> bool:
        return stable_hash(group.task.seed) % 10 == 0
