"""What every engine promises of completions: tokens, log-probabilities, ends, seeds, sessions."""

from __future__ import annotations

import anyio
import pytest

from envkit.errors import SessionConflictError
from envkit.protocols import PolicyEngine
from envkit.types import FinishReason, SamplingParams
from tests.contract.engines.rigs import PROMPT, STOPPED_PROMPT, Asked, Rig, fed_at_least, is_still, prompt_of
from tests.trainer_bridge.models import slow_logps

EOS = 2


def how(n: int = 12, *, seed: int = 3, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=n, seed=seed, temperature=temperature, stop=stop)


def test_log_probabilities_are_those_of_the_trainer(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        got = await engine.generate(PROMPT, how(16, temperature=0.7))  # the others sample at 1
        assert (len(got.token_ids), got.finish, got.versions) == (16, FinishReason.LENGTH, ((0, 16),))
        assert rig.policies.agree(got, temperature=0.7)
        assert not rig.policies.agree(got, temperature=0.8)

    rig.run(test)


def test_temperature_0_takes_the_most_likely_tokens_until_a_stop_token(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        free = await engine.generate(PROMPT, how(12, temperature=0.0))
        tokens = free.token_ids.tolist()
        best: list[int] = []
        for _ in range(4):
            logps = slow_logps(rig.policies.models[0], [*PROMPT, *best])
            best.append(max(range(len(logps)), key=lambda token: logps[token]))
        assert (tokens[:4], len(tokens), free.finish) == (best, 12, FinishReason.LENGTH)
        assert rig.policies.agree(free)

        stop = tokens[5]
        ended = await engine.generate(PROMPT, how(12, temperature=0.0, stop=(7, stop)))
        assert ended.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert ended.finish is FinishReason.STOP

    rig.run(test)


def test_only_the_given_stop_tokens_end_a_completion(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        prompt = STOPPED_PROMPT
        free = await engine.generate(prompt, how(16, temperature=0.0))
        tokens = free.token_ids.tolist()
        assert EOS in tokens[:-1]
        assert (len(tokens), free.finish) == (16, FinishReason.LENGTH)
        ended = await engine.generate(prompt, how(16, temperature=0.0, stop=(EOS,)))
        assert ended.token_ids.tolist() == tokens[: tokens.index(EOS) + 1]

    rig.run(test)


def test_the_same_seed_gives_the_same_completion_alone_and_beside_others(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        async with Asked(engine) as asked:
            for seed in range(4):
                asked.ask(f"seed {seed}", how(8, seed=seed), prompt=PROMPT)
            asked.ask("other prompt", how(8, seed=0), prompt=PROMPT[3:12])
        for seed in (0, 3):
            alone = await engine.generate(PROMPT, how(8, seed=seed))
            beside = asked.done[f"seed {seed}"]
            assert alone.token_ids.tolist() == beside.token_ids.tolist()
            assert alone.logprobs.tolist() == pytest.approx(beside.logprobs.tolist(), abs=1e-4)
        assert len({tuple(one.token_ids.tolist()) for one in asked.done.values()}) == 5
        assert rig.policies.agree(asked.done["other prompt"], prompt=PROMPT[3:12])

    rig.run(test)


def test_a_later_turn_of_a_session_has_the_log_probabilities_of_its_whole_prompt(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        first = await engine.generate(PROMPT, how(8), session="episode")
        second_prompt = [*PROMPT, *first.token_ids.tolist(), *PROMPT[:6]]
        second = await engine.generate(second_prompt, how(8, seed=4), session="episode")
        changed_prompt = [*PROMPT[:10], *second_prompt[12:]]  # as a chat template that rewrites old turns
        third = await engine.generate(changed_prompt, how(8, seed=5), session="episode")
        assert rig.policies.agree(second, prompt=second_prompt)
        assert rig.policies.agree(third, prompt=changed_prompt)
        engine.forget("episode")
        again = await engine.generate(second_prompt, how(8, seed=4), session="episode")
        assert again.token_ids.tolist() == second.token_ids.tolist()

    rig.run(test)


def test_an_aborted_session_returns_its_tokens_so_far_and_can_be_continued(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        async with Asked(engine) as asked:
            await asked.begun("ab", how(rig.long))
            await engine.abort("a")
            await asked.ended("a")
            await fed_at_least(engine, 8, (await engine.health()).fed_tokens)  # the other one goes on
            await engine.abort("b")
        aborted, other = asked.done["a"], asked.done["b"]
        count = len(aborted.token_ids)
        assert (aborted.finish, aborted.versions) == (FinishReason.ABORTED, ((0, count),))
        assert 0 < count < rig.long
        assert rig.policies.agree(aborted, prompt=prompt_of("a"))
        assert rig.policies.agree(other, prompt=prompt_of("b"))

        end = count + 6
        whole = await engine.generate(prompt_of("a"), how(end), session="a", so_far=aborted)
        assert whole.token_ids.tolist()[:count] == aborted.token_ids.tolist()
        assert whole.logprobs.tolist()[:count] == aborted.logprobs.tolist()
        assert (len(whole.token_ids), whole.finish, whole.versions) == (end, FinishReason.LENGTH, ((0, end),))
        assert rig.policies.agree(whole, prompt=prompt_of("a"))

    rig.run(test)


def test_a_cancelled_completion_leaves_nothing_running(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        with anyio.CancelScope() as scope:
            async with Asked(engine) as asked:
                await asked.begun("a", how(200))
                scope.cancel()
        assert asked.done == {}
        with anyio.fail_after(3):
            while not await is_still(engine):
                pass
        health = await engine.health()
        assert (health.running, health.waiting) == (0, 0)

    rig.run(test)


def test_a_second_call_of_a_session_at_once_is_refused(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        async with Asked(engine) as asked:
            await asked.begun("a", how(rig.long))
            with pytest.raises(SessionConflictError, match="session a: a completion is in progress"):
                await engine.generate(prompt_of("b"), how(rig.long), session="a")
            await engine.abort("a")
            again = await engine.generate(prompt_of("a"), how(5), session="a")
        assert rig.policies.agree(asked.done["a"], prompt=prompt_of("a"))
        assert rig.policies.agree(again, prompt=prompt_of("a"))

    rig.run(test)


def test_health_counts_what_runs_and_what_the_model_has_processed(rig: Rig) -> None:
    async def test(engine: PolicyEngine) -> None:
        idle = await engine.health()
        assert (idle.version, idle.running, idle.waiting, idle.is_paused) == (0, 0, 0, False)
        async with Asked(engine) as asked:
            asked.ask("a", how(24))
            asked.ask("b", how(24))
            with anyio.fail_after(20):
                while (await engine.health()).running < 2:  # noqa: ASYNC110 - there is no event
                    await anyio.sleep(0.01)
        each = len(prompt_of("a")) + 24
        # The last token of a completion need not be processed.
        assert 2 * (each - 1) <= (await engine.health()).fed_tokens - idle.fed_tokens <= 2 * each

    rig.run(test)
