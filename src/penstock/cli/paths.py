"""Paths on the command line: shells leave `--out=~/x` as it is."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.config import ConfigError, expanded


def user_path(text: str) -> Path:
    """Return the path with a home folder (`~`) expanded; for argparse, which names the option."""
    try:
        return expanded(text, "path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.why}") from error


def config_and_settings(options: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the file, which may be missing, and the settings: argparse takes the first word for the file."""
    words = [*([] if options.config is None else [options.config]), *options.overrides]
    path = expanded(words.pop(0), "CONFIG") if words and "=" not in words[0] else None
    return path, words
