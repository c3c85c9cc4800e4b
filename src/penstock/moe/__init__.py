"""The mixture-of-experts layer, in parts that are exchanged without touching the scheduler."""

from penstock.moe.config import MoEConfig
from penstock.moe.layer import MoELayer
from penstock.moe.routes import ChunkRoute, Routes

__all__ = ["ChunkRoute", "MoEConfig", "MoELayer", "Routes"]
