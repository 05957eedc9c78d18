"""Diagnostics, which run in every training run and name what is wrong with it. This package does not import torch."""

from .checks import Finding, PushProbe, TrainStep
from .monitor import Diagnostics, Probe

__all__ = ["Diagnostics", "Finding", "Probe", "PushProbe", "TrainStep"]
