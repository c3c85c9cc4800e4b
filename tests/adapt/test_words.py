"""Text as tokens, of a file and of a folder of transformers: one rule for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock.adapt.asking import FileWords, FolderWords, Words, open_model
from tests.support.adapted import small

WORDS = ("?", "<s>", "</s>", "a", "b", "</", "s", ">")
TEXT, ENDED = "a b a", "a </s> b"


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
    assert words.encode(TEXT) == [3, 4, 3]
    assert words.encode(ENDED) == [3, 5, 6, 7, 4]
    first = [1] if kind is FolderWords else []
    assert words.begin(TEXT) == [*first, 3, 4, 3]
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
            tokens_of(TEXT)
