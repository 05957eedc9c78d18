"""The probes of an engine with several replicas."""

from __future__ import annotations

from collections.abc import Sequence

from envkit import clock
from envkit.trainer_bridge.diagnostics import Diagnostics, Finding, Probe
from envkit.trainer_bridge.weights.channel import Push
from envkit.types import Floats, Sample, Weights, floats
from tests.trainer_bridge.engines.vllm.fake_server import FakeServer, fleet
from tests.trainer_bridge.fakes import ScriptedTrainer

PROMPT = [7] * 10


class Agreeing(ScriptedTrainer):
    """Its log-probabilities are those of a `FakeServer`, less `lower`."""

    lower = 0.0

    async def score(self, samples: Sequence[Sample]) -> list[Floats]:
        return [floats(one.token_ids[one.mask] / -100 - self.lower) for one in samples]


def test_each_replica_is_probed_and_one_that_keeps_old_weights_is_named() -> None:
    async def main() -> None:
        first, second = FakeServer(), FakeServer()
        trainer, diagnostics = Agreeing(), Diagnostics()
        async with fleet(first, second) as group:
            probe = Probe(group.engine, trainer, temperature=1.0, max_tokens=100)
            found: list[Finding] = []
            for version in (1, 2):
                weights = Weights(version, f"/weights-{version}", checksum=version)
                await group.engine.load(weights)
                for number, one in enumerate(await probe.measure(PROMPT, Push(weights, True, 0.0))):
                    assert (one.replica, one.version, len(one.token_ids)) == (number, version, 8)
                    found += diagnostics.pushed(one)
                assert (len(first.requests), len(second.requests)) == (version, version)
                trainer.lower += 0.001  # the weights change, but the servers answer as before
        assert {one.name for one in found} == {"weights_not_applied"}

    clock.run(main)
