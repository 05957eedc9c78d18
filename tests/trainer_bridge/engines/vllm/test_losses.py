"""The vLLM engine and its servers: lost, stalled, drained, restarted; no sampled token is lost."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import DeadlineError, EnvkitError, UsageError
from envkit.trainer_bridge.engines.vllm.engine import VllmEngine
from envkit.types import Completion, FinishReason, PauseMode, SamplingParams, Weights
from tests.trainer_bridge.engines.vllm.fake_server import FakeServer, fleet, params, positions, settings, until

PROMPT = [7] * 10


async def complete_all(engine: Any, count: int, how: SamplingParams) -> list[Completion]:
    """Complete the prompt `count` times at once, each in a session of its own."""
    done: dict[int, Completion] = {}

    async def one(number: int) -> None:
        done[number] = await engine.generate(PROMPT, how, session=f"s{number}")

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)
    return [done[number] for number in range(count)]


def is_whole(got: Completion, n: int) -> bool:
    """Whether a completion has all its tokens in order, with their log-probabilities."""
    expected = positions(PROMPT, n)
    return (
        got.token_ids.tolist() == expected
        and got.logprobs.tolist() == pytest.approx([-one / 100 for one in expected])
        and got.finish is FinishReason.LENGTH
        and sum(count for _, count in got.versions) == n
    )


# --- Losses ----------------------------------------------------------------------------------------------------------


def test_no_token_of_many_completions_is_lost_when_one_of_two_servers_dies() -> None:
    async def main() -> None:
        first, second = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
        async with fleet(first, second) as group, anyio.create_task_group() as tasks:

            async def kill() -> None:
                await until(lambda: first.running == 4)
                await anyio.sleep(0.05)
                await first.kill()

            tasks.start_soon(kill)
            done = await complete_all(group.engine, 8, params(20))
        assert all(is_whole(one, 20) for one in done)
        assert len(first.requests) == 4
        assert len(second.requests) == 8
        assert any("lost the vLLM server 0" in line for line in group.lines)

    clock.run(main)


def test_a_server_of_ours_is_started_again_with_the_weights_that_it_had() -> None:
    async def main() -> None:
        server = FakeServer()
        async with fleet(server, owned=True) as group:
            await group.engine.load(Weights(4, "/weights-4"))
            server.dies_after = 5
            got = await group.engine.generate(PROMPT, params(12))
            assert (is_whole(got, 12), got.versions) == (True, ((4, 12),))
            assert (server.starts, server.loads) == (2, ["/weights-4", "/weights-4"])
            assert server.label.endswith("-4-full")
            lost, back = group.lines
            assert lost.startswith(f"lost the vLLM server 0 at {server.url}: ")
            assert "killed by signal 9" in lost
            assert lost.endswith("; starting it again")
            assert back == f"the vLLM server 0 is back at {server.url}"

    clock.run(main)


def test_a_server_that_stops_sending_tokens_is_lost_and_its_completion_goes_on_elsewhere() -> None:
    async def main() -> None:
        first, second = FakeServer(stalls_after=4), FakeServer()
        async with fleet(first, second, stall_timeout_s=0.3) as group:
            got = await group.engine.generate(PROMPT, params(9))
            assert (is_whole(got, 9), len(second.requests)) == (True, 1)
            await until(lambda: group.lines)
            assert "no token within 0.3 s" in group.lines[0]

    clock.run(main)


def test_the_failure_after_the_last_restart_names_the_reason() -> None:
    async def main() -> None:
        server = FakeServer(dies_after=3)
        async with fleet(server, owned=True, max_restarts=1) as group:
            assert is_whole(await group.engine.generate(PROMPT, params(6)), 6)
            server.dies_after = 3
            for call in (group.engine.generate(PROMPT, params(6)), group.engine.health()):
                with pytest.raises(EnvkitError) as raised:
                    await call
                assert str(raised.value) == (
                    "all vLLM servers were lost more than 1 times, the last one because: "
                    "killed by signal 9; continue from the last checkpoint with --resume"
                )
            assert server.starts == 2

    clock.run(main)


def test_a_pause_while_a_server_is_lost_returns_and_keeps_the_tokens() -> None:
    async def main() -> None:
        first, second = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
        async with fleet(first, second) as group, anyio.create_task_group() as tasks:

            async def interrupt() -> None:
                await until(lambda: first.running == 2)
                await anyio.sleep(0.05)
                await first.kill()
                with anyio.fail_after(3):
                    await group.engine.pause(PauseMode.KEEP)
                assert (await group.engine.health()).running == 0
                await group.engine.resume()

            tasks.start_soon(interrupt)
            done = await complete_all(group.engine, 4, params(20))
        assert all(is_whole(one, 20) for one in done)

    clock.run(main)


# --- Weights ---------------------------------------------------------------------------------------------------------


def test_a_lost_server_loads_the_weights_that_it_missed_when_it_is_back() -> None:
    async def main() -> None:
        first, second = FakeServer(), FakeServer()
        async with fleet(first, second) as group:
            await group.engine.load(Weights(1, "/weights-1"))
            await first.kill()
            await group.engine.load(Weights(2, "/weights-2"))
            assert ((await group.engine.health()).version, first.loads) == (2, ["/weights-1"])
            await first.start(5.0)
            await until(lambda: len(group.engine.completers) == 2)
            assert first.loads == ["/weights-1", "/weights-2"]
            assert first.label.endswith("-2-full")
            assert second.label.endswith("-2-full")
            done = await complete_all(group.engine, 4, params(6))
            assert [one.versions for one in done] == [((2, 6),)] * 4

    clock.run(main)


def test_weights_that_one_server_rejects_stop_the_load_but_not_that_of_the_others() -> None:
    async def main() -> None:
        first, second = FakeServer(rejects={"/bad"}), FakeServer()
        async with fleet(first, second) as group:
            with pytest.raises(UsageError, match="rejected a request: no weights at /bad"):
                await group.engine.load(Weights(1, "/bad"))
            assert [first.is_paused, second.is_paused] == [False, False]
            await group.engine.load(Weights(2, "/good"))
            done = await complete_all(group.engine, 4, params(6))
            assert [one.versions for one in done] == [((2, 6),)] * 4

    clock.run(main)


def test_a_server_that_a_killed_run_left_in_a_push_generates_and_loads_again() -> None:
    async def main() -> None:
        server = FakeServer(is_paused=True, is_updating=True)
        async with fleet(server) as group:
            assert not server.is_paused
            await group.engine.load(Weights(1, "/weights-1"))
            assert (await group.engine.generate(PROMPT, params(3))).versions == ((1, 3),)

    clock.run(main)


def test_weights_that_another_run_loaded_as_the_same_version_are_noticed() -> None:
    async def main() -> None:
        server = FakeServer()
        async with fleet(server) as group:
            await group.engine.load(Weights(5, "/weights-5"))
            async with VllmEngine(settings(), urls=[server.url]).running() as other:
                await other.load(Weights(5, "/others-5"))
            with pytest.raises(EnvkitError, match="another program loads weights on it"):
                await group.engine.generate(PROMPT, params(6))

    clock.run(main)


def test_a_server_that_was_started_again_elsewhere_gets_the_weights_before_its_tokens_count() -> None:
    async def main() -> None:
        server = FakeServer()
        async with fleet(server) as group:
            await group.engine.load(Weights(4, "/weights-4"))
            server.label = "default"
            got = await group.engine.generate(PROMPT, params(6))
            assert (is_whole(got, 6), got.versions) == (True, ((4, 6),))
            assert server.loads == ["/weights-4", "/weights-4"]

    clock.run(main)


def test_a_server_that_another_run_uses_is_refused() -> None:
    async def main() -> None:
        server = FakeServer(token_s=0.02)
        async with fleet(server) as group, anyio.create_task_group() as tasks:
            tasks.start_soon(group.engine.generate, PROMPT, params(40))
            await until(lambda: server.running)
            with pytest.raises(UsageError, match=f"another run uses the vLLM server {server.url}"):
                async with VllmEngine(settings(), urls=[server.url]).running():
                    pass

    clock.run(main)


def test_a_request_that_waits_in_a_busy_server_does_not_count_as_a_stall() -> None:
    async def main() -> None:
        server = FakeServer(token_s=0.05, slots=1)
        async with fleet(server, stall_timeout_s=0.3) as group:
            done = await complete_all(group.engine, 3, params(10))
        assert all(is_whole(one, 10) for one in done)
        assert group.lines == []

    clock.run(main)


def test_a_deadline_counts_neither_the_wait_for_a_place_nor_a_pause() -> None:
    async def main() -> None:
        async with fleet(FakeServer(token_s=0.005), max_num_seqs=1) as group, anyio.create_task_group() as tasks:

            async def pause() -> None:
                await anyio.sleep(0.1)
                await group.engine.pause(PauseMode.KEEP)
                await anyio.sleep(2.5)
                await group.engine.resume()

            tasks.start_soon(pause)
            done = await complete_all(group.engine, 3, params(20, timeout_s=2.0))  # 0.1 s each, one after another
        assert all(is_whole(one, 20) for one in done)

    clock.run(main)


def test_a_completion_that_misses_its_deadline_ends_in_the_server_too() -> None:
    async def main() -> None:
        server = FakeServer(token_s=0.02)
        async with fleet(server) as group:
            with pytest.raises(DeadlineError, match=r"did not complete a prompt within 0.1 s of its first token"):
                await group.engine.generate(PROMPT, params(500, timeout_s=0.1))
            await until(lambda: server.running == 0, timeout_s=20.0)
            assert is_whole(await group.engine.generate(PROMPT, params(3, timeout_s=20.0)), 3)
        assert len(server.requests) == 2

    clock.run(main)


@pytest.mark.parametrize(
    ("server", "how", "line"),
    [
        (FakeServer(dtype="bfloat16"), {}, "has weights in bfloat16, and engine.dtype is float32"),
        (FakeServer(label_at_start="a-3-full"), {"takes_adapters": True}, "to which no LoRA adapter must be added"),
        (
            FakeServer(has_lora=False),
            {"takes_adapters": True},
            "takes no LoRA adapters; start it with --lora-rank",
        ),
        (FakeServer(), {"max_tokens": 2000}, r"takes 1000 tokens, and rollout.max_tokens is 2000; .*--max-tokens 2000"),
    ],
)
def test_a_server_that_does_not_fit_the_run_is_refused(server: FakeServer, how: dict[str, Any], line: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=line):
            async with fleet(server, **how):
                pass

    clock.run(main)


def test_weights_of_the_other_kind_are_refused() -> None:
    async def main() -> None:
        server = FakeServer()
        async with fleet(server) as group:
            with pytest.raises(ValueError, match="the engine vllm loads all weights from a file"):
                await group.engine.load(Weights(1, "/adapter", adapter=True))
            assert server.loads == []

    clock.run(main)


def test_completions_of_a_drained_server_go_on_elsewhere_and_it_gets_none_until_it_is_admitted() -> None:
    async def main() -> None:
        first, second = FakeServer(token_s=0.01), FakeServer(token_s=0.01)
        async with fleet(first, second) as group, anyio.create_task_group() as tasks:

            async def drain() -> None:
                await until(lambda: first.running == second.running == 1)
                await group.engine.drain(0)

            tasks.start_soon(drain)
            done = await complete_all(group.engine, 2, params(20))
            assert all(is_whole(one, 20) for one in done)
            await complete_all(group.engine, 4, params(2))
            assert (len(first.requests), len(second.requests)) == (1, 6)
            group.engine.admit(0)
            await group.engine.drain(1)
            await complete_all(group.engine, 4, params(2))
            assert (len(first.requests), len(second.requests)) == (5, 6)

    clock.run(main)


def test_a_frozen_replica_keeps_its_weights_over_pushes_and_a_loss_and_gets_nothing_else() -> None:
    async def main() -> None:
        servers = [FakeServer(token_s=0.01), FakeServer(token_s=0.01)]
        async with fleet(*servers, owned=True) as group, anyio.create_task_group() as tasks:
            engine, done = group.engine, dict[str, Completion]()
            await engine.load(Weights(1, "/weights-1"))

            async def complete(name: str, one: Any, tokens: int) -> None:
                done[name] = await one.generate(PROMPT, params(tokens), session=name)

            for name in ("first", "second"):
                tasks.start_soon(complete, name, engine, 20)
            await until(lambda: servers[0].running == servers[1].running == 1)
            async with engine.frozen() as frozen:
                await until(lambda: [one.running for one in servers if one.running] == [2])  # both continue on one
                kept, other = sorted(servers, key=lambda one: one.running)
                async with anyio.create_task_group() as inner:
                    inner.start_soon(complete, "evaluation", frozen, 60)
                    await until(lambda: kept.running == 1)
                    await engine.pause(PauseMode.KEEP)
                    await engine.load(Weights(2, "/weights-2"))
                    assert (kept.running, other.running) == (1, 0)
                    before = len(kept.requests)
                    inner.start_soon(complete, "paused", frozen, 2)
                    await until(lambda: len(kept.requests) == before + 1)
                    await engine.resume()
                    assert [servers[index] for index in engine.completers] == [other]
                    await kept.kill()
                    await complete_all(engine, 4, params(3))
                assert 3 not in [one["sampling_params"]["max_tokens"] for one in kept.requests[before:]]
                assert (kept.loads, other.loads) == (["/weights-1"] * 2, ["/weights-1", "/weights-2"])
                assert done["evaluation"].versions == ((1, 60),)
                assert is_whole(done["evaluation"], 60)
            assert kept.loads[-1] == "/weights-2"
            assert list(engine.completers) == [0, 1]
        assert is_whole(done["first"], 20)
        assert is_whole(done["second"], 20)

    clock.run(main)


def test_a_single_replica_cannot_be_frozen() -> None:
    async def main() -> None:
        async with fleet(FakeServer()) as group:
            await group.engine.load(Weights(1, "/weights-1"))
            async with group.engine.frozen() as frozen:
                assert frozen is None
                await group.engine.load(Weights(2, "/weights-2"))
                assert (await group.engine.generate(PROMPT, params(3))).versions == ((2, 3),)

    clock.run(main)


# --- Rejected requests -----------------------------------------------------------------------------------------------


def test_sampling_parameters_that_change_the_log_probabilities_are_refused() -> None:
    async def main() -> None:
        server = FakeServer()
        async with fleet(server) as group:
            with pytest.raises(UsageError, match="supports neither top_p nor top_k"):
                await group.engine.generate(PROMPT, params(4, top_p=0.9))
            assert server.requests == []

    clock.run(main)


def test_a_server_that_ends_a_completion_early_is_an_error_instead_of_a_loop() -> None:
    async def main() -> None:
        server = FakeServer(ends_after=4)
        async with fleet(server) as group:
            with pytest.raises(EnvkitError, match="ended a completion after 4 of 9 tokens"):
                await group.engine.generate(PROMPT, params(9))
            assert len(server.requests) == 1

    clock.run(main)


def test_a_server_that_does_not_answer_is_named() -> None:
    async def main() -> None:
        server = FakeServer()
        await server.start(5.0)
        await server.kill()
        with pytest.raises(UsageError, match=rf"the vLLM server {server.url} does not answer: no answer within 0.2 s"):
            async with VllmEngine(settings(start_timeout_s=0.2), urls=[server.url]).running():
                pass

    clock.run(main)
