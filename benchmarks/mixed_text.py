"""`python -m benchmarks.mixed_text FILE [SETTING=VALUE ...]`: how a small model routes very different texts.

Trains the model on Python, C++ headers, English documentation and messages in other languages, as far as this
machine has them, and keeps what its last steps chose for every sample. `benchmarks/data/` has such files:
runs that replay them need no training.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import torch

from penstock.cli.run import exit_code
from penstock.config import ConfigError

RECORDED: Final = Path("benchmarks", "data", "mixed-text.jsonl")
"""What runs of the suite replay."""

MANY_EXPERTS: Final = RECORDED.with_stem("mixed-text-64")
"""The same of 64 experts, of which a token chooses 8: `--kept 4 model.num_layers=2 moe.num_experts=64
moe.top_k=8 moe.moe_ffn_hidden_size=64`."""

KIND_BYTES: Final = 1 << 20
"""Of each kind of text, or what there is of it."""

LEAST_KINDS: Final = 4
LANGUAGES: Final = ("ar", "de", "el", "fr", "he", "hi", "ja", "ko", "ru", "th", "uk", "zh_CN")
CATALOGUES: Final = Path("/usr/share/locale")
ENGLISH: Final = Path("/usr/share/doc")
CATALOGUE_MAGIC: Final = 0x950412DE
HEAD, ENTRY = struct.Struct("<5I"), struct.Struct("<2I")

KEPT_STEPS: Final = 8
CONFIG: Final = RECORDED.with_suffix(".toml")


def texts() -> Iterator[tuple[str, str]]:
    """Yield kinds of text that this machine has, each with its name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    headers = Path(torch.__file__).parent / "include"
    yield "python", _files(sorted(library.glob("*.py")))
    yield "headers", _files(sorted(headers.rglob("*.h")))
    yield "english", _files([library / "pydoc_data" / "topics.py", *sorted(ENGLISH.rglob("*.md"))])
    for language in LANGUAGES:
        yield language, _messages(sorted((CATALOGUES / language).glob("LC_MESSAGES/*.mo")))


def _files(paths: Iterable[Path]) -> str:
    return _joined(path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file())


def _messages(catalogues: Iterable[Path]) -> str:
    """Return what programs say in one language."""
    return _joined("\n".join(_catalogue(path)) for path in catalogues)


def _catalogue(path: Path) -> Iterator[str]:
    """Yield the translations in a compiled catalogue of GNU gettext, without its header."""
    data = path.read_bytes()
    magic, _, count, _, table = HEAD.unpack_from(data) if len(data) >= HEAD.size else (0,) * 5
    if magic != CATALOGUE_MAGIC:
        return
    for entry in range(1, count):
        length, start = ENTRY.unpack_from(data, table + entry * ENTRY.size)
        yield data[start : start + length].decode("utf-8", errors="replace").replace("\0", "\n")


def _joined(parts: Iterable[str]) -> str:
    """Return the first parts, KIND_BYTES characters or all."""
    pieces, size = [], 0
    for part in parts:
        pieces.append(part[: KIND_BYTES - size])
        size += len(pieces[-1])
        if size >= KIND_BYTES:
            break
    return "\n".join(pieces)


def write_texts(folder: Path) -> tuple[str, ...]:
    """Write one file for each kind of text that there is; return the names of the kinds.

    Raises:
        ConfigError: If there are too few.
    """
    names = []
    for name, text in texts():
        encoded = text.encode()[:KIND_BYTES]
        if len(encoded) >= KIND_BYTES // 8:
            (folder / f"{name}.txt").write_bytes(encoded)
            names.append(name)
    if len(names) < LEAST_KINDS:
        why = f"this machine has {len(names)} kinds of text only"
        raise ConfigError("FILE", ", ".join(names), why, f"Replay {RECORDED}, or record elsewhere.")
    return tuple(names)


def record(target: Path, steps: int, kept_steps: int = KEPT_STEPS, settings: Sequence[str] = ()) -> None:
    """Train, and write what the last steps chose.

    Args:
        target: The file to write.
        steps: How many steps to train for.
        kept_steps: How many of the last steps to keep.
        settings: Settings `section.key=value` beside those of `CONFIG`.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpus, run = Path(folder, "texts"), Path(folder, "run")
        corpus.mkdir()
        print("texts:", ", ".join(write_texts(corpus)), file=sys.stderr)
        places = (f"data.path={corpus}", f"output.dir={run}", f"train.steps={steps}")
        command = (sys.executable, "-m", "penstock", "train", str(CONFIG), *settings, *places)
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = (run / "routing.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [lines[0], *islice(lines[1:], max(0, len(lines) - 1 - kept_steps), None)]
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed_text", description=__doc__)
    parser.add_argument("file", type=Path, help="what is written")
    parser.add_argument("settings", nargs="*", help="of the run, as `penstock train` takes them")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--kept", type=int, default=KEPT_STEPS, help="the last steps, which the file has")
    options = parser.parse_args()

    def command() -> int:
        record(options.file, options.steps, options.kept, options.settings)
        return 0

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
