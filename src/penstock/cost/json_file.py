"""JSON files that are complete or not there at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.writing import write_whole


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a readable JSON file and make its folder; a half-written file never replaces a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(plain, indent=1) + "\n")
