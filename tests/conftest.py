"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.left import left_group
from tests.support.pairwise import leave_to_soak
from tests.support.workers import GroupScheduling, slow_first

if TYPE_CHECKING:
    from tests.support.cli import Cli
    from tests.support.ranks import Pools

# torch asks a name server who ::ffff:127.0.0.1 is, at every connection; of many questions at once some are
# lost, and the resolver usually waits five seconds before it asks again.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile(
    "penstock",
    deadline=None,  # no timing assertions: machines are shared
    print_blob=True,
    # A temporary folder or captured output may serve all examples of a property.
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
EXAMPLES = {"quick": 5, "test": 16, "soak": 400}
"""How often `make quick`, `make test` and `make soak` try a property; see also tests/support/draws.py."""

ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Draw as many examples as what was asked for, by its markers, has time for."""
    gc.set_threshold(20_000, 20, 20)  # looking for circles of garbage took a tenth of this process's time
    markers = config.getoption("markexpr")
    kind = "quick" if "not slow" in markers else "soak" if "soak or" in markers else "test"
    settings.register_profile(kind, settings.get_profile("penstock"), max_examples=EXAMPLES[kind])
    settings.load_profile(kind)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone of which every test is slow, where those are not wanted: importing takes seconds."""
    if collection_path.suffix != ".py" or "not slow" not in config.getoption("markexpr"):
        return None
    return True if ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make soak` what repeats other cases of a test; begin with what takes long.

    What starts ranks is slow, unless it is marked `quick`: to load torch for them costs more than their step.
    """
    leave_to_soak(items)
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
    slow_first(items)
    gc.freeze()  # modules and tests stay: no collection of garbage needs to look through them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Of several processes, one runs all tests of a group."""
    return GroupScheduling(config, log)


def pytest_runtest_teardown() -> None:
    """Runs that a failed test has left would keep the processors from all that follow."""
    runs = sys.modules.get("tests.support.runs")  # unless a test has imported it, none was started
    if runs is not None:
        runs.end_started()


@pytest.fixture(scope="module", autouse=True)
def left_as_found() -> Iterator[None]:
    """A file of tests that leaves this process joined fails itself, and not the one that follows here."""
    yield
    group = left_group()
    if group:
        pytest.fail(group, pytrace=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Asks the command in this process."""
    from tests.support.cli import Cli

    return Cli(capsys)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process joins no others for longer than a test, as `penstock.parallelize` does."""
    from penstock.topology import leave  # here: what only hands out tests to workers needs no torch

    yield
    leave()


@pytest.fixture(scope="module")
def brief() -> Iterator[None]:
    """This process searches for orders as briefly as ranks do, see `short_search`."""
    from tests.support.searching import short_search

    with short_search():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(4)` is a pool of four processes that have joined over Gloo."""
    # Here, since what only hands out tests to workers needs no torch.
    from tests.support.ranks import Pools

    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def cards() -> Iterator[Pools]:
    """Pools for `tests.support.card` alone: a process has that device before its first backward."""
    from tests.support.ranks import Pools

    pools = Pools()
    yield pools
    pools.close()
