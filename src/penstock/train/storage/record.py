"""What a checkpoint says about its state: checkpoint.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from penstock.train.storage.files import DamagedError, read_table, to_json
from penstock.writing import write_whole

RECORD = "checkpoint.json"
FORMAT = 2

GLOBAL_BATCH = "data.batch_per_device x (processes / mp_size)"
MOST_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of a checkpoint.

    identity: settings on which the position in the data depends, by configuration key. settings: the
    configuration, section by section. plan_settled: whether the plan saved with the
    checkpoint had been tried, ordered and tuned to the end. files: names of all other files but the
    checksums. tokenizer: sha256 of the text's, or `bytes`; None where none is known.
    """

    step: int
    processes: int
    identity: Mapping[str, object]
    settings: Mapping[str, Any] | None
    plan_settled: bool
    files: Sequence[str] = ()
    tokenizer: str | None = None

    def write(self, folder: Path) -> None:
        """Write the record into a checkpoint's folder."""
        write_whole(folder / RECORD, to_json({"format": FORMAT, **asdict(self)}), durable=True)

    @staticmethod
    def read(folder: Path) -> Record:
        """Read a record. Raises DamagedError for anything else, ConfigError for one of another format."""
        table = read_table(folder / RECORD, MOST_BYTES)
        version = table.pop("format", None)
        if version != FORMAT:
            why = f"{folder} is of format {str(version)[:20]}, and this version of Penstock reads {FORMAT}"
            raise ConfigError("train.resume", True, why, "Continue with the version that wrote it.")
        kinds: dict[str, tuple[type, ...]] = {
            "step": (int,),
            "processes": (int,),
            "identity": (dict,),
            "settings": (dict, type(None)),
            "plan_settled": (bool,),
            "files": (list,),
            "tokenizer": (str, type(None)),
        }
        if table.keys() != kinds.keys() or not all(isinstance(table[key], kinds[key]) for key in kinds):
            raise DamagedError(f"{RECORD} is not what a checkpoint says about itself")
        numbers = [table["step"], table["processes"]]
        if any(isinstance(n, bool) or n < 0 for n in numbers) or not all(
            isinstance(name, str) for name in table["files"]
        ):
            raise DamagedError(f"{RECORD} is not what a checkpoint says about itself")
        return Record(**table)

    def check_identity(self, path: Path, identity: Mapping[str, object]) -> None:
        """Raise ConfigError for the first key that differs; before the first step, keys may differ."""
        if self.step == 0:
            return
        for key in {**identity, **self.identity}:
            value = identity.get(key)
            if self.identity.get(key) != value:
                was = str(self.identity.get(key))[:80]
                why = f"{path} was made with {was}, and samples would be repeated or left out"
                raise ConfigError(
                    key, value, why, "Use the same value, or start a new run in another output.dir."
                )
