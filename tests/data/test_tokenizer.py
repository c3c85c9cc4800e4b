"""Tokenizers of all kinds: a document ends where it ends, and what cannot be tokenized is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from penstock.config import ConfigError
from penstock.data.text import TextError
from penstock.data.tokenizer import FileTokenizer, open_tokenizer

WORDS = {"</s>": 0, "a": 1, "b": 2}
TEXTS = ["a </s> b", "b", "</s>", ""]


def saved(folder: Path, model: models.Model, *special: str) -> str:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(WORDS, unk_token="a"),
        models.Unigram([("</s>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=1),
    ],
)
def test_a_text_that_spells_the_end_ends_no_document(tmp_path: Path, model: models.Model) -> None:
    """Also where the end stands in the vocabulary of the model itself, as that of sentencepiece has it."""
    tokenizer = FileTokenizer(saved(tmp_path, model, "</s>"), None)
    assert tokenizer.end == 0
    assert [list(each) for each in tokenizer.encode(TEXTS)] == [[1, 2], [2], [], []]


def test_an_ordinary_token_ends_documents_only_where_no_text_has_it(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(saved(tmp_path, models.WordLevel(WORDS, unk_token="a")), "b")
    assert [list(each) for each in tokenizer.encode(["a a"])] == [[1, 1]]
    with pytest.raises(TextError, match=r"a text has 'b', which is to end documents"):
        tokenizer.encode(["a a", "a b"])


def test_what_a_tokenizer_cannot_take_is_told(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(saved(tmp_path, models.WordLevel(WORDS, unk_token="missing")), None)
    with pytest.raises(TextError, match=r"cannot tokenize a text .*WordLevel"):
        tokenizer.encode(["else"])
    with pytest.raises(ConfigError, match=r"tokenizer = .*no such user"):
        open_tokenizer("~nobody-has-this-name/tokenizer.json")
