"""SHA256SUMS: the hash that every file of a checkpoint must have; `sha256sum -c SHA256SUMS` checks it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.train.storage.files import DamagedError, open_regular, read_regular
from penstock.writing import write_whole

SUMS = "SHA256SUMS"
MOST_BYTES = 1 << 24
LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]{0,199})\n", re.ASCII)
"""A digest and a name inside the folder: no name of this form leads out of it."""


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits; it takes about a second per GiB."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of the files in `folder`, sorted by name."""
    text = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    write_whole(folder / SUMS, text, durable=True)


def read_sums(folder: Path) -> dict[str, str]:
    """Return digests by name. Raises DamagedError if a single character is not as `write_sums` writes it."""
    text = read_regular(folder / SUMS, MOST_BYTES).decode("ascii", errors="replace")
    found = list(LINE.finditer(text))
    if not found or "".join(match[0] for match in found) != text:
        raise DamagedError(f"{SUMS} is not a list of digests and names")
    digests = {match[2]: match[1] for match in found}
    if len(digests) < len(found):
        raise DamagedError(f"{SUMS} names a file twice")
    return digests


def compare(folder: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise DamagedError for the first of `names` whose content is not what was written."""
    for name in names:
        if digest_of(folder / name) != digests[name]:
            raise DamagedError(f"{name} has changed since it was written: its checksum is wrong")
