"""Trained models on one process: opened from wherever they were saved, asked to go on, and judged on text.

Shapes: B windows, L tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.adapt.described import empty_model, quiet, read_config
from penstock.adapt.weights import refuse_misfits, stored_tensors
from penstock.adapt.words import Words, words_of
from penstock.train.storage.finished import complete_checkpoints
from penstock.train.storage.record import RECORD, Record

MOST_NATS = 700
"""Loss up to which a perplexity is a number."""

AT_ONCE = 8
"""Windows that are judged together, at most."""

LOGITS_AT_ONCE = 1 << 25
"""Numbers that are held for them; those of one window may be more."""

TOKENS_AT_ONCE = 512
"""Tokens whose losses are computed together, which takes their logits twice more."""

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, whole on this process, and its tokens."""

    model: Any
    words: Words


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. temperature: 0 takes the likeliest. top_k, top_p: of which one is drawn."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """As `generate` of transformers takes them."""
        if self.temperature == 0:
            return {"do_sample": False}
        drawn = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, **drawn}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """loss: mean over tokens, in nats. tokens: those that were predicted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > MOST_NATS else math.exp(self.loss)


def open_model(path: Path, tokenizer: Path | None = None) -> Opened:
    """Open a folder of transformers, a checkpoint of `penstock train`, or its output folder (the newest one).

    tokenizer: a tokenizer.json, or `bytes`; None = that of a folder of transformers, or what the run was
    trained with. Raises ValueError for any other path, and where tokens are not bytes and their tokenizer is
    not found.
    """
    from penstock.adapt.own import from_checkpoint

    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        model = from_checkpoint(checkpoint)
    elif (path / "config.json").is_file():
        model = read_whole(path)
    else:
        raise ValueError(
            f"{path} is neither a Hugging Face model folder (config.json), nor a checkpoint or an output "
            "folder of penstock train"
        )
    data = None if checkpoint is None else _data_of(checkpoint)
    words = words_of(path, model.config, data, tokenizer)
    return Opened(model.eval(), words)


def _data_of(checkpoint: Path) -> Mapping[str, Any]:
    """Section [data] of the run that has written a checkpoint; one that was made of a folder has none."""
    found = (Record.read(checkpoint).settings or {}).get("data", {})
    return found if isinstance(found, Mapping) else {}


def read_whole(folder: Path) -> Any:
    """The model in a folder of transformers, Penstock's own kind included.

    Raises ValueError if a tensor is missing, or is not the model's: transformers would draw it by chance.
    """
    from transformers import AutoModelForCausalLM

    import penstock.adapt.own  # noqa: F401  # makes its kind known

    config = read_config(folder)
    empty_model(folder, config)
    stored_tensors(folder)  # transformers would not say which file is damaged
    with quiet():
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    refuse_misfits(folder, told)
    return model


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path stands for: itself, or the newest of a run, or of the folder in which a run
    keeps them; None if it is none of these."""
    if (path / RECORD).is_file():
        return path
    if not path.is_dir():
        return None
    complete = complete_checkpoints(path / CHECKPOINTS) or complete_checkpoints(path)
    return complete[-1] if complete else None


class Telling:
    """Says text while a model writes it; a character whose bytes have not all come waits for the rest.

    What `generate` of transformers asks of a streamer.
    """

    def __init__(self, words: Words, prompt: str, say: Callable[[str], None]) -> None:
        self._words, self._prompt, self._say = words, prompt, say
        self._tokens: list[int] = []
        self._said = 0

    def put(self, value: Tensor) -> None:
        """Takes the prompt first [1, L], then every new token [1]."""
        first = not self._tokens
        self._tokens += value.flatten().tolist()
        if first:
            # A tokenizer may begin a text without its first space, so new text is what the whole has more.
            self._said = len(self._words.decode(self._tokens))
            self._say(self._prompt)
        else:
            self._tell(self._words.decode(self._tokens).rstrip("\ufffd"))

    def end(self) -> None:
        """Says what still waits."""
        self._tell(self._words.decode(self._tokens))

    def _tell(self, text: str) -> None:
        if len(text) > self._said:
            self._say(text[self._said :])
            self._said = len(text)


def generate(
    opened: Opened, prompt: str, most: int, sampling: Sampling, say: Callable[[str], None] = lambda text: None
) -> str:
    """The text that follows a prompt, of at most so many tokens. Raises ValueError for an empty prompt.

    say: told the prompt, then every piece of the text as soon as it is written; all at once by beam search.
    """
    tokens = opened.words.begin(prompt)
    if not tokens:
        raise ValueError("the prompt is empty: give the model a beginning")
    torch.manual_seed(sampling.seed)
    prompt_1L = torch.tensor([tokens], device=opened.model.device)
    beams = opened.model.generation_config.num_beams or 1  # of several, none is the text before the end
    telling = Telling(opened.words, prompt, say) if beams == 1 else None
    out_1L = opened.model.generate(prompt_1L, max_new_tokens=most, streamer=telling, **sampling.options)
    whole = opened.words.decode(out_1L[0].tolist())  # a tokenizer may begin a text without its first space
    text = whole[len(opened.words.decode(tokens)) :]
    if telling is None:
        say(prompt + text)
    return text


def judge(
    opened: Opened,
    text: str,
    length: int | None = None,
    name: str = "the text",
    say: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """How well a model predicts a text: every token but the first once, from those before it in its window.

    length: tokens of a window; None = as many as the model has positions for, 2048 at most. name: of the
    text. say: hears after every batch how far it is. Raises ValueError for a text of less than two tokens.
    """
    config = opened.model.config.get_text_config()
    most = int(getattr(config, "max_position_embeddings", 2048))
    length = min(most, 2048) if length is None else length
    if not 1 <= length <= most:
        raise ValueError(f"windows of {length} tokens: use 1 to {most}, for which the model has positions")
    tokens = torch.tensor(opened.words.encode(text), device=opened.model.device)
    if len(tokens) < 2:
        raise ValueError(f"{name} has less than two tokens: there is nothing to predict")
    at_once = max(1, min(AT_ONCE, LOGITS_AT_ONCE // (length * int(config.vocab_size))))
    total, done = 0.0, 0
    with torch.no_grad():
        for given_BL, wanted_BL in _windows(tokens, length, at_once):
            logits_TV = opened.model(input_ids=given_BL).logits.flatten(0, 1)
            pieces = (each.split(TOKENS_AT_ONCE) for each in (logits_TV, wanted_BL.flatten()))
            for logits, wanted in zip(*pieces, strict=True):
                losses_T = F.cross_entropy(logits.float(), wanted, reduction="none")
                total += losses_T.double().sum().item()
            done += wanted_BL.numel()
            say(f"{done:,} of {len(tokens) - 1:,} tokens, loss so far {total / done:.4f}")
    return Judgement(loss=total / (len(tokens) - 1), tokens=len(tokens) - 1)


def _windows(tokens: Tensor, length: int, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows and of the tokens after each of theirs, [B, L]; what is left over comes last."""
    whole = (len(tokens) - 1) // length * length
    given, wanted = tokens[:-1], tokens[1:]
    if whole:
        batches = (each[:whole].view(-1, length).split(at_once) for each in (given, wanted))
        yield from zip(*batches, strict=True)
    if whole < len(given):
        yield given[None, whole:], wanted[None, whole:]
