"""Progress display of long commands, for modules that must not import the trainer bridge."""

from envkit.trainer_bridge.run_folder.display import display_on

__all__ = ["display_on"]
