"""Ways to bring rows to the ranks of their experts, as legs on lanes. Pure Python: no torch."""

from penstock.dispatch.base import Dispatch, Leg, Place
from penstock.dispatch.flat import FlatDispatch
from penstock.dispatch.hierarchical import HierarchicalDispatch1D, HierarchicalDispatch2D
from penstock.mesh import Group
from penstock.ops import Op

DISPATCHES: dict[str, Dispatch] = {
    dispatch.name: dispatch
    for dispatch in (FlatDispatch(), HierarchicalDispatch1D(), HierarchicalDispatch2D())
}


def find_dispatch(dispatch: Dispatch | str) -> Dispatch:
    """A dispatch by its name, or itself. Raises ValueError for a name that none has."""
    if not isinstance(dispatch, str):
        return dispatch
    if dispatch not in DISPATCHES:
        raise ValueError(f"no dispatch is called {dispatch!r}; there are {', '.join(DISPATCHES)}")
    return DISPATCHES[dispatch]


__all__ = [
    "DISPATCHES",
    "Dispatch",
    "FlatDispatch",
    "Group",
    "HierarchicalDispatch1D",
    "HierarchicalDispatch2D",
    "Leg",
    "Op",
    "Place",
    "find_dispatch",
]
