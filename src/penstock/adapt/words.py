"""Text to tokens and back for a trained model: as when it was trained, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.config import ConfigError, HintWarning
from penstock.data.text import BYTES
from penstock.data.tokenizer import Bytes, read_tokenizer
from penstock.families.described import in_one_line, quiet
from penstock.models.qwen3_moe import CONFIG

UNKNOWN: Final = 0xFF
"""A byte that never occurs in UTF-8."""

PROBE: Final = "a"
"""A text that shows which tokens a tokenizer puts before and after any text."""

TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json")
BYTE_BY_BYTE: Final = Path("bytes")
"""Value in place of a tokenizer's file: tokens are bytes."""

SHOWN_DIGEST = 8
"""Digits by which people know a tokenizer, as `penstock prepare` shows them."""


class Words(Protocol):
    """Conversion between text and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text as in training: none added at its ends, and none special in it."""
        ...

    def begin(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, in which special tokens may be spelled."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


class ByteWords:
    """Words of a model on bytes: every byte of UTF-8 is a token; tokens beyond stand for no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    begin = encode

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token if token < BYTES else UNKNOWN for token in tokens).decode(errors="replace")


class FileWords:
    """Words of a `tokenizer.json`, without tokens that begin or end a text. digest: its sha256.

    Raises ValueError for any other file, and for tokens beyond the model's vocabulary.
    """

    def __init__(self, path: Path, vocabulary: int) -> None:
        try:
            self._tokenizer, self.digest = read_tokenizer(str(path))
        except ConfigError as error:
            raise ValueError(f"{path} is no tokenizer.json ({error.why})") from error
        if (largest := max(self._tokenizer.get_vocab().values(), default=0)) >= vocabulary:
            raise ValueError(
                f"{path} has tokens up to {largest}, and the model knows {vocabulary}: it is the tokenizer "
                "of another model. Name the one with which this one was trained"
            )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def begin(self, prompt: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(prompt)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


class FolderWords:
    """Words of the tokenizer in a folder of transformers.

    A prompt gets the tokens that the tokenizer puts before a text, such as one that the model has always seen
    there, and none of those that it puts after a text.
    Raises ValueError for files that are no tokenizer, and for tokens of a text beyond the model's vocabulary.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._files = " or ".join(str(folder / name) for name in TOKENIZERS if (folder / name).exists())
        from transformers import AutoTokenizer

        try:
            with quiet():
                self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # several libraries raise, some of them bare `Exception`
            raise ValueError(
                f"{self._files} cannot be read as a tokenizer ({in_one_line(error)}). Copy it again, or name "
                "another with --tokenizer"
            ) from error
        whole, bare = self._tokens(PROBE, add_special_tokens=True), self._tokens(PROBE)
        places = range(len(whole) - len(bare) + 1)
        self._first = next((whole[:n] for n in places if whole[n : n + len(bare)] == bare), [])

    def encode(self, text: str) -> list[int]:
        return self._known(self._tokens(text, split_special_tokens=True))

    def begin(self, prompt: str) -> list[int]:
        return self._known(self._first + self._tokens(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _tokens(self, text: str, **how: bool) -> list[int]:
        return list(self._tokenizer.encode(text, **{"add_special_tokens": False, "verbose": False, **how}))

    def _known(self, tokens: list[int]) -> list[int]:
        if (largest := max(tokens, default=0)) >= self._vocabulary:
            raise ValueError(
                f"{self._files} makes token {largest} of the text, and the model knows {self._vocabulary}: "
                "it is the tokenizer of another model. Copy the right one there, or name it with --tokenizer"
            )
        return tokens


def words_of(path: Path, config: Any, data: Mapping[str, Any] | None, tokenizer: Path | None) -> Words:
    """Return the words of a model that was opened at `path`. Raises ValueError where they are not known.

    config: the model's. data: section [data] of the run whose checkpoint it is; None for a folder of
    transformers. tokenizer: a file that a user has named, or `bytes`; None = as the model was trained.
    """
    vocabulary = config.get_text_config().vocab_size
    digest, named = getattr(config, "tokenizer_digest", None), (data or {}).get("tokenizer")
    if not isinstance(digest, str | None):  # any configuration of transformers may have a setting of the name
        key = f"{path / CONFIG}: tokenizer_digest"
        raise ConfigError(key, digest, "is no text", "Leave it out, or copy the file again.")
    if tokenizer is not None:
        return _chosen(tokenizer, digest, vocabulary)
    if data is None and any((path / name).exists() for name in TOKENIZERS):
        return FolderWords(path, vocabulary)
    if digest == Bytes.digest or (digest is None and named is None and vocabulary == BYTES):
        return _bytes(vocabulary)
    try:  # the file that the run was given, if it is there and unchanged
        found = None if named is None else FileWords(Path(named).expanduser(), vocabulary)
    except (ValueError, OSError):
        found = None
    if found is None or digest not in (None, found.digest):
        if digest is None and named is None:
            raise ValueError(
                f"{path} has no tokenizer ({TOKENIZERS[0]}), and its vocabulary of {vocabulary} is not that "
                "of bytes: name the one it was trained with (--tokenizer FILE, or --tokenizer bytes)"
            )
        known = "" if digest is None else f" {_short(digest)}"
        where = "" if named is None else f", and {named} is not there any more or has changed"
        why = f"{path} was trained on tokens of a tokenizer{known}{where}"
        raise ValueError(f"{why}: name its tokenizer.json with --tokenizer FILE")
    return found


def _chosen(tokenizer: Path, digest: str | None, vocabulary: int) -> Words:
    """Return the words that a user has named. Warns of a file with which the model was not trained.

    Such a file may make the same tokens: a library that reads and saves it changes its bytes.
    """
    if tokenizer == BYTE_BY_BYTE:
        if digest not in (None, Bytes.digest):
            raise ValueError(f"the model was trained on tokens of a tokenizer {_short(digest)}, not on bytes")
        return _bytes(vocabulary)
    found = FileWords(tokenizer, vocabulary)
    if digest == Bytes.digest:
        raise ValueError(
            f"the model was trained on bytes, not on tokens of {tokenizer}: leave --tokenizer out"
        )
    if digest not in (None, found.digest):
        warnings.warn(
            f"{tokenizer} ({_short(found.digest)}) is not the file that the model was trained with "
            f"({_short(digest)}): what follows is true only if both make the same tokens",
            HintWarning,
            stacklevel=2,
        )
    return found


def _bytes(vocabulary: int) -> ByteWords:
    """Return the words of a model on bytes. Raises ValueError for one that does not know all of them."""
    if vocabulary < BYTES:
        raise ValueError(
            f"bytes are {BYTES} tokens, and the model knows {vocabulary}: name the tokenizer.json that it "
            "was trained with (--tokenizer FILE)"
        )
    return ByteWords()


def _short(digest: str | None) -> str:
    """Return the digits by which people know a tokenizer, as `penstock prepare` shows them."""
    return (digest or "")[:SHOWN_DIGEST]
