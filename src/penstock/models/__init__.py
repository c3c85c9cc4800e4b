"""Models that the engine can run."""

from penstock.models.config import ModelConfig
from penstock.models.gpt import GPT
from penstock.models.presets import PRESETS, Preset

__all__ = ["GPT", "PRESETS", "ModelConfig", "Preset"]
