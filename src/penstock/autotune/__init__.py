"""Autotune: measures the cluster, chooses a plan, tries others, and corrects it during training."""

from penstock.autotune.autotuner import Autotuner

__all__ = ["Autotuner"]
