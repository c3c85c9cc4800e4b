"""Pages from templates: each is one file that needs no network, light or dark as its reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.config import UNSET, ConfigError
from penstock.extras import install, needs
from penstock.report.page.style import Figure
from penstock.words import counted

TEMPLATES: Final = Path(__file__).parent
JSON: Final = {"allow_nan": False, "separators": (",", ":")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table. title: its first cell, with a dot of `colour` before it and a quiet `note` behind it.

    bar: from -1 to 1, a bar that ends the row; None = the table has no bars. total: whether the row sums up
    others. strong: whether its title is bold.
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
    """Return the page of a template, plotly.js included. figures: by the names that the template uses.

    folder: where the template is, if not here. Raises ConfigError if the package plotly is not installed.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["counted"] = counted
    environment.policies["json.dumps_kwargs"] = JSON
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("penstock report", UNSET, needs("plotly"), install("plotly")) from None
    text: Any = get_plotlyjs()
    return environment.get_template(template).render(values, figures=figures, library=str(text))
