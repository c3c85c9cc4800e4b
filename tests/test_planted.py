"""Planted faults follow the code: the line of each stands there once, and its tests exist."""

from __future__ import annotations

import ast

import pytest

from tests.planted import FAULTS, PACKAGE, TESTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{i}-{each.file}" for i, each in enumerate(FAULTS, 1)])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (PACKAGE / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, "let it follow the code, or replace it by one like it"
    ast.parse(text.replace(fault.old, fault.new))
    assert fault.old != fault.new and all((TESTS / each).exists() for each in fault.tests.split())
