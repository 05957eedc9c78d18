"""The probe of a push, and what the monitor remembers from one event to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.trainer_bridge.diagnostics import Diagnostics, Finding, Probe, PushProbe, TrainStep
from envkit.trainer_bridge.weights.channel import Push
from envkit.types import Completion, Floats, Sample, Weights, floats
from tests.trainer_bridge.fakes import Call, ScriptedEngine, ScriptedTrainer

PUSH = Push(Weights(3, "", 17), is_changed=True, exposed_s=0.0)


def watching(**settings: Any) -> Diagnostics:
    return Diagnostics(**settings)


def probe(version: int, engine: float, trainer: float, *, is_changed: bool = True) -> PushProbe:
    return PushProbe(version, is_changed, (5,), (engine,), (trainer,))


def names(found: Sequence[Finding]) -> list[str]:
    return [one.name for one in found]


# --- The monitor -----------------------------------------------------------------------------------------------------


def test_updates_that_are_visible_only_together_show_that_none_was_applied() -> None:
    run = watching()
    # The trainer moves by 4e-6 nats in each update; a change of 1e-5 must be visible in float32.
    trail = [names(run.pushed(probe(version, -1.0, -1.0 - 4e-6 * version))) for version in range(5)]
    assert trail == [[], [], [], ["weights_not_applied"], ["weights_not_applied"]]


def test_pushes_that_change_nothing_in_the_engines_format_prove_nothing_even_together() -> None:
    run = watching()
    assert not any(run.pushed(probe(version, -1.0, -1.0 - 1e-4 * version, is_changed=False)) for version in range(20))


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 0.003), ("bfloat16", 0.3)])
def test_the_tolerance_follows_the_number_format(dtype: str, gap: float) -> None:
    assert watching(dtype=dtype).pushed(probe(1, -1.0, -1.0 - 0.9 * gap)) == []
    assert names(watching(dtype=dtype).pushed(probe(1, -1.0, -1.0 - 1.1 * gap))) == ["engine_disagrees"]


def test_a_finding_is_returned_once_unless_it_stops_the_run() -> None:
    reporting, stopping = watching(), watching(stop_on=frozenset({"engine_disagrees"}))
    for run, trail in ((reporting, [["engine_disagrees"], []]), (stopping, [["engine_disagrees"]] * 2)):
        assert [names(run.pushed(probe(step, -1.0, -2.0))) for step in (3, 4)] == trail
        (entry,) = run.summary()
        assert isinstance(entry, dict)
        assert (entry["name"], entry["first_step"], entry["last_step"]) == ("engine_disagrees", 3, 4)


def test_a_disagreement_that_follows_from_old_weights_is_not_named_as_well() -> None:
    run = watching()
    run.begun(0)
    run.pushed(probe(0, -1.0, -1.0))
    assert names(run.pushed(probe(1, -1.0, -1.5))) == ["weights_not_applied"]
    assert run.stepped(TrainStep(1, {}, 8)) == []
    assert run.stepped(TrainStep(2, {"sampler_gap_nats": 0.5}, 8)) == []
    assert names(run.stepped(TrainStep(3, {"sampler_gap_nats": 0.5}, 8))) == ["engine_disagrees"]  # no such push since


# --- The probe -------------------------------------------------------------------------------------------------------


class Scoring(ScriptedTrainer):
    """Keeps the samples that it scores."""

    async def score(self, samples: Sequence[Sample]) -> list[Floats]:
        (self.scored,) = samples
        return [floats([-0.25] * sample.num_policy_tokens) for sample in samples]


def measured(engine: ScriptedEngine, trainer: ScriptedTrainer, **how: Any) -> PushProbe | None:
    probing = Probe(engine, trainer, **{"temperature": 0.7, "max_tokens": 60, **how})
    return next(iter(clock.run(lambda: probing.measure([91, 115, 93], PUSH), virtual=True)), None)


def test_a_probe_has_the_tokens_of_the_engine_and_the_trainers_scores_of_them() -> None:
    engine, trainer = ScriptedEngine(lambda call: "ab"), Scoring()
    assert measured(engine, trainer) == PushProbe(3, True, (97, 98), (-0.5, -1.0), (-0.25, -0.25))
    assert trainer.scored.token_ids.tolist() == [91, 115, 93, 97, 98]
    assert trainer.scored.mask.tolist() == [False] * 3 + [True] * 2


def test_a_probe_is_the_same_request_each_time_and_belongs_to_no_session() -> None:
    engine = ScriptedEngine(lambda call: "a")
    for _ in range(2):
        measured(engine, Scoring())
    first, second = engine.calls
    assert (first.session, first.prompt, first.params) == (None, second.prompt, second.params)
    assert (first.params.temperature, first.params.max_tokens) == (0.7, 8)


@pytest.mark.parametrize(("max_tokens", "count"), [(60, 8), (8, 5)])
def test_a_probe_fits_into_the_context(max_tokens: int, count: int) -> None:
    engine = ScriptedEngine(lambda call: "a" * call.params.max_tokens)
    found = measured(engine, Scoring(), max_tokens=max_tokens)
    assert found is not None
    assert len(found.token_ids) == count


def test_a_probe_that_misses_its_deadline_is_left_out() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, *args: Any, **how: Any) -> Completion:
            await anyio.sleep(20)
            return await super().generate(*args, **how)

    def say(call: Call) -> str:
        return "a"

    assert measured(Slow(say), Scoring(), timeout_s=10) is None
    assert measured(Slow(say), Scoring(), timeout_s=30) is not None
