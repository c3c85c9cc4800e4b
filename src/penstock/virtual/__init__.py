"""Virtual devices: bigger clusters than the cores of this machine carry. Nothing is computed, all is sent.

Compute tasks sleep as long as the cost model says; transfers are real bytes over the real transport; how
tokens are routed comes from a generator or from a recorded run. Whatever comes out of such a run says so,
see `VirtualConfig.label`.
"""

from penstock.virtual.build import build_routing, build_virtual
from penstock.virtual.config import VirtualConfig
from penstock.virtual.cost import VirtualCost
from penstock.virtual.recorded import RecordedModel, Recording, RoutingRecorder, read_recording
from penstock.virtual.routing import Routing, RoutingSizes
from penstock.virtual.stack import VirtualStack

__all__ = [
    "RecordedModel",
    "Recording",
    "Routing",
    "RoutingRecorder",
    "RoutingSizes",
    "VirtualConfig",
    "VirtualCost",
    "VirtualStack",
    "build_routing",
    "build_virtual",
    "read_recording",
]
