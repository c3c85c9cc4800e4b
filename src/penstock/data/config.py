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
    """Where the text comes from and how much of it a step uses.

    `path`               a file, a folder, or None for the standard library of the running Python
    `mixture`            table of paths and weights instead of `path`: samples of each in that proportion
    `tokenizer`          a tokenizer.json; None for bytes, or for the tokenizer of prepared tokens
    `end_of_document`    the token between two documents; None for the tokenizer's usual one
    `field`              the field of JSON lines and Parquet files that holds the text
    `separate_documents` no token attends to another document than its own, or predicts another's first token
    `cache`              where a run keeps tokens that it prepares itself; None for ~/.cache/penstock
    `batch_per_device`   samples per rank and step; ranks that share attention (mp_size) have the same ones
    `held_out_fraction`  share of the text kept for evaluation, at most 0.5
    `suffixes`           which files of a folder are text; a path to one file ignores it

    Raises `ConfigError` naming the field when a value cannot be used.
    """

    path: Name | None = None
    mixture: Table = dataclass_field(default_factory=Table)
    tokenizer: Name | None = None
    end_of_document: Name | None = None
    field: Name = "text"
    separate_documents: bool = False
    cache: FilePath | None = None
    batch_per_device: Samples = 8
    held_out_fraction: HeldOut = 0.05
    suffixes: Suffixes = (".py", ".txt", ".md", ".rst", ".jsonl", ".ndjson", ".parquet")

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
        self._check_mixture()

    @property
    def parts(self) -> dict[str | None, float]:
        """Every path with its share of the samples; the shares sum to one."""
        if not self.mixture:
            return {self.path: 1.0}
        whole = math.fsum(weight for _, weight in self.mixture)
        return {path: weight / whole for path, weight in self.mixture}

    def _check_mixture(self) -> None:
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
