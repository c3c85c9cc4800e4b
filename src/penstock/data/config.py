"""Section `[data]`: where the text comes from and how much of it a step uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Final

from penstock.config import ConfigError, Items, Table, Within, check_bounds
from penstock.config.bounds import FilePath, Name

Samples = Annotated[int, Within(1, 1 << 20, "all samples of a step are in memory at once", hint="Try 8.")]
HeldOut = Annotated[
    float,
    Within(1e-6, 0.5, "the rest of the text is for training, and evaluation needs some", hint="Try 0.05."),
]
Suffixes = Annotated[tuple[Name, ...], Items(100, "which files are text", least=1)]
MOST_PARTS: Final = 1000
LEAST_SHARE: Final = 1e-4
MOST_WEIGHT: Final = 1e12


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how much of it a step uses."""

    path: Name | None = None
    """File or folder of text, JSON lines, Parquet or prepared tokens, or `hf://datasets/OWNER/NAME`
    ([more](data.md)); none = your Python's standard library."""
    mixture: Table = dataclass_field(default_factory=Table)
    """Table of paths and weights, instead of `path`: samples of each in that proportion."""
    tokenizer: Name | None = None
    """A `tokenizer.json`; none = bytes, or what prepared tokens were made with."""
    end_of_document: Name | None = None
    """The token that ends a document; none = the tokenizer's usual one."""
    field: Name = "text"
    """Of JSON lines and Parquet, the field with the text."""
    separate_documents: bool = False
    """Tokens attend to their own document alone, whose positions begin at 0; none is to predict the first
    token of the next ([more](data.md#documents))."""
    cache: FilePath | None = None
    """Where a run keeps tokens that it has to prepare itself; none = `~/.cache/penstock`."""
    batch_per_device: Samples = 8
    """Samples per rank and step, the same ones on the ranks of one `tp` group."""
    held_out_fraction: HeldOut = 0.05
    """Fraction of every text that is held out for evaluation."""
    suffixes: Suffixes = (".py", ".txt", ".md", ".rst", ".jsonl", ".ndjson", ".parquet")
    """Which files of a folder are read; `.TXT` counts as `.txt`."""

    def __post_init__(self) -> None:
        if self.path == "":
            hint = "Leave it out to train on Python's standard library."
            raise ConfigError("path", self.path, "must not be empty", hint)
        check_bounds(self)
        if self.end_of_document is not None and self.tokenizer is None:
            why = "is a token of data.tokenizer, which is not given"
            raise ConfigError("end_of_document", self.end_of_document, why, "Leave it out, or give both.")
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix == ".":
                raise ConfigError(
                    "suffixes", suffix, "must be a file extension with its dot", 'Write it as ".txt".'
                )
        if self.mixture and self.path is not None:
            raise ConfigError("path", self.path, "stands beside a mixture", "Give one of the two.")
        if len(self.mixture) > MOST_PARTS:
            why = f"has {len(self.mixture)} paths and may have {MOST_PARTS}"
            raise ConfigError("mixture", len(self.mixture), why, "Put files into folders.")
        for path, weight in self.mixture:
            if path == "":
                raise ConfigError("mixture", path, "must not have an empty path", "Write . for this folder.")
            if not (type(weight) in (int, float) and 0 < weight <= MOST_WEIGHT):
                why = f"must be a weight above 0, at most {MOST_WEIGHT:g}"
                raise ConfigError(f"mixture.{path}", weight, why, "For example 1.")
        for path, weight in self.mixture:
            if self.parts[path] < LEAST_SHARE:
                why = f"is less than one sample in {round(1 / LEAST_SHARE):,}"
                raise ConfigError(f"mixture.{path}", weight, why, "Raise it, or leave the path out.")

    @property
    def parts(self) -> dict[str | None, float]:
        """Every path with its share of the samples; the shares sum to one."""
        if not self.mixture:
            return {self.path: 1.0}
        whole = math.fsum(weight for _, weight in self.mixture)
        return {path: weight / whole for path, weight in self.mixture}
