"""Access of `penstock bench` to the folder `benchmarks/` of the source code, which is not installed with it.

This is the only place where the package uses that folder: other systems and figures are needed to compare,
but not to train.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import penstock
from penstock.config import ConfigError

ROOT = Path(penstock.__file__).parents[2]
"""The folder that contains `src/`, if the package runs from the source code."""


def peers(wanted: str) -> ModuleType:
    """Return `benchmarks.peers`.

    Args:
        wanted: What `--peers` says, for the error if there is no such folder.
    """
    return _load("peers", "--peers", wanted)


def figures(wanted: str) -> ModuleType:
    """Return `benchmarks.figures`.

    Args:
        wanted: What `--plot` says, for the error if there is no such folder.
    """
    return _load("figures", "--plot", wanted)


def _load(name: str, option: str, value: str) -> ModuleType:
    if not (ROOT / "benchmarks" / "__init__.py").exists():
        why = "needs the folder benchmarks/ of the source code, which is not installed with the package"
        hint = "Run pip install --editable . in a copy of the source code."
        raise ConfigError(option, value, why, hint)
    if str(ROOT) not in sys.path:  # placed first, since other projects have a folder of that name, too
        sys.path.insert(0, str(ROOT))
    return import_module(f"benchmarks.{name}")
