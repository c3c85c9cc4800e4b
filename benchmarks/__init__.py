"""Measurements and studies that the package does without: run them from this folder's parent.

`python -m benchmarks.suite .` runs all that BENCHMARKS.md shows. Each part is a command of its own:

- `collectives`: the transport alone, how near it comes to the wire.
- `sft`: TRL's script for fine-tuning, beside the expert parallelism of other systems.
- `overlap`: the picture of the README.
- `layer`: the MoE layer in one process, beside other implementations.
- `drift`: training while the network or a rank gets slower.
- `published`: the layers of three studies, by simulation.
- `calibration`: constants of the papers' clusters, and how far predictions are from what others measured.

Ctrl-C ends each of them; what had been measured until then is printed.

`peers` holds the other systems that `penstock bench --peers` compares with.
"""

import sys

from penstock.stops import STOPS


def hear_stops() -> None:
    """Take the signals that ask this process to stop, unless it takes them already.

    The handlers say so, and not a flag, which a forked process would inherit without them.
    """
    if not STOPS.hears:
        STOPS.hear()


if sys.argv[:1] == ["-m"]:  # `python -m benchmarks.NAME` is about to load its modules
    hear_stops()
