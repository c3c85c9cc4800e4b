"""The texts of a run on this rank: prepared, opened, compared between ranks, identified for later runs."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

from penstock.checkpoint.folder import GLOBAL_BATCH
from penstock.config import ConfigError
from penstock.config.bounds import types_of
from penstock.data import DataConfig
from penstock.data.corpus import Corpus, ToPrepare, check_apart, check_one_source, load_corpora, to_prepare
from penstock.data.files import HINT
from penstock.data.text import Readable, Scan, Scanned, TextError, entropy_nats
from penstock.topology import Control, Layout
from penstock.train.batches import BatchStream, held_out_share
from penstock.train.config import RunConfig

logger = logging.getLogger(__name__)

HELD_OUT_BLOCKS: Final = "data.held_out_fraction (blocks held out of so many)"
"""Key of uneven fractions alone: earlier versions held out one block of some, whatever the fraction."""

T = TypeVar("T")

PAGE, GLIMPSED_PAGES = 4096, 64
TURN_S = 2.0
"""How long a rank works before it lets the others know that it is still there."""

TOLD_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """The texts of a run and the batches cut from them.

    identity: settings and texts on which the order of samples depends, by configuration key; two runs with
    the same identity see the same samples at the same step, on any layout. scanned: what was found in every
    text, or in a sample of it.
    """

    corpora: Sequence[Corpus]
    stream: BatchStream
    scanned: Sequence[Scanned]
    identity: Mapping[str, object]

    @property
    def tokenizer(self) -> str:
        """The sha256 of what made the tokens of all texts, or `bytes`."""
        return self.corpora[0].text.tokenizer

    @property
    def words(self) -> str:
        """Description of the texts, and of how much of each was read, if not all."""
        described = []
        for corpus, scanned in zip(self.corpora, self.scanned, strict=True):
            text, share = corpus.text, "" if corpus.share == 1 else f"{100 * corpus.share:.3g} % "
            words = f"{share}{corpus.source}"
            if scanned.seen != text.size:
                words += f"; identified and frequencies of {text.unit} counted by {scanned.seen:,} of them"
            described.append(words)
        return "; ".join(described)

    @property
    def unigram_entropy_nats(self) -> float:
        """Loss of a model that knows only how often each token occurs, in nats per token."""
        return entropy_nats(self.scanned, [corpus.share for corpus in self.corpora])


def check_source(config: RunConfig) -> None:
    """Raise ConfigError about problems with the texts that show without reading or preparing them."""
    try:
        check_one_source(config.data)
        check_apart(config.data)
        waiting = to_prepare(config.data)
        for each in waiting:
            _check_waiting(config, each)
        if all(each.is_done for each in waiting):
            _checked_corpora(config)
    except ConfigError as error:
        raise _located(error) from None


def open_source(config: RunConfig, layout: Layout, control: Control, *, scans: bool = True) -> Source:
    """Open the texts and check them. A problem of one rank is raised alike on all ranks.

    scans: whether this rank prepares texts that are not yet prepared, and reads all texts once, which takes
    seconds per gigabyte; one rank of each machine does, rank 0 among them. The others compare sizes and some
    pages.
    """
    _take_turns(config, control, _prepare(config) if scans else iter(()), "preparing the training text")
    problem, glimpse = None, None
    try:
        corpora = _checked_corpora(config)
        stream = BatchStream(
            corpora,
            seq_len=config.model.seq_len,
            batch_per_device=config.data.batch_per_device,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            seed=config.train.seed,
            held_out_fraction=config.data.held_out_fraction,
            separate_documents=config.data.separate_documents,
        )
        glimpse = [_glimpse(corpus.text) for corpus in corpora]
    except (ConfigError, TextError) as error:
        problem = _as_config_error(config, error)
    _agree(config, control, problem, glimpse)
    scanning = [Scan(corpus.text) for corpus in corpora] if scans else []
    _take_turns(config, control, chain.from_iterable(map(_to_the_end, scanning)), "reading the training text")
    mine = [found for each in scanning if (found := each.result) is not None]
    digests = _agree(config, control, None, [each.digest for each in mine] or None)
    counts = control.gather(mine if control.rank == 0 else None, "sharing what was found")
    scanned = counts[0]
    assert scanned is not None, "rank 0 has read the text"
    return Source(
        corpora=corpora,
        stream=stream,
        scanned=scanned,
        identity=_identity(config, layout, stream, corpora, digests),
    )


def _prepare(config: RunConfig) -> Iterator[None]:
    """Prepare the texts that are not yet prepared; report progress from time to time."""
    for each in to_prepare(config.data):
        if each.is_done:
            continue
        _check_waiting(config, each)
        logger.info(f"preparing {each.work.source} in {each.folder}; the next run finds it there")
        told_s = time.monotonic()
        for progress in each.work.run(each.folder, waits=True):
            if time.monotonic() - told_s > TOLD_EVERY_S:
                told_s = time.monotonic()
                done = 100 * progress.read_bytes // max(1, progress.total_bytes)
                logger.info(f"prepared {done} %: {progress.tokens:,} tokens")
            yield


def _to_the_end(scan: Scan) -> Iterator[None]:
    while not scan.work(TURN_S):
        yield


def _take_turns(config: RunConfig, control: Control, work: Iterator[None], purpose: str) -> None:
    """Do the work, while the ranks that wait for it keep hearing that this one is still there."""
    ended = False
    while not ended:
        problem, done, until_s = None, False, time.monotonic() + TURN_S
        try:
            while not done and time.monotonic() < until_s:
                done = next((False for _ in work), True)
        except (ConfigError, TextError, OSError) as error:
            problem = _as_config_error(config, error)
        turns = control.gather((problem, done), purpose)
        for found, _ in turns:
            if found is not None:
                raise found
        ended = all(done for _, done in turns)


def _glimpse(text: Readable) -> tuple[int, str]:
    """Return what every rank compares: the text's size, and the hash of a few pages from all over it."""
    found, last = hashlib.sha256(), max(0, text.size - PAGE)
    for page in range(GLIMPSED_PAGES):
        start = last * page // (GLIMPSED_PAGES - 1)
        found.update(text.tokens(start, min(start + PAGE, text.size)).tobytes())
    return text.size, found.hexdigest()


def _agree(config: RunConfig, control: Control, problem: ConfigError | None, mine: T | None) -> T:
    """Return rank 0's value if all ranks that have one agree. Raises on all ranks what is wrong on one."""
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


def _as_config_error(config: RunConfig, error: ConfigError | TextError | OSError) -> ConfigError:
    """Return the error as a ConfigError about a setting of the run."""
    if isinstance(error, ConfigError):
        return _located(error)
    if isinstance(error, OSError):
        why = f"tokens cannot be written there ({error.strerror}: {error.filename})"
        hint = "Name a folder with room in data.cache; what is there already is continued."
        cache = config.data.cache
        return ConfigError("data.cache", None if cache is None else str(cache), why, hint)
    return ConfigError("data.path", config.data.path, str(error), HINT)


def _located(error: ConfigError) -> ConfigError:
    """Return the error about a field with the field's full key."""
    if error.key == "--out":
        error = ConfigError("cache", error.value, error.why, error.hint)
    return error.under("data" if error.key in types_of(DataConfig) else "")


def _check_waiting(config: RunConfig, waiting: ToPrepare) -> None:
    """Raise ConfigError for problems that would show only after hours of preparing, or never."""
    waiting.work.check()
    _check_vocabulary(config, waiting.work.tokenizer.vocabulary, waiting.work.source)


def _checked_corpora(config: RunConfig) -> list[Corpus]:
    corpora = load_corpora(config.data)
    for corpus in corpora:
        _check_vocabulary(config, corpus.text.vocabulary, corpus.source)
    return corpora


def _check_vocabulary(config: RunConfig, vocabulary: int, source: str) -> None:
    """Raise ConfigError unless the model knows every token of the text."""
    if config.model.vocab_size < vocabulary:
        why = f"the text ({source}) has {vocabulary:,} different tokens"
        raise ConfigError("model.vocab_size", config.model.vocab_size, why, f"Use {vocabulary} or more.")


def _identity(
    config: RunConfig,
    layout: Layout,
    stream: BatchStream,
    corpora: Sequence[Corpus],
    digests: Sequence[str],
) -> dict[str, object]:
    share = held_out_share(config.data.held_out_fraction)
    found: dict[str, object] = {
        "train.seed": config.train.seed,
        "model.seq_len": config.model.seq_len,
        "data.held_out_fraction": config.data.held_out_fraction,
        GLOBAL_BATCH: config.data.batch_per_device * layout.dp_size,
    }
    if len(corpora) == 1:
        found["data.path (sha256 of the text)"] = digests[0]
    else:
        found["data.mixture (sha256 of the texts)"] = list(digests)
        found["data.mixture (shares)"] = [corpus.share for corpus in corpora]
    if share.numerator > 1:
        found[HELD_OUT_BLOCKS] = [share.numerator, share.denominator]
    if config.data.separate_documents:
        found["data.separate_documents"] = True
    if not stream.is_listed:
        found["order of the samples of a long text"] = "computed"
    return found
