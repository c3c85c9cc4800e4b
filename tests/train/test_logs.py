"""Where lines go: to the terminal, and to a file of each rank, which grows to a limit and ends no run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.train import logs
from penstock.train.logs import RankLog, show, telling

logger = logging.getLogger("penstock.somewhere")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) penstock\.somewhere: (.*)")


@pytest.fixture(autouse=True)
def shown() -> Iterator[list[str]]:
    """What the terminal shows; nothing shows anything afterwards."""
    before, found = list(logs.PACKAGE.handlers), list[str]()
    show(found.append)
    yield found
    logs.PACKAGE.handlers[:] = before


def lines(path: Path) -> list[tuple[str, str]]:
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    return [(each[1], each[2]) for each in found if each]


def test_the_terminal_shows_decisions_and_the_file_has_everything_with_times(
    tmp_path: Path, shown: list[str]
) -> None:
    with RankLog(3) as log:
        logger.info("before there is a folder")
        log.open(tmp_path)
        logger.debug("a measurement of 100 %")
        logger.warning("another cluster")
        logger.error("the end")
    logger.info("later")
    assert shown == ["before there is a folder", "warning: another cluster", "later"]
    assert lines(tmp_path / "logs" / "rank-00003.log") == [
        ("INFO", "before there is a folder"),
        ("DEBUG", "a measurement of 100 %"),
        ("WARNING", "another cluster"),
        ("ERROR", "the end"),
    ]


def test_only_the_last_to_show_shows_but_all_that_are_told_hear(shown: list[str]) -> None:
    second, told = list[str](), list[str]()
    with telling(told.append):
        logger.debug("a round")
        show(second.append)
        logger.info("a plan")
    logger.info("a step")
    assert (shown, second, told) == ([], ["a plan", "a step"], ["a round", "a plan"])


def test_a_run_that_goes_on_adds_to_its_file(tmp_path: Path) -> None:
    for number in range(2):
        with RankLog(0) as log:
            log.open(tmp_path)
            logger.info(f"start {number}")
    assert [line for _, line in lines(tmp_path / "logs" / "rank-00000.log")] == ["start 0", "start 1"]


def test_a_file_grows_to_its_limit_and_the_one_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 1000)
    with RankLog(0) as log:
        log.open(tmp_path)
        for number in range(100):
            logger.info(f"line {number}")
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank-00000.log", "rank-00000.log.1"]
    kept = [line for name in reversed(files) for _, line in lines(tmp_path / "logs" / name)]
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)]
    assert all((tmp_path / "logs" / name).stat().st_size <= 1000 for name in files)


def test_a_file_that_is_taken_away_is_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RankLog(0) as log:
        log.open(folder)
        logger.info("first")
        folder.rename(tmp_path / "elsewhere")
        logger.info("second")
    assert [line for _, line in lines(folder / "logs" / "rank-00000.log")] == ["second"]


def test_a_file_that_cannot_be_written_is_named_once_and_ends_nothing(
    tmp_path: Path, shown: list[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("as it was")
    (tmp_path / "logs" / "rank-00000.log").symlink_to(tmp_path / "mine")
    with RankLog(0) as log:
        log.open(tmp_path)
        for number in range(3):
            logger.info(f"line {number}")
    warnings = [line for line in shown if line.startswith("warning: ")]
    assert len(warnings) == 1 and str(tmp_path / "logs" / "rank-00000.log") in warnings[0]
    assert [line for line in shown if line not in warnings] == ["line 0", "line 1", "line 2"]
    assert (tmp_path / "mine").read_text() == "as it was"
