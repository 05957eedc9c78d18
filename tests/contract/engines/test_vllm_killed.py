"""A real vLLM server that is killed, and one whose owner is killed. The last tests of the server of the test run."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from envkit import clock
from envkit.types import FinishReason, SamplingParams
from tests.contract.engines.rigs import Asked, VllmRig, prompt_of
from tests.contract.engines.vllm_server import alive, child_named, shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_completions_continue_on_the_restarted_server_and_no_process_of_the_old_one_is_left(vllm_rig: VllmRig) -> None:
    vllm_rig.is_changed = True
    process, lines, long = vllm_rig.process, list[str](), vllm_rig.long

    async def main() -> None:
        async with vllm_rig.opened(lines=lines) as engine:
            await engine.load(vllm_rig.policies.weights[1])
            old = process.processes()
            server = child_named(old[1:], "api_server") or 0
            async with Asked(engine) as asked:
                await asked.begun("ab", SamplingParams(max_tokens=long, seed=3), tokens=6)
                arrived = {one.session: one for one in engine._requests.values()}
                os.kill(server, signal.SIGKILL)
                assert await clock.to_thread(process.wait) == 2
                kept = {session: list(one.tokens) for session, one in arrived.items()}
                assert alive(old) == []
                await clock.to_thread(process.start)
        for session in "ab":
            got = asked.done[session]
            assert 0 < len(kept[session]) < long
            assert got.token_ids.tolist()[: len(kept[session])] == kept[session]
            assert (len(got.token_ids), got.finish, got.versions) == (long, FinishReason.LENGTH, ((1, long),))
            assert vllm_rig.policies.agree(got, prompt=prompt_of(session))
        assert ["lost" in lines[0], "is back" in lines[-1]] == [True, True]

    clock.run(main)


def test_a_killed_owner_leaves_no_process_and_no_shared_memory(vllm_rig: VllmRig) -> None:
    process = vllm_rig.process
    assert process.url
    before = shared_memory()
    pids = process.processes()
    assert len(pids) >= 4  # supervisor, API server, engine core and worker
    os.kill(process.owner_pid, signal.SIGKILL)
    process.wait()

    async def until_gone() -> None:
        with anyio.move_on_after(15):
            while alive(pids):  # noqa: ASYNC110 - the kernel sets no event
                await anyio.sleep(0.2)

    clock.run(until_gone)
    assert alive(pids) == []
    assert shared_memory() - before == set()
    vllm_rig.is_changed = False
