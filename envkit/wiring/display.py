"""The display of a long command."""

from envkit.trainer_bridge.display import Display, LineDisplay, RichDisplay, SilentDisplay, display_on

__all__ = ["Display", "LineDisplay", "RichDisplay", "SilentDisplay", "display_on"]
