"""What BENCHMARKS.md shows again of a result, and what it tells of the machine."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import Machine, commit_of
from benchmarks.restore import restore
from penstock.lab.bench.result import render
from tests.benchmarks.results import NINE, THREE, result


@pytest.mark.parametrize("rate", [4e8, None])
@pytest.mark.parametrize("cases", [THREE, NINE])
def test_a_result_from_json_is_the_result(rate: float | None, cases: tuple[object, ...]) -> None:
    plain = result(rate, NINE if len(cases) == len(NINE) else THREE)
    again = restore(plain)
    assert again.to_dict() == plain and again.cases == cases
    assert restore(result(virtual="asleep")).virtual == "asleep"
    assert render(again).count("\n|") == 2 + len(cases)


def test_facts_hold_neither_paths_nor_the_name_of_the_host() -> None:
    values = [str(value) for value in Machine.here().to_dict().values()]
    assert not any(re.search(r"(^|\s)/\w", value) for value in values)
    assert not any(re.search(rf"\b{re.escape(platform.node())}\b", value) for value in values)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_says_whether_files_differ(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = commit_of(tmp_path)
    assert clean is not None and re.fullmatch(r"[0-9a-f]{10,}", clean)
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{clean}+"
