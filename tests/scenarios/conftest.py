"""What scenarios need of the machine."""

from __future__ import annotations

import pytest

from tests.support.runs import run


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where machines cannot be emulated, for the reason that the command gives."""
    result = run("emulate", "list")
    if result.returncode != 0:
        pytest.skip(result.stderr.strip())
