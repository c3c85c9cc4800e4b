"""The autopilot: measures the cluster, chooses a plan, tries others, keeps it right while training runs."""

from penstock.autopilot.autopilot import Autopilot

__all__ = ["Autopilot"]
