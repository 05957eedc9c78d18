"""Fleet: plays episodes in a fixed number of workers. Each worker is a sandbox with an env server.

A pool starts, monitors and stops the sandboxes. A worker is lost when the pool loses its sandbox, its heartbeats stop,
or a call cannot reach it. All calls in progress then raise `SandboxLostError`, so no call hangs, and the worker is
restarted if the restart budget allows it. The caller passes the pool and a function that connects to the server in a
sandbox.
"""

from envkit.fleet.host import FleetHost
from envkit.fleet.routing import RoutedHosts
from envkit.fleet.worker_health import HeartbeatTimes, WorkerClient

__all__ = ["FleetHost", "HeartbeatTimes", "RoutedHosts", "WorkerClient"]
