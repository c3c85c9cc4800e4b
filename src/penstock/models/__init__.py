"""Models that the engine can run."""

from penstock.models.config import PRESETS, ModelConfig, Preset
from penstock.models.decoder import MoEDecoder

__all__ = ["PRESETS", "MoEDecoder", "ModelConfig", "Preset"]
