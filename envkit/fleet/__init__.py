"""Fleet: plays episodes in a fixed number of workers. Each worker is a sandbox with an env server.

A worker is lost when its sandbox ends, its heartbeats stop, or a call cannot reach it. All calls in progress then raise
`SandboxLostError`, so no call hangs, and the worker is restarted within a budget. The caller passes functions that
start a sandbox and connect to its server.
"""

from envkit.fleet.env_worker import EnvSandbox, WorkerClient
from envkit.fleet.host import FleetHost
from envkit.fleet.routing import RoutedHosts
from envkit.fleet.worker_health import HeartbeatTimes

__all__ = ["EnvSandbox", "FleetHost", "HeartbeatTimes", "RoutedHosts", "WorkerClient"]
