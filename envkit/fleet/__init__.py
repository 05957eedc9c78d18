"""Episodes in sandboxes: a fixed number of boxes, an env server in each, lost ones replaced while the budget lasts.

Every box has its watchers. They learn of a loss from the sandbox itself, from its silence, or from a call that did
not get through, and then end all calls that are under way in the box: none of them hangs, each raises
`SandboxLostError`. What a box is and how one talks to its server is handed in.
"""

from envkit.fleet.env_worker import EnvSandbox, WorkerClient
from envkit.fleet.host import FleetHost
from envkit.fleet.routing import RoutedHosts
from envkit.fleet.worker_health import HeartbeatTimes

__all__ = ["EnvSandbox", "FleetHost", "HeartbeatTimes", "RoutedHosts", "WorkerClient"]
