"""Virtual devices: bigger clusters than the cores of this machine carry. Nothing is computed, all is sent.

Compute tasks sleep as long as the cost model says; transfers are real bytes over the real transport; how
tokens are routed comes from a workload, generated or recorded. Whatever comes out of such a run says so,
see `VirtualConfig.label`.
"""

from penstock.virtual.build import build_virtual
from penstock.virtual.config import VirtualConfig
from penstock.virtual.stack import VirtualStack

__all__ = ["VirtualConfig", "VirtualStack", "build_virtual"]
