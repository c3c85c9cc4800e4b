"""Turns text into tokens: bytes, or those of a `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError, asked, expanded, open_regular
from penstock.data.files import TextError
from penstock.data.text import BYTES
from penstock.extras import install, needs

if TYPE_CHECKING:
    import tokenizers

ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Names that published tokenizers give to the token that ends a document."""

MOST_BYTES: Final = 1 << 30


class Tokenizer(Protocol):
    """Turns text into tokens.

    Attributes:
        vocabulary: Size of the vocabulary; every token is below it.
        end: The token that ends a document, which no text contains.
        digest: What identifies the tokenizer.
    """

    vocabulary: int
    end: int
    digest: str

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the tokens of every text, without tokens that mark its beginning or end."""
        ...


class Bytes:
    """UTF-8, byte by byte. A document ends with 255, which does not occur in UTF-8."""

    vocabulary, end, digest = BYTES, BYTES - 1, "bytes"

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode("utf-8", "replace") for text in texts]


class FileTokenizer:
    """The tokenizer that a `tokenizer.json` describes, by the package tokenizers.

    Texts that spell a special token are tokenized as any other text; where a vocabulary can express such a
    text only by the token that ends a document, that token is left out.

    Args:
        end: Name of the token that ends a document; None = the first of `ENDS` that is in the vocabulary.

    Raises:
        ConfigError: About `tokenizer`, if it cannot be used; about `end_of_document`, if the vocabulary has
            no such token.
    """

    def __init__(self, path: str, end: str | None) -> None:
        self._path = path
        self._tokenizer, self.digest = read_tokenizer(path)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=0) + 1
        name = end if end is not None else next((each for each in ENDS if each in ids), None)
        if name is None or name not in ids:
            why = f"{path} has no such token" if name else f"{path} has none of {', '.join(ENDS)}"
            hint = "Name the token that ends a document in data.end_of_document (--end-of-document)."
            raise ConfigError("end_of_document", end, why, hint)
        self.end, self._name = ids[name], name
        added = self._tokenizer.get_added_tokens_decoder().get(self.end)
        self._is_special = added is not None and added.special

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Tokenize texts.

        Raises:
            TextError: If that fails, or a text contains an ordinary end token.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # its own errors are bare `Exception`
            raise TextError(f"{self._path} cannot tokenize a text ({error})") from error
        return [self._without_end(each.ids) for each in encodings]

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        if self.end not in ids:
            return ids
        if not self._is_special:
            why = f"a text has {self._name!r}, which is to end documents and is an ordinary token"
            hint = f"Name a special one of {self._path}: data.end_of_document, --end-of-document"
            raise TextError(f"{why}. {hint}")
        return [each for each in ids if each != self.end]


def read_tokenizer(path: str) -> tuple[tokenizers.Tokenizer, str]:
    """Return the tokenizer of a `tokenizer.json`, for whole texts of any content, and its sha256.

    Texts that spell a special token are tokenized as any other text.

    Args:
        path: The file, or the folder in which it lies.

    Raises:
        ConfigError: About `tokenizer`, if it cannot be used.
    """
    hint = "Give the tokenizer.json of a tokenizer, or none to train on bytes."
    file = expanded(path, "tokenizer", hint)
    file = file / "tokenizer.json" if asked(file.is_dir) else file
    with open_regular(file, "tokenizer", hint, path) as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError("tokenizer", path, "is larger than 1 GiB", hint)
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("tokenizer", path, needs("tokenizers"), install("tokenizers")) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # its own errors are bare `Exception`
        why = f"is no tokenizer that the package tokenizers reads ({error})"
        raise ConfigError("tokenizer", path, why, "Give a tokenizer.json.") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(data).hexdigest()


def open_tokenizer(path: str | None, end: str | None = None) -> Tokenizer:
    """Return the tokenizer of a file, or bytes for None.

    Args:
        end: Name of the token that ends a document; None = the usual one.

    Raises:
        ConfigError: If the tokenizer cannot be used, or has no such token.
    """
    if path is not None:
        return FileTokenizer(path, end)
    if end is not None:
        why = "bytes have one already: 255, which UTF-8 does not use"
        raise ConfigError("end_of_document", end, why, "Leave it out, or name a data.tokenizer.")
    return Bytes()


def as_array(
    tokenizer: Tokenizer, text: Sequence[int], dtype: np.dtype[np.unsignedinteger], *, ends: bool
) -> npt.NDArray[np.unsignedinteger]:
    """Return the tokens of a text, followed, if `ends`, by the token that ends a document."""
    tokens = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else np.asarray(text, dtype)
    return np.append(tokens, np.asarray([tokenizer.end], dtype)) if ends else tokens
