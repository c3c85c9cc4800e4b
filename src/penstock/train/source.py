"""The text of a run on this rank: opened, compared between ranks, and identified for later continuation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.config import ConfigError
from penstock.topology import Control, Layout
from penstock.train.batches import BatchStream
from penstock.train.config import RunConfig
from penstock.train.corpus import Corpus, load_corpus
from penstock.train.scan import Scan, Scanned
from penstock.train.storage.record import GLOBAL_BATCH
from penstock.train.text import HINT, Text, TextError

T = TypeVar("T")

PAGE_BYTES, GLIMPSED_PAGES = 4096, 64
TURN_S = 2.0
"""How long a rank reads on before it lets the others know that it is there."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """identity: what the order of samples depends on, by configuration key; two runs with the same identity
    see the same samples at the same step, on any layout. scanned: byte counts, of all or of a sample."""

    corpus: Corpus
    stream: BatchStream
    scanned: Scanned
    identity: Mapping[str, object]

    @property
    def words(self) -> str:
        """The text, for people; and how much of it was looked at, if that is not all."""
        seen, size = self.scanned.scanned_bytes, self.corpus.text.size
        note = "" if seen == size else f"; identified and byte frequencies counted by {seen:,} bytes of it"
        return self.corpus.source + note


def open_source(config: RunConfig, layout: Layout, control: Control, *, scans: bool = True) -> Source:
    """Open the text and check it. A problem of one rank is raised, the same, on all of them.

    scans: whether this rank reads it all once, which takes seconds per gigabyte; one of each machine does,
    rank 0 among them. The others compare its size and some pages.
    """
    problem, opened, glimpse = None, None, None
    try:
        opened = _open(config, layout)
        glimpse = _glimpse(opened[0].text)
    except ConfigError as error:
        problem = error
    except TextError as error:
        problem = ConfigError("data.path", config.data.path, str(error), HINT)
    _agree(config, control, problem, glimpse)
    assert opened is not None
    corpus, stream = opened
    scanned = _scanned(config, corpus.text, control, scans=scans)
    return Source(
        corpus=corpus, stream=stream, scanned=scanned, identity=_identity(config, layout, stream, scanned)
    )


def _glimpse(text: Text) -> tuple[int, str]:
    """What every rank compares: its size, and the hash of a few pages from all over it."""
    found, last = hashlib.sha256(), max(0, text.size - PAGE_BYTES)
    for page in range(GLIMPSED_PAGES):
        start = last * page // (GLIMPSED_PAGES - 1)
        found.update(text.read(start, min(start + PAGE_BYTES, text.size)))
    return text.size, found.hexdigest()


def _scanned(config: RunConfig, text: Text, control: Control, *, scans: bool) -> Scanned:
    """What rank 0 has found, after comparison with what the other machines have."""
    scan = Scan(text) if scans else None
    ended = False
    while not ended:  # ranks that wait hear that the others are still there
        problem, done = None, True
        try:
            done = scan is None or scan.work(TURN_S)
        except TextError as error:
            problem = ConfigError("data.path", config.data.path, str(error), HINT)
        turns = control.gather((problem, done), "reading the training text")
        for found, _ in turns:
            if found is not None:
                raise found
        ended = all(done for _, done in turns)
    mine = None if scan is None else scan.result
    return _agree(config, control, None, mine)


def _agree(config: RunConfig, control: Control, problem: ConfigError | None, mine: T | None) -> T:
    """Rank 0's, if all ranks that have one have the same. Raises on all ranks what is wrong on one."""
    everyone = control.gather((problem, mine), "comparing the training text")
    for found, _ in everyone:
        if found is not None:
            raise found
    for rank, (_, other) in enumerate(everyone):
        if other is not None and other != everyone[0][1]:
            why = f"rank {rank} reads another text than rank 0"
            hint = "Copy the same text to all machines and name it; Python versions differ in theirs."
            raise ConfigError("data.path", config.data.path, why, hint)
    agreed = everyone[0][1]
    assert agreed is not None, "rank 0 has opened and read the text"
    return agreed


def _open(config: RunConfig, layout: Layout) -> tuple[Corpus, BatchStream]:
    try:
        corpus = load_corpus(config.data)
        stream = BatchStream(
            corpus,
            seq_len=config.model.seq_len,
            batch_per_device=config.data.batch_per_device,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            seed=config.train.seed,
            held_out_fraction=config.data.held_out_fraction,
        )
    except ConfigError as error:
        raise error.under({"seq_len": "model", "seed": "train"}.get(error.key, "data")) from None
    return corpus, stream


def _identity(config: RunConfig, layout: Layout, stream: BatchStream, scanned: Scanned) -> dict[str, object]:
    computed = {} if stream.is_listed else {"order of the samples of a long text": "computed"}
    return {
        "train.seed": config.train.seed,
        "model.seq_len": config.model.seq_len,
        "data.held_out_fraction": config.data.held_out_fraction,
        GLOBAL_BATCH: config.data.batch_per_device * layout.dp_size,
        "data.path (sha256 of the text)": scanned.digest,
        **computed,
    }
