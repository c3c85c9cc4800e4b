"""`python -m benchmarks.layer`."""

from benchmarks.command import parser_of, run_alone
from benchmarks.layer import measure_layer, render_layer

run_alone(
    parser_of("layer", "Measures the MoE layer in one process, beside other implementations: two minutes."),
    lambda _: measure_layer(),
    render_layer,
)
