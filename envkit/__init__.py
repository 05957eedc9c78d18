"""envkit: environments for agents, the sandboxes that run them, and a bridge to the trainer.

env = envkit.make("Sokoban-v0")
observation, info = env.reset(seed=7)
observation, reward, terminated, truncated, info = env.step("<answer>up</answer>")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.gym import register_catalogue
from envkit.installation import late_names
from envkit.registry import EnvSpec, register
from envkit.types import Observation, Reset, Step, Task

if TYPE_CHECKING:
    from envkit.checks import CheckResult, check_env
    from envkit.http.client.env_client import EnvClient
    from envkit.trainer_bridge.agents.programs import AgentTask
    from envkit.trainer_bridge.evaluation.result import Evaluation
    from envkit.wiring.api import TrainSummary, evaluate, train
    from envkit.wiring.environments import make, make_vec, registered
    from envkit.wiring.sandboxes.blocking import open_sandbox, open_sandbox_async
    from envkit.wiring.training.agents import agent

__version__ = "0.1.0"

__all__ = [
    "AgentTask",
    "CheckResult",
    "EnvClient",
    "EnvSpec",
    "Evaluation",
    "Observation",
    "Reset",
    "Step",
    "Task",
    "TrainSummary",
    "agent",
    "check_env",
    "evaluate",
    "make",
    "make_vec",
    "open_sandbox",
    "open_sandbox_async",
    "register",
    "registered",
    "train",
]

__getattr__, __dir__ = late_names(
    __name__,
    {
        "AgentTask": "envkit.trainer_bridge.agents.programs",
        "EnvClient": "envkit.http.client.env_client",
        "CheckResult": "envkit.checks",
        "Evaluation": "envkit.trainer_bridge.evaluation.result",
        "TrainSummary": "envkit.wiring.api",
        "agent": "envkit.wiring.training.agents",
        "check_env": "envkit.checks",
        "evaluate": "envkit.wiring.api",
        "make": "envkit.wiring.environments",
        "make_vec": "envkit.wiring.environments",
        "open_sandbox": "envkit.wiring.sandboxes.blocking",
        "open_sandbox_async": "envkit.wiring.sandboxes.blocking",
        "registered": "envkit.wiring.environments",
        "train": "envkit.wiring.api",
    },
)

register_catalogue()
