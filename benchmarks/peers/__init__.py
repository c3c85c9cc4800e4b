"""Other systems in the comparison: their own packages in Penstock's decoder. Needs the extra `peers`.

work = Work(config=config, layout=layout, model=model, batch=batch)
shipped = build_peer("deepspeed", work, "gloo")
receiving = build_peer("deepspeed", work, "penstock")
for peer in (shipped, receiving):
    peer.step()
for peer in (shipped, receiving):
    peer.close()
"""

from benchmarks.peers.build import build_peer
from benchmarks.peers.entries import peer_entries, peer_notes, shipped_stack
from benchmarks.peers.installed import require
from benchmarks.peers.peer import Batch, Peer, Work
from benchmarks.peers.transport import receives_first

__all__ = [
    "Batch",
    "Peer",
    "Work",
    "build_peer",
    "peer_entries",
    "peer_notes",
    "receives_first",
    "require",
    "shipped_stack",
]
