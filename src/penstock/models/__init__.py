"""Models that the engine can run."""

from penstock.models.config import ModelConfig
from penstock.models.decoder import MoEDecoder
from penstock.models.presets import PRESETS, Preset

__all__ = ["PRESETS", "MoEDecoder", "ModelConfig", "Preset"]
