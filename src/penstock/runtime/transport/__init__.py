"""Transfers between ranks: the collectives of each lane, over process groups or without a network."""

from penstock.runtime.transport.groups import GlooTransport, build_transport, build_transports, exchange
from penstock.runtime.transport.interface import LocalTransport, Transport, Transports, Unconnected

__all__ = [
    "GlooTransport",
    "LocalTransport",
    "Transport",
    "Transports",
    "Unconnected",
    "build_transport",
    "build_transports",
    "exchange",
]
