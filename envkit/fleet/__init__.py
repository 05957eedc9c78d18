"""Fleet: plays episodes in a fixed number of workers. Each worker is a sandbox in which an env server runs.

A pool starts, monitors and stops the sandboxes, and limits their restarts. A worker is lost when its sandbox ends, its
server is silent, or a call cannot reach it. Calls to the worker that are in progress then raise `SandboxLostError`, so
that they do not hang. Callers provide the pool, and a function that connects to the env server in a sandbox.
"""

from envkit.fleet.env_worker import WorkerClient, WorkerStart
from envkit.fleet.host import FleetHost

__all__ = ["FleetHost", "WorkerClient", "WorkerStart"]
