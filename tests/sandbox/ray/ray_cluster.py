"""A real Ray cluster for tests, whose nodes are processes of this machine; run in a process of its own.

Its head is a node like the others, since each node costs seconds of processor time.

Its standard input takes ``begin`` first, and then ``add``, ``kill NAME``, ``behead`` and ``freeze``; every answer is a
line that begins with a ``>``.

``$RAY_TMPDIR`` must be the folder, too: Ray writes the cluster's address into its default folder, ``$RAY_TMPDIR/ray``,
which it makes only as the ``temp_dir`` of a node.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

_MEMORY = 4 << 30
_OBJECTS = 80 << 20
_NODE: dict[str, Any] = {"object_store_memory": _OBJECTS, "include_log_monitor": False}


def main(folder: str, node_count: int, port: int) -> None:
    head: dict[str, Any] = {
        "num_cpus": 1,
        "memory": _MEMORY,
        "include_dashboard": False,
        "no_monitor": True,
        "temp_dir": str(Path(folder, "ray")),
        **_NODE,
        "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    }
    if port:
        head["gcs_server_port"] = port
    sys.stdin.readline()
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}

    def add(*, wait: bool) -> str:
        node = cluster.add_node(wait=wait, num_cpus=1, memory=_MEMORY, **_NODE)
        name = str(node.node_id)[:8]  # with which its name in a pool ends
        nodes[name] = node
        return name

    try:
        for _ in range(node_count - 1):
            add(wait=False)
        cluster.wait_for_nodes()
        print(">", cluster.address, str(cluster.head_node.node_id)[:8], *nodes, flush=True)
        for line in sys.stdin:
            order, *names = line.split()
            if order == "add":
                print(">", add(wait=True), flush=True)
            elif order == "kill":
                cluster.remove_node(nodes.pop(names[0]), allow_graceful=False)
                print(">", "killed", flush=True)
            elif order == "behead":
                cluster.head_node.kill_gcs_server()
                print(">", "killed", flush=True)
            elif order == "freeze":
                for node in (cluster.head_node, *nodes.values()):
                    for raylet in node.all_processes["raylet"]:
                        os.kill(raylet.process.pid, signal.SIGSTOP)
                print(">", "frozen", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
