"""A real vLLM server that is killed while it completes. The last test of the server of the test run.

It is not started again here, which takes a minute: ``tests/trainer_bridge/engines/vllm`` restarts servers that are not
real, and ``benchmarks/evidence/vllm/replicas.py`` real ones.
"""

from __future__ import annotations

import os
import signal

import pytest

from envkit import clock
from envkit.types import FinishReason, SamplingParams
from tests.contract.engines.rigs import Asked, VllmRig, prompt_of
from tests.contract.engines.vllm_server import alive, child_named, shared_memory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_killed_server_is_lost_with_all_its_processes_and_the_tokens_that_came_are_kept(vllm_rig: VllmRig) -> None:
    vllm_rig.is_changed = True
    process, lines = vllm_rig.process, list[str]()

    async def main() -> None:
        async with vllm_rig.opened(lines=lines) as engine:
            await engine.load(vllm_rig.policies.weights[1])
            pids = process.processes()
            assert len(pids) >= 4  # supervisor, API server, engine core and worker
            memory = shared_memory(pids)
            server = child_named(pids[1:], "api_server") or 0
            async with Asked(engine) as asked:
                await asked.begun("ab", SamplingParams(max_tokens=vllm_rig.long, seed=3))
                arrived = {one.session: one for one in engine._requests.values()}
                os.kill(server, signal.SIGKILL)
                assert await clock.to_thread(process.wait) == 2
                kept = {session: list(one.tokens) for session, one in arrived.items()}
                assert alive(pids) == []
                assert memory
                assert not [path for path in memory if path.exists()]
                for session in "ab":  # they wait for another server
                    await engine.abort(session)
        for session in "ab":
            got = asked.done[session]
            count = len(kept[session])
            assert 0 < count < vllm_rig.long
            assert (got.token_ids.tolist(), got.finish, got.versions) == (
                kept[session],
                FinishReason.ABORTED,
                ((1, count),),
            )
            assert vllm_rig.policies.agree(got, prompt=prompt_of(session))
        assert "lost" in lines[0]

    clock.run(main)
