"""What a cluster costs: alpha-beta models, and the volume that each collective moves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import AlphaBeta, ClusterConfig, Span
from penstock.cost.span import span_of
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.step import StepShape
from penstock.topology import Layout
from tests.cost.test_step import workload

UNIT = ClusterConfig(link_latency_s=1.0, link_bytes_per_s=1e3)
"""One second for a round and one for a byte."""

ranks = st.integers(1, 64)


def ring_all_reduce(size: int) -> tuple[int, int]:
    """Rounds, and pieces received by rank 0, of a ring that really sums `size` pieces on `size` ranks."""
    held = [[1 << rank] * size for rank in range(size)]
    rounds = received = 0
    for gathering in (False, True):
        for step in range(size - 1):
            sent = [(rank - step + gathering) % size for rank in range(size)]
            pieces = [held[rank][sent[rank]] for rank in range(size)]
            for rank in range(size):
                source = (rank - 1) % size
                held[rank][sent[source]] = pieces[source] + (0 if gathering else held[rank][sent[source]])
            rounds, received = rounds + 1, received + 1
    assert held == [[(1 << size) - 1] * size] * size
    return rounds, received


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_reduce_costs_what_a_ring_moves(size: int) -> None:
    rounds, received = ring_all_reduce(size)
    model = UNIT.all_reduce(size)
    assert model.alpha_s == rounds
    assert 1e3 * model.beta_s_per_byte == pytest.approx(Fraction(received, size))


@given(ranks)
def test_all_to_all_costs_what_leaves_the_rank(size: int) -> None:
    """The buffer has one share per rank, and its own share stays where it is."""
    shares = [target for target in range(size) if target != 0]
    model = UNIT.all_to_all(size)
    assert model.alpha_s == len(shares)
    assert 1e3 * model.beta_s_per_byte == pytest.approx(len(shares) / size)


# ---- nodes -------------------------------------------------------------------------------------------------

MIB = 1 << 20
SHARED = ClusterConfig(
    link_latency_s=20e-6,
    link_bytes_per_s=12.5e9,
    link_rate_of="node",
    intra_latency_s=10e-6,
    intra_bytes_per_s=15.75e9,
)
"""A 100 Gbit/s card per node, PCIe 3.0 x16 inside."""

OWN = ClusterConfig(
    link_latency_s=10e-6,
    link_bytes_per_s=50e9,
    link_rate_of="device",
    intra_latency_s=5e-6,
    intra_bytes_per_s=450e9,
)
"""A 400 Gbit/s card per device, NVLink inside."""


def test_an_all_to_all_pays_for_what_leaves_the_node() -> None:
    """2 nodes of 8, 64 MiB: half of each device's buffer stays in its node. 8 x 32 MiB = 268.4 MB pass the
    card at 12.5 GB/s: 21.475 ms. Inside 7/16 x 67.1 MB / 15.75 GB/s = 1.86 ms, meanwhile. Seven rounds inside
    and eight across: 70 + 160 us."""
    group = Span.regular(2, 8)
    assert SHARED.all_to_all(group).seconds(64 * MIB) == pytest.approx(21.475e-3 + 0.23e-3, rel=1e-4)
    # With a card each: 33.6 MB at 12.5 GB/s, 2.684 ms.
    own = replace(SHARED, link_rate_of="device").all_to_all(group)
    assert own.seconds(64 * MIB) == pytest.approx(2.684e-3 + 0.23e-3, rel=1e-3)


def test_an_all_reduce_uses_all_cards_of_a_node() -> None:
    """8 x 8 with 50 GB/s each: a card reduces an eighth, 2 x 7/8 x 8 MiB = 14.68 MB: 0.2936 ms.
    Inside 2 x 7/8 x 67.1 MB / 450 GB/s = 0.261 ms, meanwhile. 14 rounds of 5 us inside, 14 of 10 across."""
    model = OWN.all_reduce(Span.regular(8, 8))
    assert model.seconds(64 * MIB) == pytest.approx(0.2936e-3 + 0.21e-3, rel=1e-3)
    # The same where a node's devices share 400 GB/s.
    shared = replace(OWN, link_bytes_per_s=400e9, link_rate_of="node")
    assert shared.all_reduce(Span.regular(8, 8)).seconds(64 * MIB) == pytest.approx(model.seconds(64 * MIB))


def test_in_one_node_the_card_does_not_count() -> None:
    """8 devices, 32 MiB, 450 GB/s: 2 x 7/8 x 33.55 MB = 58.7 MB in 0.1305 ms, and 14 rounds of 5 us."""
    slow = replace(OWN, link_bytes_per_s=1e3, link_latency_s=1.0)
    model = slow.all_reduce(Span.regular(1, 8))
    assert model.seconds(32 * MIB) == pytest.approx(0.1305e-3 + 0.07e-3, rel=1e-3)
    # An all-to-all is half of it: 0.0652 ms and 35 us.
    assert slow.all_to_all(Span.regular(1, 8)).seconds(32 * MIB) == pytest.approx(0.10025e-3, rel=1e-3)


def test_groups_of_the_same_nodes_share_their_card() -> None:
    """4 shards per node, each reducing 10 MB with its like over 8 nodes: 4 x 2 x 7/8 x 10 MB = 70 MB through
    12.5 GB/s: 5.6 ms; exchanging 10 MB: 4 x 7/8 x 10 MB = 35 MB: 2.8 ms. Rounds: 14 and 7 of 20 us."""
    rails = Span.regular(8, 1, at_once=4)
    assert SHARED.all_reduce(rails).seconds(10e6) == pytest.approx(5.6e-3 + 0.28e-3)
    assert SHARED.all_to_all(rails).seconds(10e6) == pytest.approx(2.8e-3 + 0.14e-3)
    own = replace(SHARED, link_rate_of="device")
    assert own.all_reduce(rails).seconds(10e6) == pytest.approx(1.4e-3 + 0.28e-3)


def test_legs_of_a_node_that_shares_its_card() -> None:
    """4 nodes of 2, 800 kB of rows per rank, 1 kB/s. 2D: both send 600 through the card, or one of its own.
    1D: the first sends 3/4 of 1600 alone, through the card or its own."""
    group = Span.regular(4, 2)
    quick = replace(UNIT, link_latency_s=1e-12)
    for unit, across in ((replace(quick, link_rate_of="node"), 1200.0), (quick, 600.0)):
        assert unit.leg("hierarchical_2d", Op.DISPATCH, group).seconds(800e3) == pytest.approx(across)
        assert unit.leg("hierarchical_1d", Op.DISPATCH, group).seconds(800e3) == pytest.approx(1200)


configs = st.builds(
    ClusterConfig,
    link_latency_s=st.floats(1e-6, 1e-3),
    link_bytes_per_s=st.floats(1e8, 1e12),
    link_rate_of=st.sampled_from(["device", "node"]),
    intra_latency_s=st.floats(1e-6, 1e-3),
    intra_bytes_per_s=st.floats(1e8, 1e12),
)
sizes = st.integers(1, 10**10)
COLLECTIVES = ("all_to_all", "all_reduce")


def seconds(cluster: ClusterConfig, name: str, span: Span, size: float) -> float:
    model: AlphaBeta = getattr(cluster, name)(span)
    return model.seconds(size)


@pytest.mark.parametrize("name", COLLECTIVES)
@given(configs, st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), sizes)
def test_more_of_anything_takes_no_less(
    name: str, cluster: ClusterConfig, nodes: int, per_node: int, at_once: int, size: int
) -> None:
    """Bytes, groups at once, slower links; nodes, unless an all-to-all has fewer bytes inside them."""
    span = Span.regular(nodes, per_node, at_once)
    once = seconds(cluster, name, span, size)
    assert seconds(cluster, name, span, 2 * size) >= once
    assert seconds(cluster, name, Span.regular(nodes, per_node, at_once + 1), size) >= once
    for field in ("link_bytes_per_s", "intra_bytes_per_s"):
        slower = replace(cluster, **{field: getattr(cluster, field) / 2})
        assert 2 * once >= seconds(slower, name, span, size) >= once
    if nodes > 1:
        wide = replace(cluster, intra_bytes_per_s=1e18) if name == "all_to_all" else cluster
        more = seconds(wide, name, Span.regular(nodes + 1, per_node, at_once), size)
        assert more >= seconds(wide, name, span, size) * (1 - 1e-9)


@given(configs, st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), sizes)
def test_no_collective_is_faster_than_its_busiest_link(
    cluster: ClusterConfig, nodes: int, per_node: int, at_once: int, size: int
) -> None:
    """Counted pair by pair for an all-to-all. A node must send 2 (N - 1)/N of a tensor to be reduced."""
    ranks = [(node, place) for node in range(nodes) for place in range(per_node)]
    piece = size / len(ranks)
    inside = sum(piece for node, place in ranks if node == 0 and place > 0)
    abroad = sum(piece for node, _ in ranks if node > 0)
    cards = per_node * at_once if cluster.link_rate_of == "device" else 1
    card = cluster.link_bytes_per_s * cards
    span = Span.regular(nodes, per_node, at_once)
    bound = max(inside / cluster.intra_bytes_per_s, per_node * at_once * abroad / card)
    assert seconds(cluster, "all_to_all", span, size) >= bound * (1 - 1e-9)
    reduced = at_once * 2 * (nodes - 1) / nodes * size / card
    scattered = 2 * (per_node - 1) / per_node * size / cluster.intra_bytes_per_s
    assert seconds(cluster, "all_reduce", span, size) >= max(reduced, scattered) * (1 - 1e-9)


@pytest.mark.parametrize("name", COLLECTIVES)
@given(ranks, sizes)
def test_nodes_of_one_device_are_a_flat_group(name: str, size: int, sent: int) -> None:
    """Whoever owns the card, and with the same links inside as between there is no step at a node's edge."""
    even = ClusterConfig()
    flat = getattr(even, name)(size).seconds(sent)
    for rate_of in ("device", "node"):
        assert seconds(replace(even, link_rate_of=rate_of), name, Span.regular(size, 1), sent) == flat
    assert seconds(even, name, Span.regular(1, size), sent) == pytest.approx(flat)


# ---- where groups are --------------------------------------------------------------------------------------


KINDS = [Group.EXPERT, Group.EXPERT_DATA, Group.WORLD]


@given(
    st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 4]), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6])
)
def test_spans_are_those_of_the_layout(kind: Axes, ep_size: int, edp: int, node_size: int) -> None:
    """Also of groups that do not fill whole nodes."""
    world = ep_size * edp
    mesh = Layout(world_size=world, ep_size=ep_size, rank=0, node_size=node_size).mesh
    groups = mesh.groups(kind)
    span = span_of(mesh, kind, node_size)
    on = [[rank // node_size for rank in ranks] for ranks in groups]
    size = len(groups[0])
    assert span == Span.of(on) and span.ranks == size
    leaving = max(
        sum(here != there for nodes in on for here in nodes if here == node for there in nodes) / size
        for node in range(world)
    )
    assert span.leaving == pytest.approx(leaving)
    assert span.nodes == max(len(set(nodes)) for nodes in on)
    assert span.crossing == max(
        sum(node in nodes and len(set(nodes)) > 1 for nodes in on) for node in range(world)
    )


def test_a_regular_group_written_out() -> None:
    """2 nodes of 3, twice: 3 members send 3/6 of a buffer each abroad, in two groups."""
    found = Span.regular(2, 3, at_once=2)
    assert found == Span(ranks=6, nodes=2, most=3, fewest=3, leaving=3.0, crossing=2)
    assert Span.apart(4) == Span(ranks=4, nodes=4, most=1, fewest=1, leaving=0.75, crossing=1)


def test_what_a_workload_says_of_its_groups() -> None:
    work = workload(StepShape(moe_layers=(True,)))  # 4 ranks, expert groups of 2 over 2 nodes
    assert work.span(Group.EXPERT) == Span.regular(2, 1)
    inside = replace(work, node_size=0)
    assert inside.span(Group.WORLD) == Span.apart(4), "nobody knows nodes"
    inside = replace(inside, devices_per_node=2)
    assert inside.span(Group.EXPERT) == Span.of([[0, 0], [1, 1]])
    assert inside.span(Group.EXPERT_DATA) == Span.regular(2, 1, at_once=2), "both share the card"
    assert inside.span(Group.WORLD) == Span.regular(2, 2)


def test_shards_of_a_node_share_its_card() -> None:
    """Groups of 4 shards that fill a node each: every one of 4 devices has its like in the others."""
    whole = workload(StepShape(moe_layers=(True,)), ep_size=4)
    told = replace(whole, world_size=16, tp_size=4, etp_size=4, node_size=1)
    work = replace(told, devices_per_node=4)
    assert work.span(Group.EXPERT) == work.span(Group.DATA) == Span.regular(4, 1, at_once=4)
    assert work.span(Group.EXPERT_SHARDS) == work.span(Group.WORLD) == Span.regular(4, 4)
    inside = Span.of([[node] * 4 for node in range(4)])
    assert work.span(Group.SHARDS) == work.span(Group.TENSOR) == inside
    assert told.span(Group.EXPERT) == work.span(Group.EXPERT), "places in nodes say how large nodes are"
