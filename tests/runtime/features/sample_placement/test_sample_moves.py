"""Samples that move: a step is the same wherever they are, and ranks never disagree where that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from penstock.apportion import Counts
from penstock.features.dispatch import FlatDispatch, Place
from penstock.features.sample_placement.feature import Prediction
from penstock.moe import RouteMaker
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.samples import ExchangeGroup, SampleTable, settle
from penstock.runtime import TaskError
from tests.runtime.test_layout_bytes import really_sent
from tests.support.cases import moving_case as case
from tests.support.close import check_all_close
from tests.support.parity import Case, batch_of, merge, own_batch, reference_step, run_step, stack_of
from tests.support.placers import Eager, RandomHomes, Rotated
from tests.support.ranks import Pools


@pytest.mark.parametrize("comm_dtype", [None, "int8"])
def test_masks_and_compressed_rows_are_those_of_samples_that_stay(
    ranks: Pools, comm_dtype: Literal["int8"] | None
) -> None:
    """Dropout is keyed by sample, and a row is rounded for itself; the residual follows beside the rows."""
    step = case(4, "penstock")
    rounded = replace(step.moe, comm_dtype=comm_dtype)
    step = replace(step, model=replace(step.model, dropout=0.3), moe=rounded)
    still, moved = (merge(ranks(4).run(run_step, each)) for each in (replace(step, placer=None), step))
    assert abs(still.loss - reference_step(replace(step, model=replace(step.model, dropout=0))).loss) > 1e-6
    assert abs(still.loss - moved.loss) <= 1e-10 * still.loss
    check_all_close(moved.gradients, still.gradients, 1e-10)


def evaluated(rank: int, step: Case) -> float:
    """The loss in evaluation, where half of the plan runs."""
    stack = stack_of(rank, step).eval()
    tokens, labels = own_batch(rank, step)
    return float(stack(tokens, labels))


def test_evaluation_moves_samples_too(ranks: Pools) -> None:
    step = case(4, "flowmoe", batches=(2, 0, 3, 1))
    still, moved = (ranks(4).run(evaluated, each)[0] for each in (replace(step, placer=None), step))
    assert abs(still - moved) <= 1e-12 * still


def digests(rank: int, seed: int) -> list[int]:
    """Hashes of the homes that a rank finds for random tables: few different counts, so many ties."""
    del rank
    drawn, found = np.random.default_rng(seed), []
    for _ in range(300):
        samples_P = [int(n) for n in drawn.integers(0, 5, size=4)]
        counts = drawn.integers(0, 3, size=(sum(samples_P), 8 + 8))
        exchange_group = ExchangeGroup.alone([0, 0, 1, 1])
        chunks = int(drawn.integers(1, 3))
        table = SampleTable.of(counts, samples_P, exchange_group, ranks=4, positions=8, chunks=chunks)
        following = Replication.none(ExpertPlacement.even(8, 4), 0)
        device_I = Eager().homes(table, following, int(drawn.integers(0, 3)))
        maker = RouteMaker(FlatDispatch(), Place(0, 4, 2))
        found.append(settle(table, device_I, 0, maker, (table.chunks,)).digest)
    return found


def test_ranks_find_the_same_homes_for_tables_full_of_ties(ranks: Pools) -> None:
    first, *others = ranks(4).run(digests, 0)
    assert all(other == first for other in others)
    assert len(set(first)) > 150


def test_what_the_next_gate_says_changes_homes_and_all_ranks_know_it(ranks: Pools) -> None:
    predictions: tuple[Prediction, ...] = ("none", "next_gate", "conditional")
    steps = [case(4, "sequential", placer=Eager(), prediction=each) for each in predictions]
    without, asked, learnt = (ranks(4).run(homes_of_steps, step) for step in steps)
    assert without[0] != asked[0]
    for found in (without, asked, learnt):
        assert all(rank == found[0] for rank in found)


class Noting(Eager):
    """Remembers the homes that it has found."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        found = super().homes(table, following, moved_rows)
        HOMES.append(found.tolist())
        return found


HOMES: list[list[int]] = []


def homes_of_steps(rank: int, step: Case) -> list[list[int]]:
    """The homes in all layers of three steps."""
    HOMES.clear()
    stack = stack_of(rank, replace(step, placer=Noting()))
    tokens, labels = own_batch(rank, step)
    for _ in range(3):
        stack(tokens, labels).backward()
    return list(HOMES)


EXPECTED: list[list[int]] = []


class Expecting(RandomHomes):
    """Remembers how many rows each sample is expected to send in the next layer."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        EXPECTED.append(table.expected_IE.sum(axis=1).tolist())
        return super().homes(table, following, moved_rows)


def test_padding_is_expected_nowhere() -> None:
    """A token that is no padding sends a row for each choice in the next layer; after the last, none."""
    step = case(1, "sequential", node_size=None, padding=True, placer=Expecting())
    EXPECTED.clear()
    stack_of(0, step)(*batch_of(step), None, step.valid)
    assert step.valid is not None
    wanted = (step.valid.sum(dim=1) * step.moe.top_k).tolist()
    assert [wanted, [0] * len(wanted)] == EXPECTED


# ---- what travels ------------------------------------------------------------------------------------------


def sent_bytes(rank: int, step: Case) -> dict[str, int]:
    """Bytes that a rank sends in one step, by op and phase."""
    sent, _ = really_sent(rank, step)
    return {f"{op}.{phase}": sizes.total() for (op, phase), sizes in sent.items() if op in ("D", "C", "SM")}


@pytest.mark.parametrize("shared", [0, 3])
def test_rows_bring_the_residual_for_two_numbers_each(ranks: Pools, shared: int) -> None:
    """The same step with the residual in rows and beside them: where Rotated sends samples, both agree."""
    step = case(4, "sequential", placer=Rotated())
    step = replace(step, moe=replace(step.moe, shared_ffn_hidden_size=shared))
    hidden, top_k, length = step.model.hidden_size, step.moe.top_k, step.model.seq_len
    moved = 0
    carried, apart = (ranks(4).run(sent_bytes, replace(step, carried=each)) for each in (True, False))
    for mine, theirs in zip(carried, apart, strict=True):
        for op in ("D.F", "D.B"):
            assert mine[op] * hidden == theirs[op] * (hidden + 2) > 0
        assert (mine["C.F"], mine["C.B"]) == (theirs["C.F"], theirs["C.B"])
        facts_bytes = 8 * (1 + length * (1 + top_k))
        shared_bytes = 8 * length * hidden if shared else 0
        samples = mine["SM.F"] // (facts_bytes + shared_bytes)
        separate_bytes = samples * 8 * length * (hidden + top_k)
        assert mine["SM.F"] == samples * (facts_bytes + shared_bytes)
        assert theirs["SM.F"] == mine["SM.F"] + separate_bytes
        assert mine.get("SM.B", 0) == samples * shared_bytes
        moved += samples
    assert moved > 0


# ---- what is refused ---------------------------------------------------------------------------------------


class Differing(RandomHomes):
    """Another choice on every rank, as a solver with ties of its own would make."""

    def homes(self, *table: Any) -> Any:
        return RandomHomes(seed=torch.distributed.get_rank()).homes(*table)


def stepped(rank: int, step: Case, lengths: tuple[int, ...] = ()) -> None:
    stack = stack_of(rank, step)
    tokens, labels = own_batch(rank, step)
    length = lengths[rank] if lengths else tokens.shape[1]
    stack(tokens[:, :length], labels[:, :length])


def test_ranks_that_find_different_homes_stop_before_rows_move(ranks: Pools) -> None:
    ranks(2).close()  # a test before may have cut its connections, as this one does
    pool = ranks(2)
    texts = pool.told(TaskError, stepped, case(2, "sequential", placer=Differing(), node_size=None))
    pool.close()  # its connections are cut
    assert any("found other homes for samples of layer 0 than member 0" in text for text in texts), texts
    assert all("task L0.SH.m0.F" in text for text in texts), texts


def drops(block: Any) -> None:
    block.mlp_dropout.p = 0.5


def adds_half(block: Any) -> None:
    add = block.add
    block.add = lambda residual_BLM, out_TM, keys: add(residual_BLM, 0.5 * out_TM, keys)


def scales_norms(block: Any) -> None:
    block.post_attention_layernorm.register_forward_hook(lambda norm, given, x: 0.5 * x)


@pytest.mark.parametrize("change", [drops, adds_half, scales_norms])
def test_what_would_meet_the_residual_in_rows_is_refused(change: Callable[[Any], None]) -> None:
    """Of a model that does more since its stack was built a step fails, and so does a plan."""
    step = case(1, "sequential", node_size=None)
    stack = stack_of(0, step)
    tokens, labels = (whole[step.mine(0)] for whole in batch_of(step))
    for block in stack.parts.parts:
        change(block)
    for act in (lambda: stack(tokens, labels), lambda: stack.adopt(stack.plan)):
        with pytest.raises((ValueError, TaskError), match="rows carry the residual stream of samples"):
            act()


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"capacity_factor": 1.0}, "samples stay where routing is not dropless"),
        ({"one_copy_per_rank": True}, "one row serves several experts"),
        ({"aux_loss_group": "microbatch"}, "aux_loss_group = microbatch judges balance by the samples"),
    ],
)
def test_routing_that_depends_on_who_shares_a_rank_is_refused(moe: dict[str, Any], words: str) -> None:
    step = case(1, "sequential", node_size=None)
    with pytest.raises(ValueError, match=words):
        stepped(0, replace(step, moe=replace(step.moe, **moe)))


def test_samples_of_different_lengths_are_refused(ranks: Pools) -> None:
    step = case(2, "sequential", node_size=None, batches=(2, 2))
    for text in ranks(2).told(ValueError, stepped, step, (5, 4)):
        assert text.startswith("ranks 0 and 1 have samples of 5 and 4 tokens, and samples move between them")


def marked_on_one(rank: int, step: Case, name: str) -> None:
    tokens, labels = own_batch(rank, step)
    marks = {"valid_BL": torch.ones_like(tokens, dtype=torch.bool), "documents_BL": torch.zeros_like(tokens)}
    stack_of(rank, step)(tokens, labels, **({name: marks[name]} if rank else {}))


@pytest.mark.parametrize("name", ["valid_BL", "documents_BL"])
def test_what_one_rank_alone_marks_is_refused_on_all(ranks: Pools, name: str) -> None:
    for text in ranks(2).told(ValueError, marked_on_one, case(2, "sequential", node_size=None), name):
        assert text.startswith("rank 1 ") and f"({name}) and rank 0 does not" in text
