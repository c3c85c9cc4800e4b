"""`python -m benchmarks.layer`."""

from benchmarks.command import parser_of, run_alone
from benchmarks.layer import measure_layers, render_layers

run_alone(
    parser_of("layer", "Measures the MoE layer in one process, beside other implementations: one minute."),
    lambda _: measure_layers(),
    render_layers,
)
