"""Models that the engine can run."""

from penstock.models.config import PRESETS, ModelConfig
from penstock.models.decoder import MoEDecoder

__all__ = ["PRESETS", "MoEDecoder", "ModelConfig"]
