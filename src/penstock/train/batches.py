"""Which text a rank sees at a step: a pure function of the step, so a run resumes by knowing its step alone.

The corpus is cut into windows of `seq_len + 1` bytes at stride `seq_len`; the extra byte is the last label.
Whole blocks of neighbouring windows are held out, so that evaluation text is not everywhere a few bytes away
from training text. With period 4, and a block of windows per cell::

    block     0      1      2      3      4      5      6      7
    use     train  train  train  held   train  train  train  held

Training windows are visited in a new random order every epoch, and epochs follow one another without a gap.
What all ranks together see at a step depends on the size of the global batch, not on how many ranks share it.
Ranks that share attention see the same samples, so a batch is dealt to groups of ranks (`dp_size` of them).

Shapes: B samples per rank, L sequence length, G samples over all groups, W windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.config import ConfigError
from penstock.placement import SamplePlacement
from penstock.train.corpus import Corpus
from penstock.train.order import Indices, Shuffled

WINDOWS_PER_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank computes on in one step.

    `tokens_BL`     int64, bytes of the text
    `labels_BL`     int64, for every token the byte that follows it
    `sample_ids_B`  int64, different for every sample of a run: the key of counter-based dropout. Training
                      samples count up from 0 through the whole run, held-out samples down from -1
    `largest_batch`   samples of the group that has the most of this batch; None if not given
    """

    tokens_BL: torch.Tensor
    labels_BL: torch.Tensor
    sample_ids_B: torch.Tensor
    largest_batch: int | None = None


class BatchStream:
    """The batches of the ranks of one group.

    `dp_rank`, `dp_size`  which of the groups that have samples of their own, and how many there are
    `steps_per_epoch`  global batches in one pass over the training windows, rounded down

    Raises `ConfigError` when the corpus is too short for one global batch of training, or holds out nothing.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        batch_per_device: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        held_out_fraction: float,
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"group {dp_rank} of {dp_size}"
        if seq_len < 1:
            raise ConfigError("seq_len", seq_len, "must be at least 1", "Try 128.")
        if seed < 0:
            raise ConfigError("seed", seed, "must not be negative", "Try 0.")
        self._text = corpus.text
        self._seq_len = seq_len
        self._batch_per_device = batch_per_device
        self._global_batch = batch_per_device * dp_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._mine = np.array(SamplePlacement.even(self._global_batch, dp_size).held(dp_rank), dtype=np.int64)
        self._seed = seed
        window_count = max(0, (corpus.text.size - 1) // seq_len)
        self._split = Split.of(window_count, held_out_fraction)
        self._check_sizes(held_out_fraction)
        self._epoch, self._order = 0, Shuffled(self._split.training, seed, 0)
        self._held_out_order = Shuffled(self._split.held_out, 0)

    @property
    def steps_per_epoch(self) -> int:
        return self._split.training // self._global_batch

    @property
    def is_listed(self) -> bool:
        """Whether an epoch's order is a list, as it always was in earlier versions."""
        return self._order.is_listed

    def batch(self, step: int) -> Batch:
        """This rank's samples of `step`, counted from 0. Entering another epoch costs a new permutation."""
        sample_ids_B = self._places(step)
        epochs_B, places_B = np.divmod(sample_ids_B, self._split.training)
        # A batch may end one epoch and begin the next; epochs are ascending, so each is ordered once.
        parts = [self._epoch_order(int(each)).at(places_B[epochs_B == each]) for each in np.unique(epochs_B)]
        return self._cut(
            self._split.training_windows(np.concatenate(parts)), sample_ids_B, self._batch_per_device
        )

    def held_out_batches(self, max_batches: int) -> Iterator[Batch]:
        """At most `max_batches` batches of held-out text, as many on every rank so that collectives match.

        They are the same at every call and for every seed, and come from all over the corpus. The last one
        holds what is left: groups may have one sample more or less, or none.
        """
        held_out = self._split.held_out
        for index in range(min(max_batches, -(-held_out // self._global_batch))):
            start = index * self._global_batch
            places_G = np.arange(start, min(start + self._global_batch, held_out), dtype=np.int64)
            homes = SamplePlacement.even(places_G.size, self._dp_size)
            places_B = places_G[np.array(homes.held(self._dp_rank), dtype=np.int64)]
            windows_B = self._split.held_out_windows(self._held_out_order.at(places_B))
            yield self._cut(windows_B, -1 - places_B, -(-places_G.size // self._dp_size))

    def _places(self, index: int) -> Indices:
        """Places of this rank's samples when global batches are laid one after another, [B]."""
        return index * self._global_batch + self._mine

    def _epoch_order(self, epoch: int) -> Shuffled:
        """The order of `epoch`; that of the last epoch asked for is kept."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Shuffled(self._split.training, self._seed, epoch)
        return self._order

    def _cut(self, windows_B: Indices, sample_ids_B: Indices, largest_batch: int) -> Batch:
        cut = self._text.windows(windows_B * self._seq_len, self._seq_len + 1)
        text = torch.from_numpy(cut.astype(np.int64))
        return Batch(
            tokens_BL=text[:, :-1].contiguous(),
            labels_BL=text[:, 1:].contiguous(),
            sample_ids_B=torch.from_numpy(sample_ids_B),
            largest_batch=largest_batch,
        )

    def _check_sizes(self, held_out_fraction: float) -> None:
        """Refuse a corpus that cannot fill one global batch, or of which nothing is held out."""
        need = f"windows of {self._seq_len} bytes, and a global batch takes {self._global_batch}"
        hint = "Give more text, or lower batch_per_device, seq_len or the number of devices."
        if self._split.training < self._global_batch:
            why = f"the text has only {self._split.training} training {need}"
            raise ConfigError("batch_per_device", self._batch_per_device, why, hint)
        if self._split.held_out == 0:
            why = f"holds out none of {self._split.training} windows of {self._seq_len} bytes"
            raise ConfigError("held_out_fraction", held_out_fraction, why, f"Raise it. {hint}")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which windows are trained on and which are held out, as two runs of numbers that are computed.

    Of every `period` blocks the last is held out. A block is 32 windows, or a single one where the corpus is
    too short to hold out a whole block of 32.
    """

    windows: int
    period: int
    block: int

    @staticmethod
    def of(window_count: int, held_out_fraction: float) -> Split:
        """Hold out every `round(1 / held_out_fraction)`-th block."""
        period = round(1 / held_out_fraction)
        block = WINDOWS_PER_BLOCK if window_count >= WINDOWS_PER_BLOCK * period else 1
        return Split(windows=window_count, period=period, block=block)

    @property
    def training(self) -> int:
        """How many windows are trained on."""
        return self.windows - self.held_out

    @property
    def held_out(self) -> int:
        """How many windows are held out."""
        groups, rest = divmod(self.windows, self.period * self.block)
        return groups * self.block + max(0, rest - (self.period - 1) * self.block)

    def training_windows(self, places: Indices) -> Indices:
        """The windows at these places among those that are trained on, in ascending order."""
        groups, inside = np.divmod(places, (self.period - 1) * self.block)
        return groups * (self.period * self.block) + inside

    def held_out_windows(self, places: Indices) -> Indices:
        """The same among those that are held out."""
        groups, inside = np.divmod(places, self.block)
        return groups * (self.period * self.block) + (self.period - 1) * self.block + inside
