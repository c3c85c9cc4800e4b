"""The picture of the README is what its command draws."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.overlap import picture

SVG = Path(__file__).parents[2] / "docs" / "overlap.svg"


def test_the_picture_is_that_of_the_simulator() -> None:
    drawn = picture()
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and SVG.read_text() == drawn
