"""Which text a rank sees at a step: a pure function of the step, so a run resumes by knowing its step alone.

A text is cut into windows of `seq_len + 1` tokens at stride `seq_len`; the extra token is the last label.
Whole blocks of neighbouring windows are held out, so that evaluation text is not everywhere a few tokens away
from training text. With a fraction of 1/4, and a block of windows per cell::

    block     0      1      2      3      4      5      6      7
    use     train  train  train  held   train  train  train  held

Training windows are visited in a new random order every epoch, and epochs follow one another without a gap.
What all ranks together see at a step depends on the size of the global batch, not on how many ranks share it.
Ranks that share attention see the same samples, so a batch is dealt to groups of ranks (`dp_size` of them).

Shapes: B samples per rank, L sequence length, G samples over all groups, W windows.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar

import numpy as np
import torch

from penstock.checkpoint.folder import GLOBAL_BATCH
from penstock.config import ConfigError
from penstock.config.bounds import types_of
from penstock.data import DataConfig
from penstock.data.corpus import Corpus, ToPrepare, check_apart, check_one_source, load_corpora, to_prepare
from penstock.data.files import HINT
from penstock.data.order import Dealer, Indices, Shuffled
from penstock.data.text import Readable, Scanned, TextError, entropy_nats, scan
from penstock.device import device_of
from penstock.runtime.batch import NO_LABEL
from penstock.topology import Control, Layout
from penstock.train.config import RunConfig

WINDOWS_PER_BLOCK = 32

FINEST: Final = 1_000_000
"""Largest denominator of the held-out fraction: the longest period of blocks of which some are held out."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank computes on in one step.

    Attributes:
        tokens_BL: Tokens of the text, int64.
        labels_BL: For every token the one that follows it, int64.
        sample_ids_B: A number that is different for every sample of a run, int64: the key of counter-based
            dropout. Training samples count up from 0 through the whole run, held-out samples down from -1.
        largest_batch: Samples of the group that has the most of this batch; None if not given.
        documents_BL: For every token the position in the sample at which its document begins, int64; None if
            a sample is taken as one document.
    """

    tokens_BL: torch.Tensor
    labels_BL: torch.Tensor
    sample_ids_B: torch.Tensor
    largest_batch: int | None = None
    documents_BL: torch.Tensor | None = None

    def on(self, device: torch.device) -> Batch:
        """Return the batch on a device. The host does not wait for the copies."""
        move = partial(device_of(device).from_host, device=device)
        moved: dict[str, Any] = {
            name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


class ReadAhead:
    """The batches of a run's steps on its device; on a GPU the next is read while the last one is computed.

    That is on the thread that issues operations, when it would wait: another thread would take its turns, and
    pinned memory belongs to the device that a thread has chosen.
    """

    def __init__(self, stream: BatchStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._next: tuple[int, Batch] | None = None

    def take(self, step: int) -> Batch:
        """Return the batch of `step`, counted from 0."""
        (number, batch), self._next = self._next or (None, None), None
        return self._read(step) if batch is None or number != step else batch

    def prepare(self, step: int) -> None:
        """Read the batch of `step` if the device is busy meanwhile."""
        if device_of(self._device).is_gpu:
            with suppress(Exception):  # it is read again when it is taken, and fails then
                self._next = step, self._read(step)

    def _read(self, step: int) -> Batch:
        return self._stream.batch(step).on(self._device)


class BatchStream:
    """The batches of the ranks of one group.

    Args:
        dp_rank: Index of this group among the groups that have samples of their own.
        dp_size: Number of these groups.
        held_out_fraction: Share of the windows of each text that is held out.
        separate_documents: Whether batches say where documents begin.

    Raises:
        ConfigError: If the corpus is too short for one global batch of training, or holds out nothing.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        *,
        seq_len: int,
        batch_per_device: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        held_out_fraction: float,
        separate_documents: bool = False,
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"group {dp_rank} of {dp_size}"
        self._seq_len, self._separate = seq_len, separate_documents
        self._batch_per_device = batch_per_device
        self._global_batch = batch_per_device * dp_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._mine = np.array_split(np.arange(self._global_batch, dtype=np.int64), dp_size)[dp_rank]
        self._parts = [_Part(corpus, seq_len, held_out_fraction, seed) for corpus in corpora]
        training = sum(part.split.training for part in self._parts)
        windows = f"windows of {self._seq_len} {self._parts[0].text.unit}"
        hint = "Give more text, or lower batch_per_device, seq_len or the number of devices."
        if training < self._global_batch:
            why = f"the text has only {training} training {windows}, and a global batch takes "
            raise ConfigError("batch_per_device", self._batch_per_device, f"{why}{self._global_batch}", hint)
        for part in self._parts:
            if part.split.held_out == 0 or part.split.training == 0:
                why = f"holds out none of {part.split.training} {windows}{part.name}"
                raise ConfigError("held_out_fraction", held_out_fraction, why, f"Raise it. {hint}")
        shares = [corpus.share for corpus in corpora]
        self._dealer, self._held_out_dealer = Dealer(shares, seed), Dealer(shares, 0)
        self._held_out = self._held_out_dealer.until([part.split.held_out for part in self._parts])
        if not self._held_out:
            why = "holds out too little of a text that has a large weight"
            raise ConfigError("held_out_fraction", held_out_fraction, why, "Raise it, or give more text.")

    @property
    def is_listed(self) -> bool:
        """Whether an epoch's order is stored as a list, as it always was in earlier versions."""
        return all(part.order.is_listed for part in self._parts)

    def batch(self, step: int) -> Batch:
        """Return this rank's samples of `step`, counted from 0. Entering an epoch costs a new permutation."""
        sample_ids_B = step * self._global_batch + self._mine  # places in the sequence of all global batches
        texts_B, numbers_B = self._dealer.deal(sample_ids_B)
        starts_B = self._of_parts(texts_B, numbers_B, _Part.training_windows)
        return self._cut(texts_B, starts_B, sample_ids_B, self._batch_per_device)

    def held_out_batches(self, max_batches: int) -> Iterator[Batch]:
        """Yield at most `max_batches` held-out batches, as many on every rank, so that collectives match.

        The batches are the same at every call and for every seed, and come from the whole corpus; several
        texts are mixed in their proportions until one is exhausted. The last batch holds what is left: groups
        may have one sample more or less, or none.
        """
        for index in range(min(max_batches, -(-self._held_out // self._global_batch))):
            start = index * self._global_batch
            places_G = np.arange(start, min(start + self._global_batch, self._held_out), dtype=np.int64)
            places_B = np.array_split(places_G, self._dp_size)[self._dp_rank]
            texts_B, numbers_B = self._held_out_dealer.deal(places_B)
            windows_B = self._of_parts(texts_B, numbers_B, _Part.held_out_windows)
            yield self._cut(texts_B, windows_B, -1 - places_B, -(-places_G.size // self._dp_size))

    def _of_parts(
        self, texts_B: Indices, numbers_B: Indices, ask: Callable[[_Part, Indices], Indices]
    ) -> Indices:
        """Return what `ask` finds for every sample in its own text, [B]."""
        answers_B = np.empty_like(numbers_B)
        for text in np.unique(texts_B):
            answers_B[texts_B == text] = ask(self._parts[text], numbers_B[texts_B == text])
        return answers_B

    def _cut(self, texts_B: Indices, windows_B: Indices, sample_ids_B: Indices, largest_batch: int) -> Batch:
        cut_BL = np.empty((len(windows_B), self._seq_len + 1), dtype=np.int64)
        for row, text, window in zip(cut_BL, texts_B, windows_B, strict=True):
            start = int(window) * self._seq_len
            row[:] = self._parts[text].text.tokens(start, start + self._seq_len + 1)
        whole_BL = torch.from_numpy(cut_BL)
        labels_BL, documents_BL = whole_BL[:, 1:].clone(), None  # one sample's would be a view of its tokens
        if self._separate:
            starts_BL = np.zeros_like(cut_BL)  # where in its window every token's document begins
            for row, text, window in zip(starts_BL, texts_B, windows_B, strict=True):
                start = int(window) * self._seq_len
                offsets = self._parts[text].text.document_starts(start, start + self._seq_len + 1) - start
                row[offsets] = offsets
            begins_BL = torch.from_numpy(np.maximum.accumulate(starts_BL, axis=1))
            labels_BL[begins_BL[:, 1:] == torch.arange(1, self._seq_len + 1, device="cpu")] = NO_LABEL
            documents_BL = begins_BL[:, :-1].contiguous()
        return Batch(
            tokens_BL=whole_BL[:, :-1].contiguous(),
            labels_BL=labels_BL,
            sample_ids_B=torch.from_numpy(sample_ids_B),
            largest_batch=largest_batch,
            documents_BL=documents_BL,
        )


class _Part:
    """One of the texts: its windows, which of them are held out, and the order in which they are visited."""

    def __init__(self, corpus: Corpus, seq_len: int, held_out_fraction: float, seed: int) -> None:
        self.text, self._seed = corpus.text, seed
        self.name = "" if corpus.share == 1 else f" in {corpus.source}"
        self.split = Split.of(max(0, (corpus.text.size - 1) // seq_len), held_out_fraction)
        self._epoch, self.order = 0, Shuffled(self.split.training, seed, 0)
        self._held_out_order = Shuffled(self.split.held_out, 0)

    def training_windows(self, numbers_B: Indices) -> Indices:
        """Return the windows visited at these positions, which ascend, when epochs follow one another."""
        epochs_B, places_B = np.divmod(numbers_B, self.split.training)
        parts = []
        for epoch in np.unique(epochs_B):  # a batch may span epochs; each is ordered once
            if epoch != self._epoch:
                self._epoch = int(epoch)
                self.order = Shuffled(self.split.training, self._seed, self._epoch)
            parts.append(self.order.at(places_B[epochs_B == epoch]))
        return self.split.training_windows(np.concatenate(parts))

    def held_out_windows(self, numbers_B: Indices) -> Indices:
        """Return the held-out windows visited at these positions."""
        return self.split.held_out_windows(self._held_out_order.at(numbers_B))


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which windows are trained on and which are held out, computed instead of listed.

    Of every `period` blocks `held` are held out, as far from each other as possible: block b where the
    integer part of b * held / period is less than that of (b + 1) * held / period.

    Attributes:
        windows: Number of windows, of both kinds.
        held: Blocks of each period that are held out.
        period: Blocks after which the pattern repeats.
        block: Windows in a block: 32, or a single one where the corpus is too short to hold out a whole block
            of 32.
    """

    windows: int
    held: int
    period: int
    block: int

    @staticmethod
    def of(window_count: int, held_out_fraction: float) -> Split:
        """Return the split that holds out this fraction of the blocks."""
        share = held_out_share(held_out_fraction)
        first = -(-share.denominator // share.numerator)  # blocks up to the first that is held out
        block = WINDOWS_PER_BLOCK if window_count >= WINDOWS_PER_BLOCK * first else 1
        return Split(windows=window_count, held=share.numerator, period=share.denominator, block=block)

    @property
    def training(self) -> int:
        """Number of windows that are trained on."""
        return self.windows - self.held_out

    @property
    def held_out(self) -> int:
        """Number of windows that are held out."""
        blocks, rest = divmod(self.windows, self.block)
        before, after = (self.held * each // self.period for each in (blocks, blocks + 1))
        return before * self.block + (rest if after > before else 0)

    def training_windows(self, places: Indices) -> Indices:
        """Return the windows at these positions among those that are trained on, in ascending order."""
        blocks, inside = np.divmod(places, self.block)
        return blocks * self.period // (self.period - self.held) * self.block + inside

    def held_out_windows(self, places: Indices) -> Indices:
        """Return the windows at these positions among those that are held out, in ascending order."""
        blocks, inside = np.divmod(places, self.block)
        return (-(-(blocks + 1) * self.period // self.held) - 1) * self.block + inside


def held_out_share(held_out_fraction: float) -> Fraction:
    """Return the fraction as it was written: 0.4 becomes two fifths, although no float is exactly that."""
    return Fraction(held_out_fraction).limit_denominator(FINEST)


logger = logging.getLogger(__name__)

HELD_OUT_BLOCKS: Final = "data.held_out_fraction (blocks held out of so many)"
"""Key of uneven fractions alone: earlier versions held out one block of some, whatever the fraction."""

T = TypeVar("T")

PAGE, GLIMPSED_PAGES = 4096, 64
TOLD_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """The texts of a run and the batches cut from them.

    Attributes:
        corpora: The texts.
        stream: The batches of this rank.
        scanned: What was counted in every text, or in a sample of it.
        identity: Settings and texts on which the order of samples depends, by configuration key; two runs
            with the same identity see the same samples at the same step, on any layout.
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
            label = f"{share}{corpus.source}"
            if scanned.seen != text.size:
                label += f"; identified and frequencies of {text.unit} counted by {scanned.seen:,} of them"
            described.append(label)
        return "; ".join(described)

    @property
    def unigram_entropy_nats(self) -> float:
        """Loss of a model that knows only how often each token occurs, in nats per token."""
        return entropy_nats(self.scanned, [corpus.share for corpus in self.corpora])


def check_source(config: RunConfig) -> None:
    """Raise ConfigError about problems with the texts that show without reading or preparing them."""
    with _as_settings(config):
        check_one_source(config.data)
        check_apart(config.data)
        waiting = to_prepare(config.data)
        for text in waiting:
            _check_waiting(config, text)
        if all(text.is_done for text in waiting):
            _checked_corpora(config)


def open_source(config: RunConfig, layout: Layout, control: Control, *, scans: bool = True) -> Source:
    """Open the texts and check them. All ranks call it together.

    Args:
        scans: Whether this rank prepares texts that are not yet prepared, and reads all texts once, which
            takes seconds per gigabyte. One rank of each machine does, rank 0 among them; the others compare
            sizes and some pages.

    Raises:
        ConfigError: On all ranks alike, for a problem of one of them.
    """
    purpose = "preparing the training text"
    given_up = Event()
    control.agreed(
        lambda: _prepare(config, given_up) if scans else None, purpose, slowly=True, given_up=given_up
    )
    corpora, stream, glimpses = control.agreed(partial(_opened, config, layout), "opening the training text")
    _check_same(config, control, glimpses)
    purpose = "reading the training text"
    found = control.agreed(lambda: _scanned(config, corpora) if scans else None, purpose, slowly=True)
    digests = _check_same(config, control, None if found is None else [each.digest for each in found])
    scanned = control.gather(found if control.rank == 0 else None, "sharing what was found")[0]
    assert scanned is not None and digests is not None, "rank 0 has read the text"
    share = held_out_share(config.data.held_out_fraction)
    identity: dict[str, object] = {
        "train.seed": config.train.seed,
        "model.seq_len": config.model.seq_len,
        "data.held_out_fraction": config.data.held_out_fraction,
        GLOBAL_BATCH: config.data.batch_per_device * layout.dp_size,
    }
    if len(corpora) == 1:
        identity["data.path (sha256 of the text)"] = digests[0]
    else:
        identity["data.mixture (sha256 of the texts)"] = list(digests)
        identity["data.mixture (shares)"] = [corpus.share for corpus in corpora]
    if share.numerator > 1:
        identity[HELD_OUT_BLOCKS] = [share.numerator, share.denominator]
    if config.data.separate_documents:
        identity["data.separate_documents"] = True
    if not stream.is_listed:
        identity["order of the samples of a long text"] = "computed"
    return Source(corpora=corpora, stream=stream, scanned=scanned, identity=identity)


def _prepare(config: RunConfig, given_up: Event) -> None:
    """Prepare the texts that are not yet prepared, until it is `given_up`; the next run continues it."""
    with _as_settings(config, writes=True):
        for text in to_prepare(config.data):
            if text.is_done:
                continue
            _check_waiting(config, text)
            logger.info(f"preparing {text.work.source} in {text.folder}; the next run finds it there")
            reported_s = time.monotonic()
            for progress in text.work.run(text.folder, waits=True):
                if given_up.is_set():
                    return
                if time.monotonic() - reported_s > TOLD_EVERY_S:
                    reported_s = time.monotonic()
                    done = 100 * progress.read_bytes // max(1, progress.total_bytes)
                    logger.info(f"prepared {done} %: {progress.tokens:,} tokens")


def _opened(config: RunConfig, layout: Layout) -> tuple[list[Corpus], BatchStream, list[tuple[int, str]]]:
    """Return the texts, this rank's batches of them, and what ranks compare of each text."""
    with _as_settings(config):
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
        return corpora, stream, [_glimpse(corpus.text) for corpus in corpora]


def _scanned(config: RunConfig, corpora: Sequence[Corpus]) -> list[Scanned]:
    with _as_settings(config):
        return [scan(corpus.text) for corpus in corpora]


def _glimpse(text: Readable) -> tuple[int, str]:
    """Return what every rank compares: the text's size, and the hash of a few pages from all over it."""
    digest, last = hashlib.sha256(), max(0, text.size - PAGE)
    for page in range(GLIMPSED_PAGES):
        start = last * page // (GLIMPSED_PAGES - 1)
        digest.update(text.tokens(start, min(start + PAGE, text.size)).tobytes())
    return text.size, digest.hexdigest()


def _check_same(config: RunConfig, control: Control, own: T) -> T:
    """Return rank 0's value. Raises ConfigError on all ranks unless it is that of all that have one."""
    everyone = control.gather(own, "comparing the training text")
    for rank, other in enumerate(everyone):
        if other is not None and other != everyone[0]:
            why = f"rank {rank} reads another text than rank 0"
            hint = "Copy the same text to all machines and name it; Python versions differ in theirs."
            raise ConfigError("data.path", config.data.path, why, hint)
    return everyone[0]


@contextmanager
def _as_settings(config: RunConfig, *, writes: bool = False) -> Iterator[None]:
    """Turn an error about texts into one about a setting; if it `writes`, the system's about tokens, too."""
    try:
        yield
    except ConfigError as error:
        if error.key == "--out":
            error = ConfigError("cache", error.value, error.why, error.hint)
        raise error.under("data" if error.key in types_of(DataConfig) else "") from None
    except TextError as error:
        raise ConfigError("data.path", config.data.path, str(error).rstrip("."), HINT) from error
    except OSError as error:
        if not writes:
            why = f"cannot be read ({error.strerror}: {error.filename})"
            raise ConfigError("data.path", config.data.path, why, HINT) from error
        why = f"tokens cannot be written there ({error.strerror}: {error.filename})"
        hint = "Name a folder with room in data.cache; what is there already is continued."
        cache = config.data.cache
        raise ConfigError("data.cache", None if cache is None else str(cache), why, hint) from error


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
