"""Row counts of transfers: what one rank sends is what the other receives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe import ChunkRoute, Routes


def test_splits_are_sums_over_the_experts_of_a_rank() -> None:
    route = ChunkRoute(sent=[[1, 2], [0, 4]], received=[[3, 0], [5, 6]])
    assert route.input_splits == [3, 4]
    assert route.output_splits == [3, 11]


def test_even_routes_send_the_slots_of_every_chunk_to_every_expert() -> None:
    routes = Routes.even((5, 0), ep_size=2, local_experts=3)
    assert [chunk.input_splits for chunk in routes.chunks] == [[15, 15], [0, 0]]
    assert [chunk.output_splits for chunk in routes.chunks] == [[15, 15], [0, 0]]
    assert routes.chunks[0].received == [[5, 5, 5], [5, 5, 5]]


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99), st.sampled_from([1, 2, 4])
)
def test_exchanged_counts_agree_between_ranks(
    ranks: int, chunks: int, local_experts: int, seed: int, most: int
) -> None:
    """Simulates the exchange: rank r gets [source][chunk][local expert] where source sent to r."""
    generator = torch.Generator().manual_seed(seed)
    # [source, target, chunk, local expert]
    table = torch.randint(0, most, (ranks, ranks, chunks, local_experts), generator=generator)
    routes = [Routes.from_counts(table[r].tolist(), table[:, r].tolist()) for r in range(ranks)]
    for mine in range(ranks):
        assert len(routes[mine].chunks) == chunks
        for c, chunk in enumerate(routes[mine].chunks):
            assert list(chunk.sent) == table[mine, :, c].tolist()
            for peer in range(ranks):
                assert chunk.input_splits[peer] == routes[peer].chunks[c].output_splits[mine]
                assert chunk.sent[peer] == routes[peer].chunks[c].received[mine]
