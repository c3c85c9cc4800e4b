"""Checks that the parts of a layer fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.moe.config import REFUSED
from penstock.placement import ExpertPlacement, PlacementError
from penstock.routing.legs import Dispatch, Place
from penstock.routing.routes import RouteMaker

if TYPE_CHECKING:
    from penstock.moe.experts import Experts
    from penstock.moe.hooks import Hook
    from penstock.moe.permute.sort import Permutation
    from penstock.moe.routers import Router


def check_parts(
    gate: Router,
    permutation: Permutation,
    expert: Experts,
    dispatch: Dispatch,
    hooks: tuple[Hook, ...],
    ep_size: int,
) -> None:
    """Raise ValueError that says which parts do not fit, why, and what would."""
    check_dispatch(permutation, dispatch)
    if gate.kind not in permutation.kinds:
        takes = f"it takes choices of kind {' or '.join(permutation.kinds)}, not {gate.kind}"
        reasons = {(str(kind), str(name)): why for (kind, name), why in REFUSED.items()}
        why = reasons.get((gate.kind, permutation.name), takes)
        raise ValueError(f"{type(gate).__name__} with {type(permutation).__name__}: {why}")
    held = expert.num_local_experts * ep_size
    if gate.num_experts != held:
        raise ValueError(
            f"the gate chooses among num_experts = {gate.num_experts}, but {ep_size} rank(s) with "
            f"{expert.num_local_experts} experts each hold {held}; build {type(expert).__name__} with "
            f"num_local_experts = num_experts / ep_size"
        )
    encoding = next((hook for hook in hooks if hook.encodes_rows), None)
    if encoding is not None and permutation.row_counts:
        raise ValueError(
            f"{type(encoding).__name__} with one copy per rank or node: numbers that travel with the rows "
            "would be rounded; use only one of the two"
        )
    for name, number in (("num_experts", gate.num_experts), ("ranks", ep_size)):
        built_for = getattr(permutation, name, number)
        if built_for != number:
            raise ValueError(
                f"{type(permutation).__name__} was built for {name} = {built_for}, but the layer has {name} "
                f"= {number}: num_experts of {type(gate).__name__}, ranks that share the experts"
            )


def check_dispatch(permutation: Permutation, dispatch: Dispatch, node_size: int | None = None) -> None:
    """Raise ValueError unless `permutation` makes rows for as many ranks as `dispatch` brings them to.

    node_size: ranks of an expert group in one node, where that is known.
    """
    made_for = getattr(permutation, "node_size", 1)
    if made_for > 1 and not dispatch.joins_rows:
        raise ValueError(
            f"{type(permutation).__name__}(node_size={made_for}) makes one row for all of a token's experts "
            f'in a node, and dispatch {dispatch.name} brings a row to one rank: use dispatch="node_once", or '
            "node_size=1"
        )
    if not dispatch.joins_rows:
        return
    if not permutation.row_counts:
        raise ValueError(
            f"dispatch {dispatch.name} sends one row for all of a token's experts in a node, and "
            f"{type(permutation).__name__} makes one for each: use MergedPermutation(..., node_size=ranks of "
            'a node, rank=ep_rank), or dispatch="hierarchical_2d"'
        )
    if node_size is not None and node_size != made_for:
        raise ValueError(
            f"{type(permutation).__name__} was built for node_size = {made_for}, and {node_size} ranks of an "
            f"expert group are in one node: build it with node_size={node_size}"
        )


def route_maker(dispatch: Dispatch, place: Place, permutation: Permutation) -> RouteMaker:
    """Return the maker of the routes of whole experts. Raises ValueError for a permutation of other nodes."""
    check_dispatch(permutation, dispatch, place.node_size)
    return RouteMaker(dispatch, place, permutation.row_counts)


def check_placement(placement: ExpertPlacement, num_experts: int, ep_size: int, slots: int) -> None:
    """Raise PlacementError unless a layer of these sizes can run under `placement`."""
    if placement.has_replicas:
        raise PlacementError(
            "the placement gives an expert several homes, and a layer does not sum gradients of replicas "
            "inside an expert group yet: give every expert one home"
        )
    for name, found, wanted in (
        ("experts", placement.num_experts, num_experts),
        ("ranks", placement.ranks, ep_size),
        ("slots per rank", placement.slots, slots),
    ):
        if found != wanted:
            raise PlacementError(
                f"the placement has {found} {name}, and the layer has {wanted}: make one for this layer"
            )
