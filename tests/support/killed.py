"""What a process leaves that is killed in the middle of its work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "fsync")


def left_by_kills(folder: Path, work: Callable[[], object], copies: Path) -> list[Path]:
    """Copies of `folder` as a SIGKILL would leave it before each step of `work`, and of what the end leaves.

    A step is a call that changes files or their names, so between two of them there is nothing to lose.
    """
    found: list[Path] = []
    copying = False

    def keep() -> None:
        found.append(copies / str(len(found)))
        if folder.exists():
            shutil.copytree(folder, found[-1], symlinks=True)

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal copying
            if not copying:
                copying = True
                keep()
                copying = False
            return step(*given, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watched(getattr(os, name)))
        work()
    keep()
    return found
