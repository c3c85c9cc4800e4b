"""Parts that every page has: the shell of HTML, its style, and the short script that draws figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from penstock.config import UNSET, ConfigError
from penstock.extras import install, needs
from penstock.report.page.style import FONT, Figure

# The policy makes the browser refuse whatever would leave this file, also from inside the library.
SHELL: Final = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>@TITLE@</title>
<style>
* { box-sizing: border-box; }
body { margin: 0; background: #F4F6F8; color: #1B1F23; font: 15px/1.55 @FONT@; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; }
p { margin: 4px 0 12px; color: #5B646E; max-width: 78ch; overflow-wrap: anywhere; }
p.said { color: #1B1F23; font-size: 16px; }
code, pre { font: 13px/1.5 ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
nav { display: flex; flex-wrap: wrap; gap: 8px; margin: 14px 0 6px; }
nav a { background: white; border: 1px solid #D9DEE3; border-radius: 14px; padding: 3px 12px;
  color: #0B5CAD; text-decoration: none; font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 12px;
  margin: 18px 0; }
.card { background: white; border: 1px solid #E4E7EB; border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 21px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { display: block; color: #5B646E; font-size: 12.5px; line-height: 1.4; }
section { background: white; border: 1px solid #E4E7EB; border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 18px; }
.pair > section { margin-top: 18px; }
.choice { display: inline-flex; gap: 8px; align-items: center; font-size: 13px; color: #5B646E;
  margin: 2px 0 6px; }
select { font: inherit; color: #1B1F23; padding: 3px 6px; border: 1px solid #CBD2D9; border-radius: 6px;
  background: white; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid #E4E7EB; }
th { color: #5B646E; font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 210px; }
tr.total td { font-weight: 600; border-top: 2px solid #CBD2D9; }
td.bar { min-width: 130px; padding: 5px 0 5px 9px; }
.track { position: relative; height: 12px; background: linear-gradient(#CBD2D9, #CBD2D9) center / 1px 100%
  no-repeat; }
.track i { position: absolute; top: 0; bottom: 0; border-radius: 2px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12.5px; margin: 2px 0 4px; }
.quiet { color: #5B646E; }
ul { margin: 6px 0 0; padding-left: 20px; color: #5B646E; overflow-wrap: anywhere; }
details > summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: #F4F6F8; border-radius: 8px; padding: 12px 14px; margin: 10px 0 0; }
@media (max-width: 560px) { main { padding: 18px 10px 40px; } section { padding: 14px 12px; }
  h1 { font-size: 22px; } }
@media print { body { background: white; } section, .card { break-inside: avoid; }
  .choice { display: none; } }
</style>
<script>@LIBRARY@</script>
</head>
<body>
<main>
@BODY@
</main>
<script>
const figures = @FIGURES@;
const config = {displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d",
  "resetScale2d"]]};
function draw(place, name) { Plotly.react(place, figures[name].data, figures[name].layout, config); }
for (const place of document.querySelectorAll("[data-figure]")) draw(place, place.dataset.figure);
for (const choice of document.querySelectorAll("select[data-place]"))
  choice.addEventListener("change", () => draw(document.getElementById(choice.dataset.place), choice.value));
</script>
</body>
</html>
"""


def page(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    """Return HTML with everything in it, plotly.js included. figures: by the names that `body` uses for them.

    Raises ConfigError if the package plotly, from which plotly.js is taken, is not installed.
    """
    parts = {
        "TITLE": escape(title),
        "FONT": FONT,
        "BODY": body,
        "FIGURES": inside_script(figures),
        "LIBRARY": _library(),
    }
    found = SHELL
    for key, text in parts.items():  # the library comes last, so that nothing is replaced inside it
        found = found.replace(f"@{key}@", text, 1)
    return found


def inside_script(plain: Any) -> str:
    """Return JSON that cannot end the script element that holds it."""
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def figure(name: str, label: str) -> str:
    """Return the place of a figure. label: for those who do not see the figure."""
    return f'<div id="{name}" data-figure="{name}" role="img" aria-label="{escape(label)}"></div>'


def choice(place: str, word: str, options: Mapping[str, str]) -> str:
    """Return a menu that draws another figure in the same place; empty where there is only one."""
    if len(options) < 2:
        return ""
    items = "".join(f'<option value="{name}">{escape(text)}</option>' for name, text in options.items())
    return f'<label class="choice">{escape(word)} <select data-place="{place}">{items}</select></label>'


def legend(colours: Mapping[str, str]) -> str:
    """Return the meaning of colours, in lines as long as the screen is wide."""
    items = (
        f'<span><i class="dot" style="background: {colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div class="legend">{"".join(items)}</div>'


def section(title: str, *parts: str) -> str:
    """Return a box with a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of text; kind: of its style."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("penstock report", UNSET, needs("plotly"), install("plotly")) from None
    text: str = get_plotlyjs()
    return text
