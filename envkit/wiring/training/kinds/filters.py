"""The filters of groups that envkit has; see `envkit.trainer_bridge.scheduler.filters`."""

from __future__ import annotations

from envkit.config.parts import SuccessBandSection, TopVarianceSection, ZeroVarianceSection
from envkit.trainer_bridge.scheduler.filters import SuccessBand, TopVariance, ZeroVariance


def open_zero_variance(section: ZeroVarianceSection) -> ZeroVariance:
    return ZeroVariance()


def open_success_band(section: SuccessBandSection) -> SuccessBand:
    return SuccessBand(section.low, section.high)


def open_top_variance(section: TopVarianceSection) -> TopVariance:
    return TopVariance(section.share)
