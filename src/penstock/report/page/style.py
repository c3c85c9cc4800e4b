"""Colours of figures. What all figures share besides, page.js adds where they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.ops.families import Family

Figure = dict[str, Any]
"""A figure for Plotly: `data` and `layout`."""

TEXT, QUIET, FAINT, GRID, BOX = "var(--text)", "var(--quiet)", "var(--faint)", "var(--grid)", "var(--box)"
LINE, SECOND, HIDDEN, EVEN = "var(--line)", "var(--second)", "var(--hidden)", "var(--even)"
LIMIT = "var(--limit)"
"""Names of colours in page.css, which has two of each: the browser takes that of its reader's theme."""

PAUSES: Final = "pauses"
COLOURS: Final[Mapping[str, str]] = {
    Family.ATTENTION: "#56B4E9",
    Family.EXPERTS: "#0072B2",
    Family.MODEL: "#A5B4C3",
    Family.ROWS: "#E69F00",
    Family.GRADIENTS: "#D55E00",
    Family.OPTIMIZER: "#CC79A7",
    Family.EXCHANGES: "#F0D264",
    Family.HOST: "#009E73",
    PAUSES: GRID,
}
"""Colours after Okabe and Ito, which people with any kind of colour vision can distinguish: blue computes,
orange moves."""
SERIES: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F8790", "#A6692B")


def ink(family: str) -> str:
    """Return the colour of text on a bar of that family, or of pauses."""
    if family == PAUSES:
        return TEXT
    return "white" if family in (Family.EXPERTS, Family.GRADIENTS) else "#1B1F23"


def upright(at: float) -> Figure:
    """Return a dotted line across a figure, where something begins or ends."""
    line = {"color": FAINT, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def axis(title: str, **more: Any) -> Figure:
    """Return an axis with a title; page.js knows what all axes have."""
    return {"title": {"text": title}} | more
