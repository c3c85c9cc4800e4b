"""Models that are judged on a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock.adapt import asking
from penstock.adapt.asking import (
    ByteWords,
    FileWords,
    FolderWords,
    Opened,
    Sampling,
    Telling,
    Words,
    generate,
    judge,
    open_model,
)
from tests.support.adapted import small

LENGTH, VOCABULARY = 8, 256
TEXT = "The network is slow, so it works while devices compute."


@pytest.mark.parametrize(("most", "windows"), [(3, 3), (0.5, 1), (100, 6)])
def test_logits_of_few_windows_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, most: float, windows: int
) -> None:
    """As many as fit, at least one; the loss is that of all of them."""
    monkeypatch.setattr(asking, "LOGITS_AT_ONCE", int(most * LENGTH * VOCABULARY))
    monkeypatch.setattr(asking, "TOKENS_AT_ONCE", 5)
    model, seen = small("mixtral", vocab_size=VOCABULARY).eval(), []

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        del module, given
        seen.append(len(named["input_ids"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    found = judge(Opened(model, ByteWords()), TEXT, LENGTH)
    assert max(seen) == windows
    tokens = torch.tensor(list(TEXT.encode()))
    total = 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        given, wanted = tokens[first : first + LENGTH], tokens[first + 1 : first + LENGTH + 1]
        with torch.no_grad():
            logits = model(input_ids=given[None, : len(wanted)]).logits[0].double()
        total += F.cross_entropy(logits, wanted, reduction="sum").item()
    assert found.loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert found.tokens == len(TEXT) - 1


def test_text_is_told_while_it_is_written() -> None:
    """Piece by piece, the prompt first; together they are the whole."""
    opened = Opened(small("mixtral", vocab_size=VOCABULARY).eval(), ByteWords())
    pieces: list[str] = []
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=3)
    text = generate(opened, "The network", 40, sampling, pieces.append)
    assert pieces[0] == "The network"
    assert "".join(pieces[1:]) == text
    assert len(pieces) > 5


def test_what_beams_find_is_told_at_the_end() -> None:
    """Settings of generation come with a model; of several beams none is the text before the end."""
    opened = Opened(small("mixtral", vocab_size=VOCABULARY).eval(), ByteWords())
    opened.model.generation_config.num_beams = 2
    pieces: list[str] = []
    text = generate(opened, "A", 8, Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0), pieces.append)
    assert pieces == ["A" + text]


def test_a_character_is_told_when_all_its_bytes_have_come() -> None:
    """Two bytes of one character are one piece; half a one at the end is told as unknown."""
    pieces: list[str] = []
    telling = Telling(ByteWords(), "Ü", pieces.append)
    telling.put(torch.tensor([list("Ü".encode())]))
    for token in "aöb".encode() + "ö".encode()[:1]:
        telling.put(torch.tensor([token]))
    telling.end()
    assert pieces == ["Ü", "a", "ö", "b", "\ufffd"]


# ---- text as tokens ----------------------------------------------------------------------------------------


WORDS = ("?", "<s>", "</s>", "a", "b", "</", "s", ">")
SPOKEN, ENDED = "a b a", "a </s> b"


def save_tokenizer(folder: Path) -> Path:
    """One that begins and ends every text, and has the settings of batches of equal length."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokens = [(word, WORDS.index(word)) for word in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=tokens)
    tokenizer.enable_padding(length=10)
    tokenizer.enable_truncation(2)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", [FileWords, FolderWords])
def test_a_text_becomes_the_tokens_that_are_trained_on(
    tmp_path: Path, kind: Callable[[Path, int], Words]
) -> None:
    words = kind(save_tokenizer(tmp_path), 61)
    assert words.encode(SPOKEN) == [3, 4, 3]
    assert words.encode(ENDED) == [3, 5, 6, 7, 4]
    first = [1] if kind is FolderWords else []
    assert words.begin(SPOKEN) == [*first, 3, 4, 3]
    assert words.begin(ENDED) == [*first, 3, 2, 4]
    assert words.begin("") == first
    assert words.encode(ENDED) == [3, 5, 6, 7, 4]
    assert words.decode([1, 3, 4, 2]) == "a b"


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    small("mixtral", vocab_size=4).save_pretrained(tmp_path)
    words = open_model(save_tokenizer(tmp_path)).words
    assert words.encode("a a") == [3, 3]
    for tokens_of in (words.encode, words.begin):
        with pytest.raises(ValueError, match=r"tokenizer.json .*makes token 4 of the text, .* knows 4"):
            tokens_of(SPOKEN)
