"""Trained models on one process: opened from any place, to continue a text or to be judged on one.

Text becomes tokens, and tokens text, as when the model was trained, or it is refused.
Shapes: B windows, L tokens of a window, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.adapt.checkpoint import ADAPTERS
from penstock.checkpoint.folder import RECORD, SUMS, Record, all_checkpoints, is_complete
from penstock.config import ConfigError, HintWarning
from penstock.data.text import BYTES
from penstock.data.tokenizer import Bytes, read_tokenizer
from penstock.families.described import GENERATION, in_one_line, quiet, setting_of
from penstock.families.weights import ModelFolder
from penstock.models.config import QWEN3_MOE
from penstock.models.qwen3_moe import CONFIG, model_type_of

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
    """Words of a `tokenizer.json`, without tokens that begin or end a text.

    Attributes:
        digest: Sha256 of the file.

    Raises:
        ValueError: For any other file, and for tokens beyond the model's vocabulary.
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

    Raises:
        ValueError: For files that are no tokenizer, and for tokens of a text beyond the model's vocabulary.
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
    """Return the words of a model that was opened at `path`.

    Args:
        config: The model's configuration.
        data: Section [data] of the run whose checkpoint it is; None for a folder of transformers.
        tokenizer: A file that a user has named, or `bytes`; None = as the model was trained.

    Raises:
        ConfigError: The configuration's `tokenizer_digest` is no text.
        ValueError: The words are not known.
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
        file_words = None if named is None else FileWords(Path(named).expanduser(), vocabulary)
    except (ValueError, OSError):
        file_words = None
    if file_words is None or digest not in (None, file_words.digest):
        if digest is None and named is None:
            raise ValueError(
                f"{path} has no tokenizer ({TOKENIZERS[0]}), and its vocabulary of {vocabulary} is not that "
                "of bytes: name the one it was trained with (--tokenizer FILE, or --tokenizer bytes)"
            )
        digits = "" if digest is None else f" {_short(digest)}"
        where = "" if named is None else f", and {named} is not there any more or has changed"
        why = f"{path} was trained on tokens of a tokenizer{digits}{where}"
        raise ValueError(f"{why}: name its tokenizer.json with --tokenizer FILE")
    return file_words


def _chosen(tokenizer: Path, digest: str | None, vocabulary: int) -> Words:
    """Return the words that a user has named. Warns of a file with which the model was not trained.

    Such a file may make the same tokens: a library that reads and saves it changes its bytes.
    """
    if tokenizer == BYTE_BY_BYTE:
        if digest not in (None, Bytes.digest):
            raise ValueError(f"the model was trained on tokens of a tokenizer {_short(digest)}, not on bytes")
        return _bytes(vocabulary)
    file_words = FileWords(tokenizer, vocabulary)
    if digest == Bytes.digest:
        raise ValueError(
            f"the model was trained on bytes, not on tokens of {tokenizer}: leave --tokenizer out"
        )
    if digest not in (None, file_words.digest):
        warnings.warn(
            f"{tokenizer} ({_short(file_words.digest)}) is not the file that the model was trained with "
            f"({_short(digest)}): what follows is true only if both make the same tokens",
            HintWarning,
            stacklevel=2,
        )
    return file_words


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


logger = logging.getLogger(__name__)

MOST_NATS = 700
"""Largest loss whose perplexity is a finite number."""

LONGEST = 2048
"""Tokens of a window, where the model has more positions or does not say how many."""

MOST_BEAMS = 64
"""Most beams: memory is needed for each."""

FIXED = {"return_dict_in_generate": False, "num_return_sequences": 1, "cache_implementation": None}
"""Arguments of `generate` that a folder's own settings of generation do not change."""

AT_ONCE = 8
"""Most windows that are judged together."""

LOGITS_AT_ONCE = 1 << 25
"""Most logits that are held for these windows; a single window may have more."""

TOKENS_AT_ONCE = 512
"""Tokens whose losses are computed together, which needs memory for two more copies of their logits."""

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, whole on this process, and its tokens."""

    model: Any
    words: Words


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token.

    Attributes:
        temperature: What logits are divided by before a draw; 0 takes the likeliest token.
        top_k: Number of likeliest tokens among which one is drawn; 0 = all.
        top_p: Probability that the tokens among which one is drawn have together.
        seed: Seed of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for `generate` of transformers."""
        if self.temperature == 0:
            return {"do_sample": False}
        drawn = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, **drawn}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The loss of a model on a text.

    Attributes:
        loss: Mean over tokens, in nats.
        tokens: Number of predicted tokens.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > MOST_NATS else math.exp(self.loss)


def open_model(path: Path, tokenizer: Path | None = None) -> Opened:
    """Open a folder of transformers, a checkpoint of `penstock train`, or its output folder (the newest one).

    Args:
        path: The folder.
        tokenizer: A tokenizer.json, or `bytes`; None = that of a folder of transformers, or what the run was
            trained with.

    Raises:
        ValueError: For any other path, and where tokens are not bytes and their tokenizer is not found.
    """
    from penstock.adapt.trained import from_checkpoint

    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        of_decoder = not (checkpoint / CONFIG).is_file() or model_type_of(checkpoint) == QWEN3_MOE
        model = from_checkpoint(checkpoint) if of_decoder else read_whole(checkpoint)
    elif (path / ADAPTERS).is_file():
        raise ValueError(
            f"{path} holds adapters of peft ({ADAPTERS}), without which their model is another one: put them "
            "into it with PeftModel.from_pretrained(model, folder), and save what merge_and_unload() returns"
        )
    elif (path / CONFIG).is_file():
        model = read_whole(path)
    else:
        raise ValueError(
            f"{path} is neither a Hugging Face model folder (config.json), nor a checkpoint or an output "
            "folder of penstock train"
        )
    data: Mapping[str, Any] | None = None
    if checkpoint is not None:
        # Section [data] of the run that wrote the checkpoint; empty for one made from a folder.
        section = (Record.read(checkpoint).settings or {}).get("data", {})
        data = section if isinstance(section, Mapping) else {}
        if not isinstance(named := data.get("tokenizer"), str | None):
            key = f"{checkpoint / RECORD}: settings.data.tokenizer"
            raise ConfigError(key, named, "must be a path or `bytes`", "Use another checkpoint.")
    words = words_of(path, model.config, data, tokenizer)
    return Opened(model.eval(), words)


def read_whole(folder: Path) -> Any:
    """Read the model in a folder of transformers.

    Raises:
        ValueError: If a tensor is missing, or is not the model's.
    """
    opened = ModelFolder.open(folder)
    return opened.read(type(opened.model), opened.tensors, opened.dtype)


def find_checkpoint(path: Path) -> Path | None:
    """Find the checkpoint that a path stands for; None if there is none.

    The path is a checkpoint, a run's output folder or a run's folder of checkpoints (the newest is taken).

    Raises:
        ValueError: Where the newest is not whole: an older one would be another model.
    """
    if (path / RECORD).is_file():
        return path
    if not path.is_dir():
        return None
    checkpoints = all_checkpoints(path / CHECKPOINTS) or all_checkpoints(path)
    if checkpoints and not is_complete(checkpoints[-1]):
        raise ValueError(
            f"{checkpoints[-1]} is not whole: it holds no {SUMS}. Give the path of another checkpoint"
        )
    return checkpoints[-1] if checkpoints else None


NOT_FINITE = "its weights or its settings are damaged. Use an earlier checkpoint, or copy it again"


class Telling:
    """A streamer for `generate` of transformers: says text while a model writes it.

    A character whose bytes have not all come waits for the rest.
    """

    def __init__(self, words: Words, prompt: str, say: Callable[[str], None]) -> None:
        self._words, self._prompt, self._say = words, prompt, say
        self._tokens: list[int] = []
        self._said = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt first [1, L], then every new token [1]."""
        first = not self._tokens
        self._tokens += value.flatten().tolist()
        if first:
            # A tokenizer may drop the first space of a text, so new text is found as the growth of the whole.
            self._said = len(self._words.decode(self._tokens))
            self._say(self._prompt)
        else:
            self._tell(self._words.decode(self._tokens).rstrip("\ufffd"))

    def end(self) -> None:
        """Say the text that still waits."""
        self._tell(self._words.decode(self._tokens))

    def _tell(self, text: str) -> None:
        if len(text) > self._said:
            self._say(text[self._said :])
            self._said = len(text)


def generate(
    opened: Opened, prompt: str, most: int, sampling: Sampling, say: Callable[[str], None] = lambda text: None
) -> str:
    """Return the text that follows a prompt, `most` tokens at most.

    Args:
        prompt: The beginning of the text.
        most: Most tokens that follow.
        sampling: How they are chosen.
        say: Called with the prompt, then with every piece of the text as soon as it is written; with beam
            search once with all of it.

    Raises:
        ValueError: For an empty prompt.
    """
    tokens = opened.words.begin(prompt)
    if not tokens:
        raise ValueError("the prompt is empty: give the model a beginning")
    torch.manual_seed(sampling.seed)
    prompt_1L = torch.tensor([tokens], device=opened.model.device)
    beams = opened.model.generation_config.num_beams or 1  # among several, the text is known at the end
    if not isinstance(beams, int) or not 1 <= beams <= MOST_BEAMS:
        raise ConfigError(
            f"{GENERATION}: num_beams", beams, "memory is needed for each", f"Use 1 to {MOST_BEAMS}."
        )
    telling = Telling(opened.words, prompt, say) if beams == 1 else None
    with _naming("generate"):
        out_1L = opened.model.generate(
            prompt_1L,
            max_new_tokens=most,
            streamer=telling,
            logits_processor=[_check_finite],
            **FIXED,
            **sampling.options,
        )
    whole = opened.words.decode(out_1L[0].tolist())  # a tokenizer may drop the first space of a text
    text = whole[len(opened.words.decode(tokens)) :]
    if telling is None:
        say(prompt + text)
    return text


def _check_finite(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of the next token; the likeliest of numbers that are none would be token 0."""
    del input_ids
    if scores.isnan().any():
        raise ValueError(f"its numbers are not finite: {NOT_FINITE}")
    return scores


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn what a model's own code raises inside this context into a ValueError of one line."""
    try:
        yield
    except OSError:  # of where the text is shown
        raise
    except Exception as error:  # foreign code may raise anything
        raise ValueError(f"the model cannot {what}: {in_one_line(error)}") from error


def judge(opened: Opened, text: str, length: int | None = None, name: str = "the text") -> Judgement:
    """Judge how well a model predicts a text: every token but the first, from those before it in its window.

    Args:
        text: The text.
        length: Tokens of a window; None = the number of positions that the model has, at most `LONGEST`.
        name: The name of the text in messages.

    Raises:
        ValueError: The text has fewer than two tokens, the model has no positions for such windows, or its
            numbers are not finite.
    """
    config = opened.model.config.get_text_config()
    most = setting_of(config, "max_position_embeddings")
    most = most if isinstance(most, int) and most > 0 else LONGEST
    length = min(most, LONGEST) if length is None else length
    if not 1 <= length <= most:
        raise ValueError(f"windows of {length} tokens: use 1 to {most}, for which the model has positions")
    tokens = torch.tensor(opened.words.encode(text), device=opened.model.device)
    if len(tokens) < 2:
        raise ValueError(f"{name} has less than two tokens: there is nothing to predict")
    at_once = max(1, min(AT_ONCE, LOGITS_AT_ONCE // (length * int(config.vocab_size))))
    total, done = 0.0, 0
    with torch.no_grad():
        for given_BL, wanted_BL in _windows(tokens, length, at_once):
            with _naming("judge a text"):
                logits_TV = opened.model(input_ids=given_BL).logits.flatten(0, 1)
            pieces = (each.split(TOKENS_AT_ONCE) for each in (logits_TV, wanted_BL.flatten()))
            for logits, wanted in zip(*pieces, strict=True):
                losses_T = F.cross_entropy(logits.float(), wanted, reduction="none")
                total += losses_T.double().sum().item()
            done += wanted_BL.numel()
            if not math.isfinite(total):
                raise ValueError(f"the model gives numbers that are not finite for {name}: {NOT_FINITE}")
            logger.debug(f"{done:,} of {len(tokens) - 1:,} tokens, loss so far {total / done:.4f}")
    return Judgement(loss=total / (len(tokens) - 1), tokens=len(tokens) - 1)


def _windows(tokens: Tensor, length: int, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of windows and of the tokens that follow theirs, [B, L]; the remainder comes last."""
    whole = (len(tokens) - 1) // length * length
    given, wanted = tokens[:-1], tokens[1:]
    if whole:
        batches = (each[:whole].view(-1, length).split(at_once) for each in (given, wanted))
        yield from zip(*batches, strict=True)
    if whole < len(given):
        yield given[None, whole:], wanted[None, whole:]
