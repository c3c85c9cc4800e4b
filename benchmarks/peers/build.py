"""Peers by name; the package of each is loaded when it is built."""

from __future__ import annotations

import warnings

from benchmarks.peers.installed import require
from benchmarks.peers.peer import Peer, Work
from penstock.lab.bench.contender import TransportName


def build_peer(name: str, work: Work, transport: TransportName) -> Peer:
    """Return this rank of peer `name`, with the weights of `work.model`. Collective: same calls, same order.

    Its process groups are new ones among the ranks that have joined, so that several peers, also two of a
    kind, live side by side.

    Raises:
        ConfigError: If the package is missing or cannot do what is asked for.
    """
    version = require(name)
    leave_out_renamings()
    if name == "deepspeed":
        from benchmarks.peers.deepspeed_peer import DeepSpeedPeer

        return DeepSpeedPeer(version, transport, work)
    from benchmarks.peers.megatron_peer import MegatronPeer

    return MegatronPeer(version, transport, work)


def leave_out_renamings() -> None:
    """Leave out torch's warnings of functions that it has renamed: packages of peers call them, not we."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
