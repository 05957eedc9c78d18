"""The data that flows through envkit: frozen, slotted, plain, JSON-able and picklable."""

from envkit.types.episodes import EpisodeRecord, GenerationRecord, TurnRecord
from envkit.types.plain import JSON, Info, Options, stable_hash
from envkit.types.sandboxes import (
    GRADER_HOME,
    ExecResult,
    FileUser,
    FleetEvent,
    Phase,
    SandboxSpec,
    SandboxState,
    SandboxUser,
    SandboxView,
    is_host,
    why_no_network,
)
from envkit.types.training import (
    Completion,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    StopReason,
    Trajectory,
    Turn,
    Weights,
)
from envkit.types.worlds import Observation, Reset, Step, Task

__all__ = [
    "GRADER_HOME",
    "JSON",
    "Completion",
    "EpisodeRecord",
    "ExecResult",
    "FileUser",
    "FinishReason",
    "FleetEvent",
    "GenerationRecord",
    "Group",
    "Info",
    "Observation",
    "Options",
    "Phase",
    "Reset",
    "Sample",
    "SamplingParams",
    "SandboxSpec",
    "SandboxState",
    "SandboxUser",
    "SandboxView",
    "Step",
    "StopReason",
    "Task",
    "Trajectory",
    "Turn",
    "TurnRecord",
    "Weights",
    "is_host",
    "stable_hash",
    "why_no_network",
]
