"""Fleet: plays episodes in a fixed number of workers. Each worker is a sandbox in which an env server runs.

A pool starts, monitors and stops the sandboxes. A worker is lost when its sandbox ends, its heartbeats stop, or a call
cannot reach it. Calls to the worker that are in progress then raise `SandboxLostError`, so that they do not hang, and
the worker is restarted if the restart budget allows it. Callers provide the pool, and a function that connects to the
env server in a sandbox.
"""

from envkit.fleet.host import FleetHost
from envkit.fleet.routing import RoutedHosts
from envkit.fleet.worker_health import HeartbeatTimes, WorkerClient

__all__ = ["FleetHost", "HeartbeatTimes", "RoutedHosts", "WorkerClient"]
