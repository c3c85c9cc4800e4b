"""`penstock prepare`: turns text into tokens, once."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Hashable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from penstock.cli.out import add, user_path, whole
from penstock.cli.run import FAILED, say
from penstock.config import UNSET, ConfigError, asked
from penstock.data.config import DataConfig
from penstock.data.files import HINT, files_of, identity
from penstock.data.prepare import SHARD_TOKENS, Preparation
from penstock.data.text import TextError
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokens import WHOLE, Record, first_damage, read_record
from penstock.stops import STOPS
from penstock.words import counted, mib

TOKENS = whole(1, 1 << 40, f"is no number of tokens; use 1 or more, such as {SHARD_TOKENS}")
GOES_ON = "stopped; run the same command again, and it goes on"


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    prepare = commands.add_parser(
        "prepare",
        help="turn text into tokens for training",
        description="Writes the tokens of text, JSON lines or Parquet files into a folder that data.path can "
        "name. Run again, it goes on where it was stopped; of a whole folder it compares all checksums.",
        epilog="Example: penstock prepare articles.jsonl --tokenizer tokenizer.json --out data/articles",
    )
    usual = DataConfig()
    add(prepare, "inputs INPUT", "files, or folders of files", nargs="+")
    add(prepare, "--out FOLDER", "folder to write", type=user_path, required=True)
    add(prepare, "--tokenizer FILE", "a tokenizer.json (default: bytes, every byte a token)")
    add(
        prepare, "--end-of-document TOKEN", "token between two documents (default: the tokenizer's usual one)"
    )
    prepare.add_argument(
        "--field",
        default=usual.field,
        help=f"the field with text in JSON lines and Parquet (default: {usual.field})",
    )
    add(
        prepare,
        "--suffixes A,B,...",
        f"which files of a folder are read (default: {','.join(usual.suffixes)})",
        default=",".join(usual.suffixes),
    )
    add(
        prepare,
        "--shard-tokens N",
        f"tokens per shard; what is read again after a stop (default: {SHARD_TOKENS})",
        type=TOKENS,
        default=SHARD_TOKENS,
    )
    add(prepare, "--json", "print one JSON object")
    prepare.set_defaults(run=lambda options, given: run_prepare(options))


def run_prepare(options: argparse.Namespace) -> int:
    """Prepare the folder and print its contents; return the exit code."""
    try:
        return _prepare(options)
    except ConfigError as error:
        raise _about_input(error) from error


def _prepare(options: argparse.Namespace) -> int:
    folder: Path = options.out
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        why = "is not UTF-8, and data.path could not name it"
        raise ConfigError("--out", str(folder), why, "Choose another name.") from error
    work = _preparation(options)
    if asked((folder / WHOLE).exists) and (damage := first_damage(folder)) is not None:
        say(damage)
        return FAILED
    STOPS.says(lambda: GOES_ON)
    try:
        columns = (  # of a bar on a terminal; nothing is shown elsewhere
            TextColumn("preparing"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with RichProgress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", tokens=0)
            for step in work.run(folder):
                bar.update(task, completed=step.read_bytes, total=step.total_bytes, tokens=step.tokens)
    except TextError as error:
        say(str(error))
        return FAILED
    except OSError as error:
        hint = "Once that is mended, run the same command again: it goes on."
        say(f"{folder} cannot be written ({error.strerror}). {hint}")
        return FAILED
    STOPS.finish(0)
    _tell(read_record(folder / WHOLE), folder, json_wanted=options.json)
    return 0


def _preparation(options: argparse.Namespace) -> Preparation:
    suffixes = DataConfig(suffixes=tuple(options.suffixes.split(","))).suffixes
    files = [file for each in options.inputs for file in files_of(each, suffixes)]
    known = dict[Hashable, Path]()
    for file in files:
        if known.setdefault(identity(file), file) is not file:
            why = f"{file} is named twice, and would be trained on where it is held out"
            hint = "Name every file once; the weight of a mixture says how often a text is seen."
            raise ConfigError("INPUT", UNSET, why, hint)
    work = Preparation(
        files=tuple(files),
        source=os.fsencode(" ".join(options.inputs)).decode(errors="backslashreplace"),
        field=options.field,
        tokenizer=open_tokenizer(options.tokenizer, options.end_of_document),
        shard_tokens=options.shard_tokens,
    )
    work.check()
    return work


def _about_input(error: ConfigError) -> ConfigError:
    """Return the error in the words of this command."""
    key = "INPUT" if error.key == "path" else error.key
    hint = "Give a path that can be read." if error.hint == HINT else error.hint
    return ConfigError(key, error.value, error.why, hint.replace("data.suffixes", "--suffixes"))


def _tell(record: Record, folder: Path, *, json_wanted: bool) -> None:
    if json_wanted:
        facts = {
            "out": str(folder),
            "tokens": record.tokens,
            "documents": record.documents,
            "vocabulary": record.vocabulary,
            "shards": len(record.shards),
            "sha256": record.digest,
        }
        print(json.dumps(facts))
        return
    size = mib(record.tokens * record.dtype.itemsize)
    kind = "bytes" if record.tokenizer == "bytes" else f"tokenizer {record.tokenizer[:8]}"
    shards = counted(len(record.shards), "shard")
    print(f"{folder}: {record.documents:,} documents, {record.tokens:,} tokens in {shards}")
    print(f"vocabulary {record.vocabulary:,} ({kind}), {record.dtype.name}, {size}")
    print(f"train on it: data.path={folder} model.vocab_size={record.vocabulary}")
