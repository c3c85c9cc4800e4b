"""Other systems in the comparison: their own packages in Penstock's decoder. Needs the extra `peers`.

work = Work(config=config, layout=layout, model=model, batch=batch)
shipped = build_peer("deepspeed", work, "gloo")
receiving = build_peer("deepspeed", work, "penstock")
for peer in (shipped, receiving):
    peer.step()
for peer in (shipped, receiving):
    peer.close()
"""

from __future__ import annotations

from penstock.bench.config import PEERS
from penstock.bench.contender import TransportName
from penstock.bench.peers.installed import require
from penstock.bench.peers.peer import Batch, Peer, Work
from penstock.bench.peers.transport import receives_first

__all__ = ["PEERS", "Batch", "Peer", "Work", "build_peer", "receives_first", "require"]


def build_peer(name: str, work: Work, transport: TransportName) -> Peer:
    """This rank of peer `name`, with the weights of `work.model`. Collective: same calls, same order.

    Its process groups are new ones among the ranks that have joined, so that several peers, also two of a
    kind, live side by side. Raises `ConfigError` if the package is missing or cannot do what is asked for.
    """
    version = require(name)
    if name == "deepspeed":
        from penstock.bench.peers.deepspeed_peer import DeepSpeedPeer

        return DeepSpeedPeer(version, transport, work)
    from penstock.bench.peers.megatron_peer import MegatronPeer

    return MegatronPeer(version, transport, work)
