"""docs/planning.md shows what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.plan.models import open_models
from tests.support.cli import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```\n\$ penstock (plan .*)\n((?:(?!```).*\n)*)```", PAGE)
"""Commands and what the page shows of their output."""

CLUSTERS = ("4x8xA100-80GB,net=100gbit", "4x8xRTX4090,net=25gbit")
ROWS = {
    cells[0]: cells[1:] for line in PAGE.splitlines() if (cells := line.split()) and cells[0] in open_models()
}
"""By model: tokens/s, GiB and seconds of the answer, on either cluster."""


def test_all_open_models_are_in_the_table_and_the_page_is_short() -> None:
    assert sorted(ROWS) == sorted(open_models())
    assert all(float(cells[i]) <= 10 for cells in ROWS.values() for i in (2, 5))
    assert len(SHOWN) == 5
    assert len(PAGE.split()) <= 2400


@pytest.mark.soak
@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_every_line_that_is_shown_is_printed(
    command: str, shown: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    printed = [line.rstrip() for line in cli.prints(command.split()).splitlines()]
    wanted = [line.rstrip() for line in shown.splitlines() if line.strip() not in ("...", "")]
    assert [line for line in wanted if line not in printed] == []


@pytest.mark.soak
@pytest.mark.parametrize("place", range(len(CLUSTERS)))
@pytest.mark.parametrize("model", open_models())
def test_the_table_has_the_answers_for_open_models(
    model: str, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    speed, memory, _ = ROWS[model][3 * place : 3 * place + 3]
    code = main(["plan", "--model", model, "--cluster", CLUSTERS[place], "--json"])
    printed = capsys.readouterr()
    if code == 0:
        found: dict[str, Any] = json.loads(printed.out)
        assert speed == f"{found['throughput']['tokens_per_s']:,.0f}"
        assert memory == f"{found['memory_bytes'] / 2**30:.1f}"
    else:
        assert f"least memory needs an estimated {memory} GiB per rank" in printed.err
        fits = {"It would fit with": "other", "In stages it would fit": "stages"}
        assert speed == next((word for said, word in fits.items() if said in printed.err), "-")
