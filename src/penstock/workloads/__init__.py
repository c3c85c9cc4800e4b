"""The destinations of tokens where there is no router: named workloads and recorded runs. No torch."""

from penstock.workloads.catalogue import RoutingConfig, routing_of, routing_of_layers
from penstock.workloads.recorded import RecordedModel, Recording, RoutingRecorder, read_recording
from penstock.workloads.routing import Routing, RoutingSizes

__all__ = [
    "RecordedModel",
    "Recording",
    "Routing",
    "RoutingConfig",
    "RoutingRecorder",
    "RoutingSizes",
    "read_recording",
    "routing_of",
    "routing_of_layers",
]
