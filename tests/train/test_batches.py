"""Which text a rank sees at a step.

The text is random, so that a sample tells which window it was cut from.
Shapes: B samples per rank, L sequence length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.data.corpus import Corpus
from penstock.data.order import Indices
from penstock.data.text import Text
from penstock.device import using
from penstock.train.batches import WINDOWS_PER_BLOCK, Batch, BatchStream, ReadAhead, Split
from tests.support.card import CardDevice, install
from tests.support.ranks import Pools


@dataclass(frozen=True, kw_only=True)
class Case:
    """A corpus of `windows` windows, and who shares a global batch. shares: of several such texts."""

    windows: int = 100
    seq_len: int = 8
    global_batch: int = 12
    seed: int = 0
    held_out_fraction: float = 0.25
    shares: tuple[float, ...] = (1.0,)

    def stream(self, rank: int = 0, world_size: int = 1) -> BatchStream:
        return BatchStream(
            [replace(random_corpus(self.windows * self.seq_len + 1), share=share) for share in self.shares],
            seq_len=self.seq_len,
            batch_per_device=self.global_batch // world_size,
            dp_rank=rank,
            dp_size=world_size,
            seed=self.seed,
            held_out_fraction=self.held_out_fraction,
        )


cases = st.builds(
    Case,
    windows=st.integers(60, 300),
    seq_len=st.integers(4, 12),
    seed=st.integers(0, 2**40),
    held_out_fraction=st.sampled_from([0.2, 0.25, 0.3, 0.35, 0.4, 0.5]),
    shares=st.sampled_from([(1.0,), (0.75, 0.25), (0.001, 0.5, 0.499)]),
)


def random_bytes(length: int) -> bytes:
    return np.random.default_rng(7).integers(0, 256, size=length, dtype=np.uint8).tobytes()


def random_corpus(length: int) -> Corpus:
    with NamedTemporaryFile() as file:  # which the text goes on reading after its name is gone
        file.write(random_bytes(length))
        file.flush()
        return Corpus(text=Text(None, [Path(file.name)]), source="test")


def split_windows(window_count: int, held_out_fraction: float) -> tuple[Indices, Indices]:
    """Training and held-out windows as lists, block by block."""
    share = Fraction(str(held_out_fraction))
    block = WINDOWS_PER_BLOCK if window_count >= WINDOWS_PER_BLOCK * math.ceil(1 / share) else 1
    windows_W = np.arange(window_count, dtype=np.int64)
    held_out = [math.floor((b + 1) * share) > math.floor(b * share) for b in range(window_count)]
    held_out_W = np.array(held_out, dtype=bool)[windows_W // block]
    return windows_W[~held_out_W], windows_W[held_out_W]


def windows_of(case: Case, batch: Batch) -> list[int]:
    """Which windows of the corpus the samples of `batch` are."""
    text = random_bytes(case.windows * case.seq_len + 1)
    window_of = {text[w * case.seq_len : (w + 1) * case.seq_len + 1]: w for w in range(case.windows)}
    assert len(window_of) == case.windows
    whole_BL = torch.cat([batch.tokens_BL, batch.labels_BL[:, -1:]], dim=1)
    return [window_of[bytes(row)] for row in whole_BL.tolist()]


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.tokens_BL, right.tokens_BL)
        and torch.equal(left.labels_BL, right.labels_BL)
        and torch.equal(left.sample_ids_B, right.sample_ids_B)
    )


def union(batches: list[Batch]) -> Batch:
    return Batch(
        tokens_BL=torch.cat([batch.tokens_BL for batch in batches]),
        labels_BL=torch.cat([batch.labels_BL for batch in batches]),
        sample_ids_B=torch.cat([batch.sample_ids_B for batch in batches]),
    )


@given(cases, st.integers(0, 50))
def test_labels_are_the_next_tokens(case: Case, step: int) -> None:
    batch = case.stream().batch(step)
    assert batch.tokens_BL.shape == batch.labels_BL.shape == (case.global_batch, case.seq_len)
    assert batch.tokens_BL.dtype == batch.labels_BL.dtype == batch.sample_ids_B.dtype == torch.int64
    assert torch.equal(batch.tokens_BL[:, 1:], batch.labels_BL[:, :-1])
    assert len(windows_of(case, batch)) == case.global_batch  # every sample is cut from the corpus


@pytest.mark.slow
@given(cases, st.integers(0, 50), st.sampled_from([2, 3, 4, 6, 12]))
def test_all_ranks_together_see_the_same_whatever_their_number(
    case: Case, step: int, world_size: int
) -> None:
    ranks = [case.stream(rank, world_size) for rank in range(world_size)]
    assert same(union([rank.batch(step) for rank in ranks]), case.stream().batch(step))
    shares = zip(*(rank.held_out_batches(99) for rank in ranks), strict=True)  # strict: equally many per rank
    for parts, whole in zip(shares, case.stream().held_out_batches(99), strict=True):
        assert same(union(list(parts)), whole)
        sizes = [len(part.tokens_BL) for part in parts]  # of the last batch, ranks may have none
        assert max(sizes) - min(sizes) <= 1
        assert {part.largest_batch for part in parts} == {max(sizes)}
        assert all(part.tokens_BL.shape[1] == case.seq_len for part in parts)


@pytest.mark.slow
@given(cases, st.lists(st.integers(0, 60), min_size=2, max_size=8))
def test_a_batch_depends_on_the_step_alone(case: Case, steps: list[int]) -> None:
    used = case.stream()
    for step in steps:
        assert same(used.batch(step), case.stream().batch(step))
    other = replace(case, seed=case.seed + 1).stream()  # held-out text does not depend on the seed either
    assert all(map(same, used.held_out_batches(9), other.held_out_batches(9)))


@pytest.mark.parametrize("fraction", [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.15, 0.05, 0.0512, 1e-3])
def test_as_much_is_held_out_as_is_asked_for(fraction: float) -> None:
    split = Split.of(100_000, fraction)
    assert abs(split.held_out / 100_000 - fraction) < 5e-4
    assert split.held_out + split.training == 100_000
    windows_W = [
        ask(np.arange(count))
        for ask, count in ((split.training_windows, split.training), (split.held_out_windows, split.held_out))
    ]
    assert (np.sort(np.concatenate(windows_W)) == np.arange(100_000)).all()


def test_a_corpus_that_holds_out_less_than_a_batch_is_enough() -> None:
    (batch,) = Case(windows=20).stream().held_out_batches(1000)
    assert len(batch.tokens_BL) == 5


@pytest.mark.slow
@given(cases)
def test_sample_ids_never_repeat(case: Case) -> None:
    stream = case.stream()
    batches = [*(stream.batch(step) for step in range(40)), *stream.held_out_batches(1000)]
    ids = union(batches).sample_ids_B
    assert ids.unique().numel() == ids.numel()
    assert torch.equal(ids[: 40 * case.global_batch], torch.arange(40 * case.global_batch))


@pytest.mark.parametrize("period", [3, 7])
def test_one_block_of_some_is_the_one_that_earlier_versions_held_out(period: int) -> None:
    """Runs that began with those go on as they were, also where the fraction is no decimal number."""
    split = Split.of(100_000, 1 / period)
    windows_W = np.arange(100_000)
    before_W = windows_W[(windows_W // 32) % period == period - 1]
    assert (split.held_out_windows(np.arange(split.held_out)) == before_W).all()


@given(st.integers(0, 5000), st.sampled_from([0.05, 0.1, 0.3, 0.5]))
def test_every_window_is_either_training_or_held_out(window_count: int, fraction: float) -> None:
    split = Split.of(window_count, fraction)
    training_W = split.training_windows(np.arange(split.training))
    held_out_W = split.held_out_windows(np.arange(split.held_out))
    assert sorted([*training_W.tolist(), *held_out_W.tolist()]) == list(range(window_count))
    listed = split_windows(window_count, fraction)
    assert [training_W.tolist(), held_out_W.tolist()] == [windows_W.tolist() for windows_W in listed]


@given(cases.map(lambda case: replace(case, shares=(1.0,))))
def test_samples_come_in_the_order_that_runs_have_always_had(case: Case) -> None:
    """A run that was begun by an earlier version goes on with the very samples it would have seen there."""
    training_W, held_out_W = split_windows(case.windows, case.held_out_fraction)
    drawn = [np.random.Generator(np.random.PCG64((case.seed, epoch))) for epoch in range(3)]
    order_W = np.concatenate([generator.permutation(training_W) for generator in drawn])
    stream = case.stream()
    steps = order_W.size // case.global_batch
    seen = [window for step in range(steps) for window in windows_of(case, stream.batch(step))]
    assert seen == order_W[: len(seen)].tolist()
    held_out = [w for batch in stream.held_out_batches(1000) for w in windows_of(case, batch)]
    assert held_out == np.random.Generator(np.random.PCG64((0,))).permutation(held_out_W).tolist()
    (first,), again = stream.held_out_batches(1), stream.held_out_batches(1000)
    assert same(first, next(again))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (Case(windows=0), "batch_per_device"),
        (Case(windows=14), "batch_per_device"),
        (Case(held_out_fraction=1e-6), "held_out_fraction"),
    ],
)
def test_what_cannot_be_batched_is_refused_by_name(case: Case, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        case.stream()
    assert caught.value.key == key
    assert caught.value.hint


def test_a_mixture_has_its_proportions_and_every_text_its_own_order() -> None:
    """Texts are told apart by the parity of their bytes; windows of each come as if it were alone."""
    texts = [random_bytes(100 * 8 + 1), random_bytes(60 * 8 + 1)]
    odd = [bytes(byte & 254 | number for byte in text) for number, text in enumerate(texts)]
    with NamedTemporaryFile() as first, NamedTemporaryFile() as second:
        corpora = []
        for file, text, share in zip((first, second), odd, (0.75, 0.25), strict=True):
            file.write(text)
            file.flush()
            corpora.append(Corpus(text=Text(None, [Path(file.name)]), source="test", share=share))
    sizes = {"seq_len": 8, "batch_per_device": 40, "dp_rank": 0, "dp_size": 1, "seed": 3}
    mixed = BatchStream(corpora, **sizes, held_out_fraction=0.25)  # type: ignore[arg-type]
    seen = torch.cat([mixed.batch(step).tokens_BL for step in range(100)])
    for number, corpus in enumerate(corpora):
        of_text = seen[seen[:, 0] % 2 == number]
        assert abs(len(of_text) / len(seen) - corpus.share) < 0.03
        alone = BatchStream([corpus], **sizes, held_out_fraction=0.25)  # type: ignore[arg-type]
        lone = torch.cat([alone.batch(step).tokens_BL for step in range(100)])
        assert torch.equal(of_text, lone[: len(of_text)])
    held_out = torch.cat([batch.tokens_BL for batch in mixed.held_out_batches(99)])
    assert not {tuple(row) for row in held_out.tolist()} & {tuple(row) for row in seen.tolist()}
    assert set((held_out[:, 0] % 2).tolist()) == {0, 1}


@pytest.mark.parametrize("batch_per_device", [1, 4])
def test_documents_are_separated(batch_per_device: int) -> None:
    """The files of a text: where each begins is told for every token, and no token is to predict that."""
    contents = [bytes([65 + number]) * (3 * number + 1) for number in range(12)]
    with TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        corpus = Corpus(text=Text(None, files), source="test")
    stream = BatchStream(
        [corpus],
        seq_len=7,
        batch_per_device=batch_per_device,
        dp_rank=0,
        dp_size=1,
        seed=3,
        held_out_fraction=0.5,
        separate_documents=True,
    )
    for batch in (*map(stream.batch, range(6)), *stream.held_out_batches(9)):
        assert batch.documents_BL is not None
        assert batch.tokens_BL.min() >= 0
        for row, labels, begins in zip(
            *map(torch.Tensor.tolist, (batch.tokens_BL, batch.labels_BL, batch.documents_BL)), strict=True
        ):
            after_end = [place + 1 for place, token in enumerate(row) if token == ord("\n")]
            expected = [max([0, *(each for each in after_end if each <= place)]) for place in range(7)]
            assert begins == expected
            assert [place for place, label in enumerate(labels) if label == -100] == [
                end - 1 for end in after_end
            ]


class Broken:
    """A stream that cannot be read."""

    def batch(self, step: int) -> Batch:
        raise OSError(f"step {step}")


def read_ahead(rank: int) -> list[str]:
    """What reading ahead raises on a stand-in for a GPU, and when."""
    del rank
    device = install()
    with using(CardDevice()):
        batches = ReadAhead(cast(BatchStream, Broken()), device)
        batches.prepare(3)
        said = []
        for step in (3, 4):
            try:
                batches.take(step)
            except OSError as error:
                said.append(str(error))
        return said


@pytest.mark.slow
def test_a_batch_that_cannot_be_read_fails_the_step_that_needs_it(cards: Pools) -> None:
    assert cards(1).run(read_ahead) == [["step 3", "step 4"]]


def test_a_cpu_reads_nothing_ahead() -> None:
    ReadAhead(cast(BatchStream, Broken()), torch.device("cpu")).prepare(3)
