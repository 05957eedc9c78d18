"""The launcher of Slurm: its command lines, and a real job step in an allocation."""

from __future__ import annotations

import os
import sys

import anyio
import pytest

from envkit import clock
from envkit.errors import UsageError
from envkit.types import Node, Place
from envkit.wiring.launch import open_launcher
from envkit.wiring.launch.slurm import other_nodes, relay

ALLOCATION = {
    "SLURM_JOB_ID": "5",
    "SLURMD_NODENAME": "gpu2",
    "SLURM_JOB_CPUS_PER_NODE": "32(x2),64",
    "SLURM_GPUS_ON_NODE": "4",
}
NODE = Node(name="n1", id="gpu1", host="gpu1", address="10.0.0.1", gpus=("0", "1", "2", "3"), cpus=32)


def test_the_other_nodes_of_an_allocation_have_addresses_cores_and_as_many_gpus_as_this_one() -> None:
    found = other_nodes(ALLOCATION, ["gpu1", "gpu2", "gpu3"], {"gpu1": "10.0.0.1", "gpu3": "10.0.0.3"}.__getitem__)
    assert found[0] == NODE
    assert [(node.name, node.id, node.address, node.cpus) for node in found[1:]] == [("n2", "gpu3", "10.0.0.3", 64)]


def test_a_server_is_a_step_on_its_node_with_gpus_and_cores_of_its_own() -> None:
    words, variables = relay(["serve", "--port", "1"], {"A": "b"}, Place("n1", (2, 3), 16), NODE)
    assert words[:4] == ["srun", "--nodes=1", "--ntasks=1", "--nodelist=gpu1"]
    assert {"--exact", "--cpus-per-task=16", "--gpus-per-node=2", "--mem=0", "--immediate=60"} <= set(words)
    assert (words[-3:], variables) == (["serve", "--port", "1"], {"A": "b"})


def test_a_process_that_needs_nothing_of_its_own_shares_the_node() -> None:
    words, _ = relay(["serve"], {}, Place("n1"), NODE)
    assert "--overlap" in words
    assert not any(word.startswith(("--exact", "--gpus", "--cpus")) for word in words)


def test_outside_of_an_allocation_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match=r"placement\.launcher: slurm needs an allocation"):
        clock.run(open_launcher, "slurm")


@pytest.mark.slurm
def test_a_real_step_has_its_output_in_the_log_and_ends_with_its_relay() -> None:
    """On the only node, the launcher would start the process directly, so the relay is started as for another one."""
    from envkit.wiring.launch import local

    here = Node(name="n1", id=os.environ["SLURMD_NODENAME"], host="", address="127.0.0.1")
    program = "import os, time; print(os.environ['WORD'], os.getpid(), flush=True); time.sleep(600)"

    async def main() -> None:
        words, variables = relay([sys.executable, "-c", program], {"WORD": "hello"}, Place("n1"), here)
        process = local.start(words, variables, name="test")
        with anyio.fail_after(60):
            while not process.log.read_text().startswith("hello"):  # noqa: ASYNC110 - a file sets no event
                await anyio.sleep(0.1)
            pid = int(process.log.read_text().split()[1])
            await process.kill()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        process.log.unlink()

    clock.run(main)
