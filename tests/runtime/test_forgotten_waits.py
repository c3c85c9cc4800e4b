"""A rank fails while a message is partly on its way: Gloo forgets who waits for it, and no step may.

The connection is slowed down, so that the message is certainly under way, on both ranks, when one fails.
"""

from __future__ import annotations

import socket
import sys

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from penstock.mesh import Group
from penstock.runtime.executor import LaneError, ThreadLanes
from penstock.runtime.transport import GlooTransport, exchange
from penstock.topology import Layout, lane_groups
from penstock.topology.faults import FaultWatcher, give_up, watch
from tests.runtime.test_lanes import COMPUTE, INTER, run
from tests.support.patience import wait_for
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux slows single connections down")

SO_MAX_PACING_RATE = 47
RATE_BYTES_PER_S = 1 << 18
MESSAGE_BYTES = 1 << 26
"""More than four minutes at this rate."""
NEVER_S = 3600.0


def fail_in_the_middle_of_a_message(rank: int) -> list[str]:
    """How steps end: rank 0 sends and fails, rank 1 waits for what it receives, and tries again."""
    watch(FaultWatcher(PrefixStore("faults", _get_default_store()), rank, 2))
    layout = Layout(world_size=2, ep_size=2, rank=rank)
    transport = GlooTransport(lambda: lane_groups(layout, NEVER_S))
    transport._sockets._each(lambda s: s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE_BYTES_PER_S))
    lanes, news, nothing = ThreadLanes(transport.abort), torch.zeros(1), torch.empty(0, dtype=torch.uint8)
    message = torch.full((MESSAGE_BYTES,), 1 - rank, dtype=torch.uint8)
    dist.barrier()

    def transfer() -> None:
        inbox, outbox = [nothing, nothing], [nothing, nothing]
        (outbox if rank == 0 else inbox)[1 - rank] = message
        exchange(inbox, outbox, transport._groups[Group.EXPERT])

    def compute() -> None:
        if rank == 0:
            dist.recv(news, 1)
            raise ValueError("in computation")
        wait_for(lambda: message[0])
        dist.send(news, 0)

    def ending() -> str:
        try:
            run(
                lanes,
                {COMPUTE[0]: compute, INTER[0]: transfer, COMPUTE[1]: lambda: None},
                {COMPUTE[1]: (INTER[0],)},
            )
        except LaneError as error:
            return f"{error.task}: {error.__cause__!r}"
        return "finished"

    first = ending()
    if rank == 0:
        give_up("ValueError: in computation")
    assert rank == 0 or not message[-1], "the message was under way"
    endings = [first, ending()] if rank == 1 else [first]
    watch(None)
    return endings


@pytest.mark.slow
def test_a_rank_that_fails_and_one_that_waits_for_the_rest_of_a_message_end() -> None:
    pool = RankPool(2)
    try:
        (failed,), heard = pool.run(fail_in_the_middle_of_a_message)
    finally:
        pool.close()
    assert failed == f"{COMPUTE[0]}: ValueError('in computation')"
    assert heard == [f"{INTER[0]}: PeerLostError('rank 0 has ended: ValueError: in computation')"] * 2
