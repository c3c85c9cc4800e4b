"""Features of a step, one folder each: ops and their work, passes, planners, settings. No torch.

How a feature runs on ranks stands in the folder of the same name in `runtime/features/`.
"""

from penstock.features.build import build_graph
from penstock.features.table import FEATURES

__all__ = ["FEATURES", "build_graph"]
