"""`penstock list`: every name that other commands take, in tables that fit the terminal."""

from __future__ import annotations

import pytest

from penstock.cli import main
from penstock.cost.clusters import names
from penstock.cost.devices import DEVICES
from penstock.plan.models import MODELS, open_models
from penstock.schedule import SCHEDULES
from penstock.workloads import RoutingConfig
from penstock.workloads.catalogue import READ_BY
from tests.support.cli import Cli


def test_all_names_are_listed(cli: Cli) -> None:
    found = {kind: [row["name"] for row in rows] for kind, rows in cli.finds(["list"]).items()}
    assert found == {
        "open": list(open_models()),
        "devices": [each.name for each in DEVICES],
        "models": list(MODELS),
        "clusters": list(names()),
        "schedules": list(SCHEDULES),
        "workloads": list(READ_BY),
    }
    assert RoutingConfig().routing in found["workloads"]


@pytest.mark.parametrize("what", ["open", "devices", "models", "clusters", "schedules", "workloads"])
def test_one_kind_fits_the_terminal(what: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is cut off: each row's last word is there."""
    monkeypatch.setenv("COLUMNS", "80")
    text = cli.prints(["list", what])
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    values = [each for row in cli.finds(["list", what])[what] for each in row.values()]
    plain = [each for value in values for each in (value if isinstance(value, list) else [value])]
    assert all(word in text for each in plain for word in str(each).removesuffix(".0").split())
    assert not any(isinstance(each, str) and each[0].isdigit() for each in plain), "numbers are numbers"


def test_heads_take_one_line_where_there_is_room(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    _, _, head, rule, *_ = cli.prints(["list", "models"]).splitlines()
    assert "hidden / expert hidden" in head and set(rule.strip()) == {"─"}


@pytest.mark.parametrize(("what", "number"), [("models", len(MODELS)), ("devices", len(DEVICES))])
def test_a_model_and_a_device_take_one_line_each(
    what: str, number: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, rows = cli.prints(["list", what]).split("─\n")
    assert len(rows.strip().splitlines()) == number


def test_an_unknown_kind_is_refused_with_all_that_there_are(cli: Cli) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["list", "gpus"])
    assert stop.value.code == 2
    assert "'clusters'" in cli.capsys.readouterr().err
