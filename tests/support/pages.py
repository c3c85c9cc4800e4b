"""The Python that the documentation shows, found and run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
EXTENDING, OWN_LOOP = ROOT / "docs" / "extending.md", ROOT / "docs" / "own-loop.md"
MOE_LAYER = ROOT / "docs" / "moe-layer.md"
HIDDEN, EXPERTS, CHOICES = 64, 8, 2
"""64 and 8 are the sizes that the documentation writes out."""


@cache
def blocks(path: Path, heading: str) -> list[str]:
    """The Python of one section."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


def run_block(code: str, **known: Any) -> dict[str, Any]:
    """What a block defines."""
    namespace = dict(known)
    exec(code, namespace)
    return namespace
