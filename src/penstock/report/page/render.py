"""Pages from templates: each is one file that needs no network, light or dark as its reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.config import UNSET, ConfigError
from penstock.extras import install, needs
from penstock.ops.base import Family
from penstock.words import counted

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


def upright(at: float, dash: str = "dot") -> Figure:
    """Return a line across a figure, where something begins or ends."""
    line = {"color": FAINT, "width": 1, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def axis(title: str, **more: Any) -> Figure:
    """Return an axis with a title; page.js knows what all axes have."""
    return {"title": {"text": title}} | more


TEMPLATES: Final = Path(__file__).parent
JSON: Final = {"allow_nan": False, "separators": (",", ":")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        title: Its first cell, with a dot of `colour` before it and a quiet `note` behind it.
        bar: From -1 to 1, a bar that ends the row; None = the table has no bars.
        total: Whether the row is the sum of others.
        strong: Whether its title is bold.
    """

    title: str
    cells: Sequence[str]
    colour: str | None = None
    note: str = ""
    bar: float | None = None
    strong: bool = False
    total: bool = False


def render(
    template: str, figures: Mapping[str, Figure], *, folder: Path = TEMPLATES, **values: object
) -> str:
    """Return the page of a template, plotly.js included.

    Args:
        template: The file name of the template.
        figures: Figures by the names that the template uses.
        folder: The folder of the template.
        values: Everything else that the template shows, by name.

    Raises:
        ConfigError: If the package plotly is not installed.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, "unbroken": _unbroken}
    environment.policies["json.dumps_kwargs"] = JSON
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("penstock report", UNSET, needs("plotly"), install("plotly")) from None
    text: Any = get_plotlyjs()
    return environment.get_template(template).render(values, figures=figures, library=str(text))


def _unbroken(sentence: str) -> str:
    """Return a sentence in which no line ends before a percent sign."""
    return sentence.replace(" %", "\N{NO-BREAK SPACE}%")
