"""Texts by their name on the Hugging Face hub, read by `datasets`, as a Parquet file in its cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from penstock.config import ConfigError
from penstock.extras import install, is_there, needs
from penstock.writing import replacing

PREFIX: Final = "hf://datasets/"
FORM: Final = f"{PREFIX}OWNER/NAME[?config=CONFIG&split=SPLIT]"


def is_on_hub(path: str) -> bool:
    """Tell whether a path names a dataset of the hub."""
    return path.startswith(PREFIX)


@cache  # a start asks for it a dozen times, and the hub is asked each time
def parquet_of(path: str) -> Path:
    """Return the Parquet file of a dataset, downloaded and converted the first time, in constant memory.

    It lies in the cache of `datasets`, named by a digest of what the hub had. Without a network, or with
    HF_HUB_OFFLINE=1, what was downloaded before is read.

    Args:
        path: `hf://datasets/OWNER/NAME`; `?split=SPLIT` instead of train, `config=CONFIG` where a dataset has
            several.

    Raises:
        ConfigError: About `path`: the package is missing, the form is another, or there is no such dataset,
            configuration or split that can be reached.
    """
    name, _, asked = path.removeprefix(PREFIX).partition("?")
    chosen = parse_qs(asked, keep_blank_values=True)
    if name.count("/") > 1 or not name.strip("/") or not {"config", "split"}.issuperset(chosen):
        raise ConfigError("path", path, "does not name a dataset of the hub", f"Write {FORM}.")
    if not is_there("datasets"):
        raise ConfigError("path", path, needs("datasets"), install("datasets"))
    import datasets  # takes a second, and needs what nobody else does

    config, split = chosen.get("config", [None])[-1], chosen.get("split", ["train"])[-1]
    try:
        found = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = f"the hub does not give it ({' '.join(str(error).split())[:300]})"
        raise ConfigError("path", path, why, f"Write {FORM}; offline, what was loaded before.") from error
    file = Path(datasets.config.HF_DATASETS_CACHE, "penstock", f"{found._fingerprint}.parquet")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as draft:
            found.to_parquet(draft)
    return file
