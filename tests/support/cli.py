"""The command in the process of the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from tests.support.runs import refused


class Cli:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def prints(self, words: Sequence[str | Path]) -> str:
        """What it prints as it succeeds."""
        self.capsys.readouterr()  # what an earlier command said
        assert main(list(map(str, words))) == 0
        return self.capsys.readouterr().out

    def finds(self, words: Sequence[str | Path]) -> dict[str, Any]:
        """Its one JSON object."""
        found: dict[str, Any] = json.loads(self.prints([*words, "--json"]))
        return found

    def refuses(self, words: Sequence[str | Path]) -> str:
        """What it says of bad usage."""
        return refused(self.capsys, *words)
