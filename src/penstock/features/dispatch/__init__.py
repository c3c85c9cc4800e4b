"""Ways to bring rows to the ranks of their experts, as legs on lanes. No torch."""

from penstock.features.dispatch.built_in import (
    FlatDispatch,
    HierarchicalDispatch1D,
    HierarchicalDispatch2D,
    NodeOnceDispatch,
)
from penstock.ops.core import Hop
from penstock.routing.joined import MOST_NODE_SIZE
from penstock.routing.legs import Dispatch, Leg, Place, Stops

DISPATCHES: dict[str, Dispatch] = {
    dispatch.name: dispatch
    for dispatch in (
        FlatDispatch(),
        HierarchicalDispatch1D(),
        HierarchicalDispatch2D(),
        NodeOnceDispatch(),
    )
}


def find_dispatch(dispatch: Dispatch | str) -> Dispatch:
    """Return a dispatch by its name, or a given dispatch itself.

    Raises:
        ValueError: For an unknown name.
    """
    if not isinstance(dispatch, str):
        return dispatch
    if dispatch not in DISPATCHES:
        raise ValueError(f"no dispatch is called {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return DISPATCHES[dispatch]


def of_hops(hops: tuple[Hop, ...]) -> Dispatch:
    """Return the registered dispatch with these legs."""
    return next(dispatch for dispatch in DISPATCHES.values() if dispatch.hops == hops)


def runnable(nodes: int, node_size: int, *, joins: bool) -> list[str]:
    """Return dispatches that differ on this number of nodes.

    In nodes of one rank, legs inside them would be useless copies, unless they join rows.

    Args:
        joins: Whether rows may be for several experts.
    """
    if nodes == 1:
        return [FlatDispatch.name]
    return [
        name
        for name, dispatch in DISPATCHES.items()
        if not dispatch.needs_table
        or (joins and node_size <= MOST_NODE_SIZE if dispatch.joins_rows else node_size > 1)
    ]


__all__ = [
    "DISPATCHES",
    "Dispatch",
    "FlatDispatch",
    "HierarchicalDispatch1D",
    "HierarchicalDispatch2D",
    "Leg",
    "NodeOnceDispatch",
    "Place",
    "Stops",
    "find_dispatch",
    "of_hops",
    "runnable",
]
