"""What a model is trained on: text as bytes, prepared tokens, mixtures of both. No torch."""

from penstock.data.config import DataConfig
from penstock.data.corpus import Corpus, load_corpora
from penstock.data.text import TextError

__all__ = ["Corpus", "DataConfig", "TextError", "load_corpora"]
