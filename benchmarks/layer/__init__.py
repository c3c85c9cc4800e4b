"""The MoE layer in one process, beside other implementations."""

from benchmarks.layer.layers import LayerResult, measure_layers
from benchmarks.layer.render import render_layers

__all__ = ["LayerResult", "measure_layers", "render_layers"]
