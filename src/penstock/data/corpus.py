"""The texts of a run: opened where they can be read as they are, prepared first where they cannot.

Without a path the text is the Python standard library of the running interpreter: real text, about 11 MB, on
every machine. Text without a tokenizer is read as bytes, every byte a token. A folder that `penstock prepare`
has written is read as tokens. Anything else (a tokenizer is named, or files hold documents in a field) is
prepared in the folder `data.cache` when a run first needs it.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import UNSET, ConfigError, expanded
from penstock.data.config import DataConfig
from penstock.data.documents import is_table
from penstock.data.files import files_below, files_of, identity, is_folder, is_on_hub, place_of
from penstock.data.prepare import Preparation
from penstock.data.text import Readable, Text
from penstock.data.tokenizer import Bytes, open_tokenizer
from penstock.data.tokens import WHOLE, Tokens, is_prepared, whole_record

__all__ = ["Corpus", "ToPrepare", "check_one_source", "load_corpora", "prepared_folder", "to_prepare"]

MIN_TEXT_BYTES = 1024
STANDARD_LIBRARY_SUFFIXES = (".py",)
# Installed packages differ between machines; tests contain unusual encodings and generated tables.
STANDARD_LIBRARY_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """One text to train on, which stays where it is.

    Attributes:
        text: Its tokens.
        source: A description of its origin: the place, the number of files and of bytes or tokens.
        share: Its share of all samples, where there are several texts.
    """

    text: Readable
    source: str
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ToPrepare:
    """A text that can be read once its tokens are in `folder`."""

    work: Preparation
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether an earlier run has prepared the text."""
        return (self.folder / WHOLE).exists()


def load_corpora(config: DataConfig) -> list[Corpus]:
    """Open the texts that `config` names, the files of each one after another in a fixed order.

    Raises:
        ConfigError: About `path`, if it does not exist, holds no text file or too little text, or if any of
            its files cannot be read or has yet to be prepared; about `tokenizer`, if prepared tokens were
            made with another tokenizer; about `mixture`, if texts have different tokenizers, end documents
            with different tokens, or share a file.
    """
    check_one_source(config)
    check_apart(config)
    return [_load(config, path, share) for path, share in config.parts.items()]


def check_one_source(config: DataConfig) -> None:
    """Raise ConfigError where a token means different things in two texts. Reads and prepares no text."""
    first, ending = next(iter(config.parts)), dict[int, str | None]()
    tokenizer, _ = _tokens_of(config, first)
    for path in config.parts:
        digest, end = _tokens_of(config, path)
        if digest != tokenizer:
            why = f"{first} and {path} have tokens of different tokenizers"
            hint = "Prepare all texts with one, or name it in data.tokenizer."
            raise ConfigError("mixture", UNSET, why, hint)
        if end is not None:
            ending.setdefault(end, path)
    if len(ending) > 1:
        (end, path), (other_end, other), *_ = ending.items()
        why = f"documents of {path} end with token {end}, those of {other} with token {other_end}"
        hint = "Prepare all texts with the same end (--end-of-document, data.end_of_document)."
        raise ConfigError("mixture", UNSET, why, hint)


def check_apart(config: DataConfig) -> None:
    """Raise ConfigError where texts of a mixture have a file in common. Reads no text.

    Otherwise one text would train on what the other holds out.
    """
    owners = dict[Hashable, str | None]()
    for path in config.parts if len(config.parts) > 1 else ():
        if path is None:
            continue
        for file in [place_of(path)] if _is_prepared(path) else files_of(path, config.suffixes):
            if (owner := owners.setdefault(identity(file), path)) != path:
                why = f"{owner} and {path} both have {file}: one would train on what the other holds out"
                hint = "Name every file in one text alone; its weight says how often it is seen."
                raise ConfigError("mixture", UNSET, why, hint)


def _tokens_of(config: DataConfig, path: str | None) -> tuple[str, int | None]:
    """Return the digest of a text's tokenizer, and the token that ends its documents, if any does."""
    waiting = _to_prepare(config, path)
    if waiting is not None:
        return waiting.work.tokenizer.digest, waiting.work.tokenizer.end
    if path is None or not _is_prepared(path):
        return Bytes.digest, None
    record = whole_record(place_of(path))
    return record.tokenizer, record.end


def _is_prepared(path: str) -> bool:
    place = place_of(path)
    return is_folder(path, place) and is_prepared(place)


def to_prepare(config: DataConfig) -> list[ToPrepare]:
    """Return what must be prepared before the texts can be opened, or was prepared for an earlier run."""
    preparations = (_to_prepare(config, path) for path in config.parts)
    return [each for each in preparations if each is not None]


def _load(config: DataConfig, path: str | None, share: float) -> Corpus:
    waiting = _to_prepare(config, path)
    if waiting is not None:
        return _tokens(path, waiting.folder, f"{waiting.work.source}, ", share)
    if path is None:
        return _join(None, f"Python {platform.python_version()} standard library", _standard_library(), 1.0)
    place = place_of(path)
    if not _is_prepared(path):
        place_files = files_of(path, config.suffixes)
        return _join(path, str(place), place_files, share)
    corpus = _tokens(path, place, f"{place}: ", share)
    assert isinstance(corpus.text, Tokens)
    if config.tokenizer is not None:  # it must be the one with which the tokens were prepared
        record, named = corpus.text.record, open_tokenizer(config.tokenizer, config.end_of_document)
        hint = "Leave it out: the tokens know theirs."
        if named.digest != record.tokenizer:
            why = f"{path} was prepared with another tokenizer"
            raise ConfigError("tokenizer", config.tokenizer, why, hint)
        if config.end_of_document is not None and named.end != record.end:
            why = f"{path} was prepared with another token between documents"
            raise ConfigError("end_of_document", config.end_of_document, why, hint)
    return corpus


def _tokens(path: str | None, folder: Path, source: str, share: float) -> Corpus:
    tokens = Tokens(path, folder)
    facts = f"{tokens.record.documents:,} documents, {tokens.size:,} tokens"
    return Corpus(text=tokens, source=source + facts, share=share)


def _to_prepare(config: DataConfig, path: str | None) -> ToPrepare | None:
    """Return the preparation of a text; None where the text can be read as it is."""
    if path is None:
        if config.tokenizer is None:
            return None
        files, place = _standard_library(), "Python's standard library"
    else:
        if _is_prepared(path):
            return None
        files = files_of(path, config.suffixes)
        place = path if is_on_hub(path) else str(place_of(path))
    if config.tokenizer is None and not any(map(is_table, files)):
        return None
    work = Preparation(
        files=tuple(files),
        source=f"{place}: {_counted(files)}",
        field=config.field,
        tokenizer=open_tokenizer(config.tokenizer, config.end_of_document),
    )
    return ToPrepare(work=work, folder=prepared_folder(config.cache, work))


def prepared_folder(cache: Path | None, work: Preparation) -> Path:
    """Return where a run keeps tokens that it prepares: a folder named by a digest of its inputs."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "penstock")
    root = expanded(str(usual if cache is None else cache), "cache", "Name a folder that can be written.")
    return root / "tokens" / work.made_from[:32]


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = files_below(None, folder, STANDARD_LIBRARY_SUFFIXES, STANDARD_LIBRARY_LEFT_OUT)
    if not files:  # embedded interpreters keep their library in an archive
        why = f"the sources of Python's standard library are not in {folder}"
        raise ConfigError("path", None, why, "Give a file or a folder of text.")
    return files


def _join(path: str | None, place: str, files: Sequence[Path], share: float) -> Corpus:
    """Return one text of all files, with a newline between two so that no line runs into the next file."""
    text = Text(path, files)
    if text.size < MIN_TEXT_BYTES:
        hint = f"Give at least {MIN_TEXT_BYTES}; megabytes are better."
        raise ConfigError("path", path, f"holds only {text.size} bytes of text", hint)
    return Corpus(text=text, source=f"{place}: {_counted(files)}, {text.size:,} bytes", share=share)


def _counted(files: Sequence[Path]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"
