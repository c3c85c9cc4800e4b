"""The report of a run in a real browser: figures are drawn, menus work, nothing is wider than the window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.report.page.html import write_page
from tests.report.page.examples import finished
from tests.support.patience import HANG_S

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--disable-background-networking"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", QUIET)


ASK = """<script>
const wrong = [];
addEventListener("error", event => wrong.push(event.message));
addEventListener("securitypolicyviolation", event => wrong.push(event.violatedDirective));
addEventListener("load", () => {
  const drawn = {}, chosen = {};
  for (const choice of document.querySelectorAll("select[data-place]")) {
    choice.selectedIndex = choice.options.length - 1;
    choice.dispatchEvent(new Event("change"));
    const place = document.getElementById(choice.dataset.place);
    chosen[place.id] = place.dataset.figure === choice.value;
  }
  for (const place of document.querySelectorAll("[data-figure]"))
    drawn[place.id] = place.querySelectorAll(".plot-container .main-svg").length;
  const themes = [0, 1].map(() => {
    document.getElementById("theme").click();
    const places = [...document.querySelectorAll("[data-figure]")];
    const drawn = new Set(places.map(place => place.layout.template.layout.paper_bgcolor));
    const text = getComputedStyle(document.querySelector("p.said")).color;
    const box = getComputedStyle(document.querySelector("section")).backgroundColor;
    return {theme: root.dataset.theme, box, text, drawn: [...drawn]};
  });
  const width = root.scrollWidth;
  root.dataset.found = JSON.stringify({themes, wrong, drawn, chosen, width, window: innerWidth});
});
</script>"""
"""Asked inside the page, when it has been drawn."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: install Debian's package chromium, or Chrome"),
]


def shown(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What the page says of itself in a window of that width."""
    path = folder / "page.html"
    path.write_text(page.replace("<main>", f"{ASK}<main>", 1))
    size, profile = f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"
    words = [str(BROWSER), *OPTIONS, size, profile, "--dump-dom", path.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True)
    (found,) = re.findall(r'data-found="(.*?)"', result.stdout)
    parsed: dict[str, Any] = json.loads(found.replace("&quot;", '"'))
    return parsed


@pytest.mark.parametrize("width", [520, 1400])
def test_everything_is_drawn_inside_the_window(tmp_path: Path, width: int) -> None:
    """Also with names that have no place to break."""
    run = finished(name="runs/" + "x" * 200, failures=("failure-rank1.txt: " + "y" * 300,))
    found = shown(write_page(run), tmp_path, width)
    assert found["wrong"] == []
    assert found["drawn"] and all(count > 0 for count in found["drawn"].values())
    assert found["chosen"] == {"timeline": True, "loads-time": True}
    themes = {each["theme"]: each for each in found["themes"]}
    assert themes.keys() == {"light", "dark"}, "one after the other, wherever the system begins"
    assert all(each["drawn"] == [each["box"]] for each in themes.values()), "figures change with the page"
    assert (
        themes["light"]["box"] != themes["dark"]["box"] and themes["light"]["text"] != themes["dark"]["text"]
    )
    assert found["width"] <= found["window"], "nothing is wider than the window"
