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
from typing import Any

_LIMITS: Mapping[str, Any] = {
    "num_cpus": 1,
    "memory": 2 << 30,
    "object_store_memory": 80 << 20,
    "include_log_monitor": False,
}


@contextmanager
def two_nodes() -> Iterator[dict[str, str]]:
    """Run a cluster during the block; yields the variables with which programs find it."""
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
                assert process.stdout is not None
                address = next((line[2:].strip() for line in process.stdout if line.startswith("> ")), "")
                assert address, Path(folder, "log").read_text(errors="replace")[-2000:]
                yield {**variables, "RAY_ADDRESS": address}
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # all of Ray's processes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    from ray.cluster_utils import Cluster

    head = {
        **_LIMITS,
        "include_dashboard": False,
        "no_monitor": True,
        "temp_dir": str(Path(folder, "ray")),
        "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    }
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**_LIMITS)
    cluster.wait_for_nodes()
    print(">", cluster.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
