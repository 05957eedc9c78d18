"""The trackers of a run, to which its metrics are sent, and its filters of groups."""

from __future__ import annotations

from envkit.config.parts import SuccessBandSection, TopVarianceSection, ZeroVarianceSection
from envkit.protocols import Tracker
from envkit.trainer_bridge.scheduler.filters import SuccessBand, TopVariance, ZeroVariance
from envkit.wiring.contexts import TrackerContext


def open_tensorboard(context: TrackerContext) -> Tracker:
    """Create an event file for TensorBoard in the folder ``tensorboard`` of the run."""
    from envkit.trainer_bridge.run_folder.tensorboard import EventFile  # imported late: loads tensorboard, if installed

    return EventFile(context.folder / "tensorboard", first_step=context.first_step)


def open_wandb(context: TrackerContext) -> Tracker:
    """Start a run of Weights & Biases, or continue that of a resumed run."""
    from envkit.trainer_bridge.run_folder.wandb_run import WandbRun  # imported late: loads wandb, if installed

    return WandbRun(context.folder, first_step=context.first_step, config=context.config)


def open_zero_variance(section: ZeroVarianceSection) -> ZeroVariance:
    return ZeroVariance()


def open_success_band(section: SuccessBandSection) -> SuccessBand:
    return SuccessBand(section.low, section.high)


def open_top_variance(section: TopVarianceSection) -> TopVariance:
    return TopVariance(section.share)
