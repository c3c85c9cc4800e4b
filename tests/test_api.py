"""What `import penstock` gives is what docs/api.md promises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.config import to_dict
from penstock.config.described import docs_of

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def promised() -> Iterator[tuple[str, list[str] | None]]:
    """Every name of the table, with its parameters if it lists some."""
    for name, listed in re.findall(r"^\| `(\w+)(?:\(([^)]*)\))?` \|", PAGE, re.MULTILINE):
        yield name, [part.strip(" *") for part in listed.split(",")] if listed else None


def test_the_page_lists_all_names_and_no_other() -> None:
    names = [name for name, _ in promised()]
    assert sorted(names) == sorted(penstock.__all__)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "parameters"), list(promised()))
def test_parameters_are_those_of_the_page(name: str, parameters: list[str] | None) -> None:
    found = getattr(penstock, name)
    if parameters is None:
        assert set(to_dict(found())) <= docs_of(found).keys()
    else:
        assert list(inspect.signature(found).parameters) == parameters
    assert found.__doc__


def parts() -> Iterator[tuple[str, str]]:
    """Module and name of every part of a layer that is promised."""
    for row in re.findall(r"^\| (`penstock\..*?) \|", PAGE, re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", row)
        module, _, name = first.rpartition(".")
        yield from ((module, each) for each in (name, *others))


@pytest.mark.parametrize(("module", "name"), list(parts()))
def test_parts_of_a_layer_are_where_the_page_says(module: str, name: str) -> None:
    assert getattr(import_module(module), name).__doc__


def test_commands_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    there = re.findall(r"^ {4}(\w+) ", capsys.readouterr().out, re.MULTILINE)
    sentence = PAGE[PAGE.index("Commands are public") :]
    sentence = sentence[: sentence.index("\n\n")]
    assert set(re.findall(r"`(?:penstock )?(\w+)`", sentence)) == set(there)


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = penstock.nothing
