"""Diagnostics, which run in every training run and name what is wrong with it. This package does not import torch."""

from .events import Finding, PushProbe, TrainStep
from .monitor import Diagnostics, DiagnosticSettings
from .probe import Probe

__all__ = ["DiagnosticSettings", "Diagnostics", "Finding", "Probe", "PushProbe", "TrainStep"]
