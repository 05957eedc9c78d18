"""A real Ray cluster of two nodes, which are processes of this machine. As a program, it is that cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LIMITS: Mapping[str, Any] = {
    "num_cpus": 1,
    "memory": 2 << 30,
    "object_store_memory": 80 << 20,
    "include_log_monitor": False,
}


class Cluster(dict[str, str]):
    """A cluster of two nodes: the variables with which programs find it."""

    def __init__(self, variables: Mapping[str, str], orders: IO[str], answers: IO[str]) -> None:
        super().__init__(variables)
        self._orders = orders
        self._answers = answers

    def replace_node(self) -> None:
        """Remove what is left of the second node, and add another one."""
        print("replace", file=self._orders, flush=True)
        assert _answer(self._answers) == "replaced"


def _answer(answers: IO[str]) -> str:
    return next((line[2:].strip() for line in answers if line.startswith("> ")), "")


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Run a cluster during the block."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets are long
    variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        with (
            Path(folder, "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-m", "tests.wiring.launch.ray_cluster", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **variables, "HOME": folder},
                cwd=Path(__file__).parents[3],
                start_new_session=True,
            ) as process,
        ):
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                address = _answer(process.stdout)
                assert address, Path(folder, "log").read_text(errors="replace")[-2000:]
                yield Cluster({**variables, "RAY_ADDRESS": address}, process.stdin, process.stdout)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # all of Ray's processes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    from ray import cluster_utils

    head = {
        **_LIMITS,
        "include_dashboard": False,
        "no_monitor": True,
        "temp_dir": str(Path(folder, "ray")),
        "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    }
    cluster: Any = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(**_LIMITS)
    print(">", cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(**_LIMITS)
        cluster.wait_for_nodes()
        print("> replaced", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
