"""What the legs of a dispatch move, if routing is even."""

from __future__ import annotations

from penstock.ops import Op


def busiest_share(dispatch: str, op: str, nodes: int, node_size: int) -> float:
    """Bytes over the link of the busiest rank in one leg, per byte of the rows that each rank has.

    flat: all but a rank's own share. hierarchical_2d: each rank exchanges with its node, then along its rail.
    hierarchical_1d: the first rank of a node gathers, exchanges and scatters for all of them.
    """
    ranks = nodes * node_size
    inside = op not in (Op.DISPATCH, Op.COMBINE)
    if dispatch == "flat":
        return (ranks - 1) / ranks
    if dispatch == "hierarchical_2d":
        return (node_size - 1) / node_size if inside else (nodes - 1) / nodes
    return node_size - 1.0 if inside else node_size * (nodes - 1) / nodes
