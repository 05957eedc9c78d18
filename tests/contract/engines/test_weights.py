"""What every engine promises of pauses and new weights: kept tokens, exact versions, nothing half loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from envkit.errors import EnvkitError
from envkit.protocols import PolicyEngine
from envkit.types import FinishReason, PauseMode, SamplingParams, Weights
from tests.contract.engines.rigs import PROMPT, Asked, Rig, is_still, prompt_of


def how(n: int, *, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=seed)


def test_completions_that_a_pause_keeps_wait_and_continue_with_the_weights_that_were_loaded(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        rig.is_changed = True
        async with Asked(engine) as asked:
            await asked.begun("ab", how(rig.long))
            await engine.pause(PauseMode.KEEP)
            asked.ask("c", how(4))
            assert await is_still(engine)
            assert (await engine.health()).is_paused
            assert asked.done == {}
            await engine.resume()
            await asked.ended("c")

            await engine.pause(PauseMode.KEEP)
            await engine.load(rig.policies.weights[1])
            assert (await engine.health()).is_paused
            await engine.resume()
        assert asked.done["c"].versions == ((0, 4),)
        for session in "ab":
            got = asked.done[session]
            assert [version for version, _ in got.versions] == [0, 1]
            assert sum(count for _, count in got.versions) == len(got.token_ids) == rig.long
            assert got.finish is FinishReason.LENGTH
        assert all(rig.policies.agree(got, prompt=prompt_of(session)) for session, got in asked.done.items())

    rig.run(test)


def test_a_pause_that_aborts_returns_the_tokens_so_far_and_new_requests_wait(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        async with Asked(engine) as asked:
            await asked.begun("ab", how(rig.long))
            await engine.pause(PauseMode.ABORT)
            await asked.ended("ab")
            asked.ask("c", how(4))
            asked.ask("d", how(4))
            assert await is_still(engine)
            health = await engine.health()
            assert (health.running, health.waiting, health.is_paused) == (0, 2, True)
            await engine.abort("d")
            await engine.resume()
        for session in "ab":
            assert asked.done[session].finish is FinishReason.ABORTED
            assert 0 < len(asked.done[session].token_ids) < rig.long
            assert rig.policies.agree(asked.done[session], prompt=prompt_of(session))
        assert (len(asked.done["c"].token_ids), len(asked.done["d"].token_ids)) == (4, 0)
        assert asked.done["d"].finish is FinishReason.ABORTED

    rig.run(test)


def test_a_pause_that_waits_and_a_load_without_a_pause_finish_what_runs_first(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        rig.is_changed = True
        async with Asked(engine) as asked:
            await asked.begun("a", how(24))
            await engine.pause(PauseMode.WAIT)
            assert "a" in asked.done or (await engine.health()).running == 0
            asked.ask("b", how(4))
            assert await is_still(engine)
            await engine.resume()
        async with Asked(engine) as again:
            await again.begun("c", how(24))
            await engine.load(rig.policies.weights[1])
            again.ask("d", how(4, seed=4))
        done = {**asked.done, **again.done}
        versions = {name: got.versions for name, got in done.items()}
        assert versions == {"a": ((0, 24),), "b": ((0, 4),), "c": ((0, 24),), "d": ((1, 4),)}
        assert all(rig.policies.agree(got, prompt=prompt_of(name)) for name, got in done.items())
        assert (await engine.health()).version == 1

    rig.run(test)


def test_weights_of_another_model_leave_the_old_weights(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"model.norm.weight": torch.zeros(576), "model.layers.0.more.weight": torch.zeros(2)}, path)

    async def test(engine: PolicyEngine) -> None:
        with pytest.raises((EnvkitError, RuntimeError, OSError, SafetensorError)):
            await engine.load(Weights(7, str(path)))
        got = await engine.generate(PROMPT, how(8))
        assert got.versions == ((0, 8),)
        assert rig.policies.agree(got)

    rig.run(test)
