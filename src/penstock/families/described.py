"""Descriptions of models in folders of transformers, read before the weights; errors name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR, LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch

from penstock.config import UNSET, ConfigError, read_text, shorten
from penstock.families.limits import COPY, Held, check_code, check_memory, check_sizes, few_modules
from penstock.models.qwen3_moe import CONFIG

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")
"""Names in configurations for the number of experts, and for the number that a token chooses."""

FORMER, FORMER_CHECKPOINT = ".former-model", ".unfinished-former-"
"""Folders for the files that a save replaces, until the new ones are in their place: inside of the folder of
a model, and beside the folder of a checkpoint, whose name follows."""

GENERATION = "generation_config.json"
MOST_BYTES = 1 << 22
"""Largest size of a JSON file of settings."""

MOST_WORDS = 600
"""Most characters of a message from elsewhere that is shown."""


def read_description(folder: Path) -> dict[str, Any]:
    """Read the configuration in a folder, as it stands there.

    Raises ValueError, naming the file, if it is none, asks for code, or is that of quantized weights.
    """
    file = folder / CONFIG
    if not file.is_file():
        refuse_cut_off(folder)
        raise ValueError(
            f"{folder} holds no {CONFIG}. Give a folder that save_pretrained has written, or download the "
            "model's files first: hf download NAME --local-dir FOLDER"
        )
    table = read_table(file)
    if not isinstance(table.get("model_type"), str):
        why = "is not there, so it is not known what model the folder is of"
        raise ConfigError(f"{file}: model_type", UNSET, why, f"{COPY}.")
    check_code(file, table)
    return table


def config_of(file: Path, table: Mapping[str, Any], held: Held) -> Any:
    """Return the configuration in a file, of a model no larger than its weights bear out.

    table: what the file holds. Raises ValueError, naming the file, if it describes no model.
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
    found = {name: setting_of(config.get_text_config(), name) for name in (*EXPERTS, *CHOSEN)}
    there = {name: value for name, value in found.items() if isinstance(value, int)}
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


def refuse_cut_off(folder: Path) -> None:
    """Raise ValueError where a save was killed before the new files had the place of the former ones."""
    for former in (folder / FORMER, folder.with_name(f"{FORMER_CHECKPOINT}{folder.name}")):
        if former.is_dir() and any(former.iterdir()):
            what = f"its files to {folder}" if former.parent == folder else f"it to {folder}"
            raise ValueError(
                f"{folder} is not whole: a save was cut off, and what it was to replace is in {former}. Move "
                f"{what}, or save the model there once more"
            )


def empty_model(file: Path, config: Any, held: Held, kind: Any = None) -> Any:
    """Return the model of a configuration, without values. kind: its class; None: a causal language model.

    Raises ValueError, naming the file, where transformers cannot make it, or weights do not bear it out.
    """
    from transformers import AutoModelForCausalLM

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
    check_memory(file, model, held)
    return model


def read_generation(folder: Path) -> Any:
    """Read the settings of generation in a folder, if it has some. Raises ValueError, naming the file."""
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
    """Read a JSON object from a file. Raises ConfigError about the file for anything else."""
    text = read_text(file, str(file), f"{COPY}.", most_bytes)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(file), UNSET, f"is not JSON: {in_one_line(error)}", f"{COPY}.") from error
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
    """Keep transformers from printing, inside this context, what is raised as an error afterwards, and any
    progress; and DeepSpeed, which it imports where that is installed, from printing warnings."""
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
