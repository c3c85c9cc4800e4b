"""Descriptions of models in folders of transformers, read before the weights; errors name the file.

transformers follows a config.json: it makes lists and modules of any length, and takes attention and experts
from where it says, from other people's repositories, too. Here it may ask for no more than its weights bear
out, and for no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR, LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from penstock.config import UNSET, ConfigError, read_json, shorten
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
        tensors: Number of tensors.
        bytes: Size of their files.
    """

    tensors: int
    bytes: int


def check_code(file: Path, table: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration that asks for code, for other files, or has quantized weights."""
    for path, value in _settings(file, table):
        if value is not None and value not in OWN_CODE and any(map(CODE.search, path)):
            why = "asks for code that transformers would fetch or import"
            hint = f"Use one of {', '.join(OWN_CODE)}, or leave it out."
            raise ConfigError(_key(file, path), value, why, hint)
    if OTHER_FILES in table:
        key, why = _key(file, (OTHER_FILES,)), "names other configurations, which are not read"
        raise ConfigError(key, table[OTHER_FILES], why, "Leave it out.")
    for path, part in _tables(table):
        for setting in QUANTIZED:
            if part.get(setting) is not None:
                key = _key(file, (*path, setting))
                settings = part[setting]
                method = settings.get("quant_method") if isinstance(settings, Mapping) else None
                key, value = (key, settings) if method is None else (f"{key}.quant_method", method)
                why = "the folder holds quantized numbers, which are not read"
                hint = "Load the model with from_pretrained, dequantized, and call parallelize or save it."
                raise ConfigError(key, value, why, hint)


def check_sizes(file: Path, table: Mapping[str, Any], held: Held) -> None:
    """Raise ConfigError for a configuration that asks for far more than the weights beside it are."""
    for path, value in _settings(file, table):
        name = next((part for part in reversed(path) if not part.isdecimal()), "")
        if type(value) is int and value > (most := _most(name, held)):
            why = f"is more than {most}, the most that {held.tensors} tensors of {held.bytes} bytes bear out"
            raise ConfigError(_key(file, path), value, why, f"{COPY}.")


def _settings(file: Path, value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all settings by their path, also those inside of others; entries of lists have their number."""
    if len(path) > DEEPEST:
        raise ConfigError(
            str(file), UNSET, f"holds more than {DEEPEST} tables and lists inside each other", f"{COPY}."
        )
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _settings(file, entry, (*path, name))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _settings(file, entry, (*path, str(number)))
    else:
        yield path, value


def _tables(
    table: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield a table and all tables in it by their path."""
    yield path, table
    for name, entry in table.items():
        if isinstance(entry, Mapping):
            yield from _tables(entry, (*path, name))


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


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")
"""Names in configurations for the number of experts, and for the number that a token chooses."""

FORMER, FORMER_STATE, FORMER_CHECKPOINT = ".former-model", ".former-optimizer", ".unfinished-former-"
"""Folders for the files that a save replaces, until the new ones are in their place: inside of the folder of
a model, and beside the folder of a checkpoint, whose name follows."""

GENERATION = "generation_config.json"
MOST_BYTES = 1 << 22
"""Largest size of a JSON file of settings."""

MOST_WORDS = 600
"""Most characters of a message from elsewhere that is shown."""


def config_of(file: Path, table: Mapping[str, Any], held: Held) -> Any:
    """Return the configuration in a file, of a model no larger than its weights bear out.

    Args:
        table: What the file holds.

    Raises:
        ValueError: The file describes no such model; the message names it.
    """
    from transformers import AutoConfig, PreTrainedConfig

    check_sizes(file, table, held)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # whatever a configuration's own checks raise
        raise ValueError(
            f"{file} describes no model that transformers knows: {in_one_line(error)}. {COPY}"
        ) from error
    text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise ConfigError(f"{file}: text_config", UNSET, "holds no configuration of a text model", f"{COPY}.")
    for part in (config, text):
        part.return_dict = True  # a model of transformers runs with no other value
    settings = {name: setting_of(config.get_text_config(), name) for name in (*EXPERTS, *CHOSEN)}
    there = {name: value for name, value in settings.items() if isinstance(value, int)}
    for name, value in there.items():
        if value < 1:
            raise ValueError(f"{file}: {name} = {value}, and a layer with experts has at least one. {COPY}")
    chosen = next((name for name in CHOSEN if name in there), None)
    experts = next((name for name in EXPERTS if name in there), None)
    if chosen is not None and experts is not None and there[chosen] > there[experts]:
        raise ValueError(
            f"{file}: {chosen} = {there[chosen]}, and there are {experts} = {there[experts]} to choose from. "
            f"{COPY}"
        )
    return config


def refuse_cut_off(folder: Path, inside: str = FORMER) -> None:
    """Raise ValueError where a save was killed before the new files had the place of the former ones.

    Args:
        inside: The subfolder of former files, where the folder itself stays.
    """
    for former in (folder / inside, folder.with_name(f"{FORMER_CHECKPOINT}{folder.name}")):
        if former.is_dir() and any(former.iterdir()):
            what = f"its files to {folder}" if former.parent == folder else f"it to {folder}"
            raise ValueError(
                f"{folder} is not whole: a save was cut off, and what it was to replace is in {former}. Move "
                f"{what}, or save there once more"
            )


def empty_model(file: Path, config: Any, held: Held, kind: Any = None) -> Any:
    """Return the model of a configuration, without values.

    Args:
        file: The configuration's file.
        held: What the weights beside it are.
        kind: The model's class; None = that of a causal language model.

    Raises:
        ValueError: Transformers cannot make it, or it is far larger than its weights and does not fit into
            memory either; the message names the file.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if kind is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{file}: model_type = {config.model_type!r} is no causal language model of transformers: make "
            "it with from_pretrained of its own class, and give it to penstock.parallelize"
        )
    try:
        with quiet(), torch.device("meta"), few_modules(held):
            if kind is None:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            else:
                model = kind._from_config(config)
    except Exception as error:  # whatever a model's own code raises for sizes that do not fit
        what = "a causal language model" if kind is None else f"a {kind.__name__}"
        why = f"transformers cannot make {what} of it: {in_one_line(error)}"
        raise ValueError(f"{file}: {why}. {COPY}") from error
    needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if needed > max(TIMES_AS_WIDE * held.bytes, (free := free_memory_bytes()) // 2):
        raise ValueError(
            f"{file}: the model that it describes has {gib(needed)}, its weights have {held.bytes} bytes, "
            f"and {gib(free)} of memory are free. {COPY}"
        )
    return model


def read_generation(folder: Path) -> Any:
    """Read the settings of generation in a folder; return None if it has none.

    Raises:
        ValueError: The file holds no such settings; the message names it.
    """
    from transformers import GenerationConfig

    file = folder / GENERATION
    if not file.exists():
        return None
    table = read_table(file)
    try:
        with quiet():
            return GenerationConfig.from_dict(table)
    except Exception as error:  # whatever its own checks raise
        raise ValueError(f"{file} holds no settings of generation: {in_one_line(error)}. {COPY}") from error


def read_table(file: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: The file holds anything else, or more than `most_bytes`.
    """
    table = read_json(file, f"{COPY}.", most_bytes, strict=False)
    if not isinstance(table, dict):
        raise ConfigError(str(file), UNSET, f"holds {type(table).__name__}, and no JSON object", f"{COPY}.")
    return table


def setting_of(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting of a configuration; where layers have values of their own, that of the others."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to say it, as it is not that of every layer
        return vars(config).get(name, default)


def _errors_only(record: LogRecord) -> bool:
    """Let only errors pass; a filter of loggers."""
    return record.levelno >= ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers, inside this context, from printing progress and what is raised as an error later.

    DeepSpeed, which it imports where that is installed, prints no warnings then.
    """
    from transformers.utils import logging

    before, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    deepspeed = getLogger("DeepSpeed")
    deepspeed.addFilter(_errors_only)
    try:
        yield
    finally:
        deepspeed.removeFilter(_errors_only)
        logging.set_verbosity(before)
        if shows:
            logging.enable_progress_bar()


def in_one_line(error: Exception) -> str:
    """Return the type and message of an error in one line, which may name a value of any length."""
    return shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", MOST_WORDS)
