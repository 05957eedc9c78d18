"""Episodes in sandboxes: a fixed number of workers, each a sandbox with an env server, restarted within a budget.

Each worker has monitors. They detect a loss from the sandbox itself, from missed heartbeats, or from a failed call, and
then end all calls under way in the worker with `SandboxLostError`, so that none hangs. The caller supplies how to start
a sandbox and how to connect to its server.
"""

from envkit.fleet.env_worker import EnvSandbox, WorkerClient
from envkit.fleet.host import FleetHost
from envkit.fleet.routing import RoutedHosts
from envkit.fleet.worker_health import HeartbeatTimes

__all__ = ["EnvSandbox", "FleetHost", "HeartbeatTimes", "RoutedHosts", "WorkerClient"]
