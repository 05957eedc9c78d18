"""Schemas of the configuration files: `RunConfig` for `envkit train` and `ServeConfig` for `envkit serve`."""

from envkit.config.evaluation import EvalConfig
from envkit.config.parts import LivenessSection, RestartSection
from envkit.config.serving import ServeConfig
from envkit.config.training import ImitationSection, RunConfig, complete, dump, load, parse

__all__ = [
    "EvalConfig",
    "ImitationSection",
    "LivenessSection",
    "RestartSection",
    "RunConfig",
    "ServeConfig",
    "complete",
    "dump",
    "load",
    "parse",
]
