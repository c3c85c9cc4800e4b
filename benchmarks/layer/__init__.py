"""The MoE layer in one process: beside other implementations, and its orders beside the machine's copy."""

from benchmarks.layer.benchmark import LayerBenchmark, measure_layer
from benchmarks.layer.render import render_layer

__all__ = ["LayerBenchmark", "measure_layer", "render_layer"]
