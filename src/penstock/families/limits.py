"""Limits of what the configuration in a folder may ask for: no more than its weights bear out, and no code.

transformers follows a config.json: it makes lists and modules of any length, and takes attention and experts
from where it says, from other people's repositories, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from penstock.config import UNSET, ConfigError
from penstock.topology.local import free_memory_bytes
from penstock.words import gib

COPY = "Copy it again from where the model's files come from"

CODE = re.compile(r"_implementation(_internal)?$")
"""Pattern in the names of settings that say which code runs."""

OWN_CODE = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Implementations in torch and transformers; transformers fetches or imports others."""

QUANTIZED = ("quantization_config", "compression_config")
OTHER_FILES = "configuration_files"
"""Setting that names other files, from which transformers would read in place of this one."""

DEEPEST = 32
"""Most tables and lists inside each other."""

LAYERS = re.compile(r"(layers?|depths?|blocks)$")
"""Pattern in the names of numbers of layers, each of which has a tensor at least."""

NO_SIZES = re.compile(r"position|theta|window|length|seq|context|seed|token|factor|max_")
"""Pattern in the names of numbers that size no weights."""

LARGEST = 1 << 53
"""The largest integer that floating point holds, too; positions and seeds may be as large."""

FEWEST_LAYERS, SMALLEST = 1 << 10, 1 << 20
"""Numbers of layers, and others, that no folder is too small for: they cost seconds and some MiB."""

BYTES_PER_UNIT = 16
"""Bytes of weights, at least, for every unit of a number that sizes them: a row, an expert, a head."""

HEAD = re.compile(r"head_dim$")
"""Pattern in the names of a head's width, every unit of which is a row for each head and layer."""

NARROW_HEAD, WIDE_HEAD, BYTES_PER_WIDTH = 1 << 10, 1 << 14, 1 << 10
"""Widths of heads that no folder is too small for, and that none has; bytes of weights for each between."""

MODULES_PER_TENSOR, FEWEST_MODULES = 64, 20_000
"""Most modules for each tensor that is stored, and a number that no folder is too small for."""

TIMES_AS_WIDE = 8
"""Most bytes of a number in memory for each byte that is stored."""


@dataclass(frozen=True)
class Held:
    """What a folder's weights are.

    Attributes:
        tensors: their number.
        bytes: size of their files.
    """

    tensors: int
    bytes: int


def check_code(file: Path, table: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration that asks for code, for other files, or has quantized weights."""
    for path, value in _settings(file, table):
        if value is not None and value not in OWN_CODE and any(map(CODE.search, path)):
            raise ConfigError(
                _key(file, path),
                value,
                "asks for code that transformers would fetch or import",
                f"Use one of {', '.join(OWN_CODE)}, or leave it out.",
            )
    if OTHER_FILES in table:
        raise ConfigError(
            _key(file, (OTHER_FILES,)),
            table[OTHER_FILES],
            "names other configurations, which are not read",
            "Leave it out.",
        )
    for path, part in _tables(table):
        for setting in QUANTIZED:
            if part.get(setting) is not None:
                key = _key(file, (*path, setting))
                settings = part[setting]
                method = settings.get("quant_method") if isinstance(settings, Mapping) else None
                key, value = (key, settings) if method is None else (f"{key}.quant_method", method)
                raise ConfigError(
                    key,
                    value,
                    "the folder holds quantized numbers, which are not read",
                    "Load the model with from_pretrained, dequantized, and call parallelize or save it.",
                )


def check_sizes(file: Path, table: Mapping[str, Any], held: Held) -> None:
    """Raise ConfigError for a configuration that asks for far more than the weights beside it are."""
    for path, value in _settings(file, table):
        name = next((part for part in reversed(path) if not part.isdecimal()), "")
        if type(value) is int and value > (most := _most(name, held)):
            raise ConfigError(
                _key(file, path),
                value,
                f"is more than {most}, the most that {held.tensors} tensors of {held.bytes} bytes bear out",
                f"{COPY}.",
            )


def _settings(file: Path, value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all settings by their path, also those inside of others; entries of lists have their number."""
    if len(path) > DEEPEST:
        raise ConfigError(
            str(file), UNSET, f"holds more than {DEEPEST} tables and lists inside each other", f"{COPY}."
        )
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _settings(file, each, (*path, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _settings(file, each, (*path, str(number)))
    else:
        yield path, value


def _tables(
    table: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield a table and all tables in it by their path."""
    yield path, table
    for name, each in table.items():
        if isinstance(each, Mapping):
            yield from _tables(each, (*path, name))


def _key(file: Path, path: tuple[str, ...]) -> str:
    """Return the name of a setting in messages."""
    return f"{file}: {'.'.join(path)}"


def _most(name: str, held: Held) -> int:
    """Return the largest value of a setting that weights bear out."""
    if LAYERS.search(name):
        return max(FEWEST_LAYERS, held.tensors)
    if HEAD.search(name):
        return min(WIDE_HEAD, max(NARROW_HEAD, held.bytes // BYTES_PER_WIDTH))
    return LARGEST if NO_SIZES.search(name) else max(SMALLEST, held.bytes // BYTES_PER_UNIT)


@contextmanager
def few_modules(held: Held) -> Iterator[None]:
    """Raise ValueError, inside this context, when more modules are made than these weights can belong to."""
    most, made = max(FEWEST_MODULES, MODULES_PER_TENSOR * held.tensors), 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ValueError(f"it has more than {most} modules, and its weights are {held.tensors} tensors")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_memory(file: Path, model: nn.Module, held: Held) -> None:
    """Raise ValueError for a model far larger than its weights, where they do not fit into memory either.

    model: without values.
    """
    needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if needed > max(TIMES_AS_WIDE * held.bytes, (free := free_memory_bytes()) // 2):
        raise ValueError(
            f"{file}: the model that it describes has {gib(needed)}, its weights have {held.bytes} bytes, "
            f"and {gib(free)} of memory are free. {COPY}"
        )
