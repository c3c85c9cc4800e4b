"""The text of a run on this rank: opened, compared between ranks, and identified for later continuation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import ConfigError
from penstock.topology import Control, Layout
from penstock.train.batches import BatchStream
from penstock.train.config import RunConfig
from penstock.train.corpus import Corpus, load_corpus


@dataclass(frozen=True, kw_only=True)
class Source:
    """identity: what the order of samples depends on, by configuration key; two runs with the same identity
    see the same samples at the same step, on any layout."""

    corpus: Corpus
    stream: BatchStream
    identity: Mapping[str, object]


def open_source(config: RunConfig, layout: Layout, control: Control) -> Source:
    """Read the text and check it. A problem of one rank is raised, the same, on all of them."""
    problem, corpus, stream = None, None, None
    try:
        corpus, stream = _open(config, layout)
    except ConfigError as error:
        problem = error
    digest = "" if corpus is None else hashlib.sha256(corpus.text.tobytes()).hexdigest()
    everyone = control.gather((problem, digest), "comparing the training text")
    for rank, (found, other) in enumerate(everyone):
        if found is not None:
            raise found
        if other != everyone[0][1]:
            why = f"rank {rank} reads another text than rank 0"
            hint = "Copy the same text to all machines and name it; Python versions differ in theirs."
            raise ConfigError("data.path", config.data.path, why, hint)
    assert corpus is not None and stream is not None
    return Source(corpus=corpus, stream=stream, identity=_identity(config, layout, digest))


def _open(config: RunConfig, layout: Layout) -> tuple[Corpus, BatchStream]:
    try:
        corpus = load_corpus(config.data)
        stream = BatchStream(
            corpus,
            seq_len=config.model.seq_len,
            batch_per_device=config.data.batch_per_device,
            rank=layout.rank,
            world_size=layout.world_size,
            seed=config.train.seed,
            held_out_fraction=config.data.held_out_fraction,
        )
    except ConfigError as error:
        raise error.under({"seq_len": "model", "seed": "train"}.get(error.key, "data")) from None
    return corpus, stream


def _identity(config: RunConfig, layout: Layout, digest: str) -> dict[str, object]:
    return {
        "train.seed": config.train.seed,
        "model.seq_len": config.model.seq_len,
        "data.held_out_fraction": config.data.held_out_fraction,
        "data.batch_per_device x processes": config.data.batch_per_device * layout.world_size,
        "data.path (sha256 of the text)": digest,
    }
