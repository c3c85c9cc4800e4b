"""Transfers between ranks: the collectives of each lane, over process groups or without a network."""

from penstock.runtime.transport.groups import (
    GlooTransport,
    StagedTransport,
    build_transport,
    build_transports,
    exchange,
)
from penstock.runtime.transport.interface import LocalTransport, Transport, Transports, Unconnected

__all__ = [
    "GlooTransport",
    "LocalTransport",
    "StagedTransport",
    "Transport",
    "Transports",
    "Unconnected",
    "build_transport",
    "build_transports",
    "exchange",
]
