"""The autopilot: measures the cluster, chooses a plan, tries others, and corrects it during training."""

from penstock.autopilot.autopilot import Autopilot

__all__ = ["Autopilot"]
