"""Colours and the layout that all figures of a report share."""

from __future__ import annotations

from typing import Any, Final

from penstock.ops.families import Family

Figure = dict[str, Any]
"""A figure for Plotly: `data` and `layout`."""

TEXT, QUIET, FAINT, GRID, LINE = "#1B1F23", "#5B646E", "#8C959F", "#E4E7EB", "#0B6E99"
SECOND, PAUSE = "#B45F06", "#E4E7EB"
FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

COLOURS: Final = {
    Family.ATTENTION: "#56B4E9",
    Family.EXPERTS: "#0072B2",
    Family.MODEL: "#A5B4C3",
    Family.ROWS: "#E69F00",
    Family.GRADIENTS: "#D55E00",
    Family.OPTIMIZER: "#CC79A7",
    Family.EXCHANGES: "#F0D264",
    Family.HOST: "#009E73",
}
"""Colours after Okabe and Ito, which people with any kind of colour vision can distinguish: blue computes,
orange moves."""
DARK: Final = (Family.EXPERTS, Family.GRADIENTS)
"""Colours on which white is easier to read than black."""
SERIES: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F8790", "#8C510A")


def layout(height: int, **more: Any) -> Figure:
    """Return the layout that all figures share."""
    base = {
        "height": height,
        "margin": {"l": 62, "r": 16, "t": 34, "b": 44},  # above: where the library shows its tools
        "font": {"family": FONT, "size": 12, "color": QUIET},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hoverlabel": {"bgcolor": "white", "align": "left", "font": {"color": TEXT, "size": 12}},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": TEXT}},
        "dragmode": "zoom",
    }
    return base | more


def axis(title: str = "", **more: Any) -> Figure:
    """Return an axis with an unobtrusive grid."""
    base: Figure = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    if title:
        base["title"] = {"text": title, "standoff": 8, "font": {"size": 12}}
    return base | more
