"""The kit of environments whose tasks are worked on in one sandbox and judged in another."""

from .env import TaskEnv
from .judge import ask_judge, in_fresh_sandbox, read_score
from .players import Cheat, Nop, Oracle, OwnCheats, PlanPlayer, Script
from .prepared import lease_prepared
from .task import Plan, SandboxTask, Verdict

__all__ = [
    "Cheat",
    "Nop",
    "Oracle",
    "OwnCheats",
    "Plan",
    "PlanPlayer",
    "SandboxTask",
    "Script",
    "TaskEnv",
    "Verdict",
    "ask_judge",
    "in_fresh_sandbox",
    "lease_prepared",
    "read_score",
]
