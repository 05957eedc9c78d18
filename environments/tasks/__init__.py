"""The kit of environments whose tasks are worked on in one sandbox and judged in another."""

from .env import TaskEnv
from .graders import AdaptiveTimeout, JudgeGrader, RuleGrader, SandboxGrader, read_score
from .judge_sandbox import in_fresh_sandbox
from .players import Cheat, Nop, PlanPlayer, Script
from .prepared import lease_prepared
from .task import Plan, SandboxTask, Verdict

__all__ = [
    "AdaptiveTimeout",
    "Cheat",
    "JudgeGrader",
    "Nop",
    "Plan",
    "PlanPlayer",
    "RuleGrader",
    "SandboxGrader",
    "SandboxTask",
    "Script",
    "TaskEnv",
    "Verdict",
    "in_fresh_sandbox",
    "lease_prepared",
    "read_score",
]
