"""Models that are named as on the Hugging Face hub, in place of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.families.described import in_one_line

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Name of a model on the hub: its owner and its own."""

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
"""Names of files that a model and its tokenizer are read from."""


def folder_of(named: str | Path) -> Path:
    """Return the folder that is named, or that of the files of a model on the hub, which is named as there.

    They come from the library's cache (`HF_HOME`), where they are downloaded to if they are not there. Ranks
    of a node wait for each other's files. Raises ValueError where the hub gives no such model.
    """
    path = Path(named)
    if path.exists() or isinstance(named, Path) or not NAME.fullmatch(named):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named, allow_patterns=list(WANTED), ignore_patterns=["*/*"]))
    except Exception as error:  # those of the library and of several libraries below it
        raise ValueError(
            f"{named} is no folder here, and the Hugging Face hub does not give a model of this name: "
            f"{in_one_line(error)}"
        ) from error
