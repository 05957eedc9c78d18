"""A real Ray cluster for tests, whose nodes are processes of this machine; run in a process of its own.

Its standard input takes ``begin`` first, and then ``add``, ``kill NAME`` and ``behead``; every answer is a
line that begins with a ``>``.

``$RAY_TMPDIR`` must be the folder, too: Ray writes the cluster's address into its default folder, ``$RAY_TMPDIR/ray``,
which it makes only as the ``temp_dir`` of a node.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

_MEMORY = 4 << 30
_OBJECTS = 80 << 20


def main(folder: str, node_count: int, port: int) -> None:
    head: dict[str, Any] = {
        "num_cpus": 0,
        "include_dashboard": False,
        "temp_dir": str(Path(folder, "ray")),
        "object_store_memory": _OBJECTS,
        "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    }
    if port:
        head["gcs_server_port"] = port
    sys.stdin.readline()
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[str, Any] = {}

    def add(*, wait: bool) -> str:
        node = cluster.add_node(wait=wait, num_cpus=1, memory=_MEMORY, object_store_memory=_OBJECTS)
        name = str(node.node_id)[:8]  # with which its name in a pool ends
        nodes[name] = node
        return name

    try:
        for _ in range(node_count):
            add(wait=False)
        cluster.wait_for_nodes()
        print(">", cluster.address, *nodes, flush=True)
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
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
