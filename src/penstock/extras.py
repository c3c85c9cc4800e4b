"""Packages that Penstock can do without: which extra of the installation brings them, in one sentence."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

EXTRAS: Final = {
    "bayes_opt": ("bayesian-optimization", "tuning"),
    "datasets": ("datasets", "hub"),
    "matplotlib": ("matplotlib", "plots"),
    "plotly": ("plotly", "report"),
    "pyarrow": ("pyarrow", "parquet"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "tokenizers": ("tokenizers", "tokenizers"),
    "transformers": ("transformers 5", "transformers"),
}
"""By module, the package's name and the extra of pyproject.toml. wandb, which is large, is not in `dev`."""


def is_there(module: str) -> bool:
    """Return whether a package is installed, without loading it."""
    return find_spec(module) is not None


def needs(module: str) -> str:
    """Return `needs the package matplotlib`, the end of a sentence about what needs the package."""
    return f"needs the package {EXTRAS[module][0]}"


def install(module: str) -> str:
    """Return the instruction to install the package of `module`, as a sentence."""
    return f"Install it: pip install 'penstock[{EXTRAS[module][1]}]'."
