"""Ops of tensor parallelism: ranks of a node share heads, dense widths and vocabulary, and their samples.

Between blocks every rank holds its part of each sample's tokens ("split") or all of them ("replicated"). What
computes on shards of weights needs all tokens and leaves a partial sum of them:

    split       gather ─ shard computes ─ scatter        all-gather, reduce-scatter; backward the other way
    replicated  copy   ─ shard computes ─ reduce         nothing, all-reduce; backward all-reduce, nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.features.routed import Move, Routed, RoutedStep, within
from penstock.graph.task import Task
from penstock.ops.base import Backward, Family, Kind, Op, OpSpec, Place
from penstock.ops.core import PARTIAL, REPLICATED, coded
from penstock.ops.work import Collective, Sizes, Work, WorkOf
from penstock.routing.sizes import split_sizes

COUNT_BYTES = 8
PEAK_BYTES = 3 * 4
"""Bytes of a token: a shard's largest logit, its sum of exponentials, the label's logit; in float32."""

BOTH = (REPLICATED, PARTIAL)


@dataclass(frozen=True)
class Ways:
    """The ops around a computation on shards of weights, by how tokens lie on either side of it."""

    gather: str
    copy: str
    scatter: str
    reduce: str

    @property
    def all(self) -> tuple[str, ...]:
        """The ops of these ways; a way without one is left out."""
        return tuple(op for op in (self.gather, self.copy, self.scatter, self.reduce) if op)


ATTENTION = Ways(Op.TOKEN_GATHER, Op.TOKEN_COPY, Op.TOKEN_SCATTER, Op.TOKEN_REDUCE)
DENSE = Ways(Op.DENSE_GATHER, Op.DENSE_COPY, Op.DENSE_SCATTER, Op.DENSE_REDUCE)
EMBED = Ways("", "", Op.EMBED_SCATTER, Op.EMBED_REDUCE)
HEAD = Ways(Op.HEAD_GATHER, Op.HEAD_COPY, "", "")


def _collective(forward: Collective, backward: Collective) -> WorkOf:
    """Return the work of the task's collective over all tokens, by phase; "" = nothing is sent."""

    def work(task: Task, sizes: Sizes) -> Work:
        size = sizes.hidden_bytes(sizes.tokens(task) * task.cut.token_shards)
        collective = forward if task.forward else backward
        if not collective:
            return Work(copied_bytes=size / sizes.tp_size)
        return Work(collective=collective, sent_bytes=size)

    return work


def _heads(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    flops = sizes.attention_flops(tokens) - sizes.router_flops(tokens)
    return Work(
        flops=flops / sizes.tp_size,
        copied_bytes=sizes.hidden_bytes(2 * tokens),
        kernels=sizes.kernels(tokens, "attention", shares=sizes.tp_size),
    )


def _gate(task: Task, sizes: Sizes) -> Work:
    tokens, coded_bytes = sizes.tokens(task), coded(task, sizes)
    return Work(
        flops=sizes.router_flops(tokens),
        copied_bytes=sizes.hidden_bytes(2 * tokens * sizes.top_k) + coded_bytes,
        kernels=sizes.kernels(tokens, "router", beside_bytes=coded_bytes),
    )


def _passing(task: Task, sizes: Sizes) -> Work:
    return Work(copied_bytes=sizes.hidden_bytes(2 * sizes.tokens(task)))


def _dense(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    flops = sizes.dense_flops(tokens) / sizes.tp_size
    kernels = sizes.kernels(tokens, "dense", shares=sizes.tp_size)
    return Work(flops=flops, copied_bytes=sizes.hidden_bytes(2 * tokens), kernels=kernels)


def _logits(task: Task, sizes: Sizes) -> Work:
    tokens = sizes.tokens(task)
    flops, kernels = (
        sizes.head_flops(tokens) / sizes.tp_size,
        sizes.kernels(tokens, "head", shares=sizes.tp_size),
    )
    return Work(flops=flops, copied_bytes=sizes.hidden_bytes(tokens), kernels=kernels)


def _loss(task: Task, sizes: Sizes) -> Work:
    """Return the work of the exponentials of the logits, and of their gradients, which are as large."""
    tokens = sizes.tokens(task)
    copied_bytes = 2 * sizes.logit_bytes(tokens) / sizes.tp_size
    return Work(copied_bytes=copied_bytes, kernels=sizes.kernels(tokens, "loss", shares=sizes.tp_size))


def _peaks(task: Task, sizes: Sizes) -> Work:
    size = sizes.tokens(task) * PEAK_BYTES * sizes.tp_size
    return Work(collective="all_gather", sent_bytes=size)


def _choices(task: Task, sizes: Sizes) -> Work:
    """Return the work of summing a number per sample and expert."""
    size = sizes.samples(task) * sizes.num_experts * COUNT_BYTES
    return Work(collective="all_reduce", sent_bytes=size)


def _transfer(
    name: str,
    title: str,
    forward: Collective,
    backward: Collective,
    transpose: str,
    place: Place = "block",
) -> OpSpec:
    work = _collective(forward, backward)
    return OpSpec(name=name, title=title, kind=Kind.COLLECTIVE, work=work, transpose=transpose, place=place)


def _around(what: str, ways: Ways, place: Place = "block") -> list[OpSpec]:
    gather: Collective = "all_gather"
    scatter: Collective = "reduce_scatter"
    t = ATTENTION
    specs = [
        _transfer(ways.gather, f"tokens of all ranks, for {what}", gather, scatter, t.scatter, place),
        _transfer(
            ways.copy, f"tokens for {what}, whose gradients are summed", "", "all_reduce", t.reduce, place
        ),
        _transfer(ways.scatter, f"sum of {what}, to every rank its tokens", scatter, gather, t.gather, place),
        _transfer(ways.reduce, f"sum of {what}, to all ranks", "all_reduce", "", t.copy, place),
    ]
    return [spec for spec in specs if spec.name]


_computed = partial(OpSpec, kind=Kind.COMPUTE, given=frozenset({"metadata"}))
_recomputable = partial(_computed, recomputable=True)

OPS = (
    *_around("attention", ATTENTION),
    *_around("dense feed-forward parts", DENSE),
    *_around("the embedding", EMBED, "input"),
    *_around("the output head", HEAD, "output"),
    _recomputable(
        name=Op.HEADS,
        title="attention of this rank's heads",
        work=_heads,
        gradients=BOTH,
        launches=43,
        family=Family.ATTENTION,
    ),
    _recomputable(
        name=Op.GATE,
        title="residual, norm, router, permute",
        work=_gate,
        gradients=REPLICATED,
        turn="gated",
        launches=39,
        family=Family.ATTENTION,
    ),
    _recomputable(
        name=Op.DENSE_NORM, title="residual and norm of a dense block", work=_passing, gradients=REPLICATED
    ),
    _recomputable(
        name=Op.DENSE,
        title="this rank's part of a dense feed-forward part",
        work=_dense,
        gradients=BOTH,
    ),
    _computed(name=Op.DENSE_ADD, title="output of a dense block", work=_passing),
    _computed(
        name=Op.LOGITS,
        title="final norm, logits of this rank's vocabulary",
        work=_logits,
        gradients=BOTH,
        place="output",
        launches=16,
    ),
    OpSpec(
        name=Op.PEAKS,
        place="output",
        title="what all shards of the vocabulary know of a token's logits",
        kind=Kind.COLLECTIVE,
        work=_peaks,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.LOSS,
        place="output",
        launches=12,
        title="loss over all shards of the vocabulary",
        kind=Kind.COMPUTE,
        work=_loss,
        given=frozenset({"peaks", "metadata"}),
    ),
    OpSpec(
        name=Op.CHOICES,
        title="how often each sample chose each expert, by all ranks that share its tokens",
        kind=Kind.COLLECTIVE,
        work=_choices,
        backward=Backward.VALUE,
    ),
    _transfer(Op.KEEP_TOKENS, "this rank's tokens, before the gate", "", "all_gather", Op.GATHER_OUTPUT),
    OpSpec(
        name=Op.GATHER_TOKENS,
        title="tokens of all ranks, which attention has gathered, for the gate",
        kind=Kind.COLLECTIVE,
        work=_collective("", ""),
        transpose=Op.KEEP_OUTPUT,
        given=frozenset({"gathered"}),
    ),
    _transfer(
        Op.KEEP_OUTPUT, "this rank's tokens, after unpermute", "", "all_gather", Op.GATHER_OUTPUT, "after"
    ),
    _transfer(
        Op.GATHER_OUTPUT, "tokens of all ranks, after unpermute", "all_gather", "", Op.KEEP_OUTPUT, "after"
    ),
)


def _tokens(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of tokens between ranks that share their samples: every sample is cut alike."""
    work, samples = step.sizes, _num_samples(step, task)
    sizes = tuple(samples * length for length in split_sizes(work.seq_len, work.tp_size))
    return _within(step, task, rank, sizes, round(work.hidden_bytes(1)))


def _moved_peaks(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of peaks: every shard of the vocabulary sends those of all tokens."""
    work = step.sizes
    return _within(step, task, rank, (_num_samples(step, task) * work.seq_len,) * work.tp_size, PEAK_BYTES)


def _moved_choices(step: RoutedStep, task: Task, rank: int) -> Move:
    work = step.sizes
    sizes = split_sizes(_num_samples(step, task), work.tp_size)
    return _within(step, task, rank, sizes, work.num_experts * COUNT_BYTES)


def _within(step: RoutedStep, task: Task, rank: int, sizes: tuple[int, ...], row_bytes: int) -> Move:
    place = step.sizes.mesh.place(rank, task.axes)
    return within(step.work(task).collective, task.axes, sizes, place, row_bytes)


def _num_samples(step: RoutedStep, task: Task) -> int:
    assert task.microbatch is not None, task
    return split_sizes(step.sizes.batch, task.cut.microbatches)[task.microbatch]


MOVES = (
    *(op for ways in (ATTENTION, DENSE, EMBED, HEAD) for op in ways.all),
    *(Op.KEEP_TOKENS, Op.GATHER_TOKENS, Op.KEEP_OUTPUT, Op.GATHER_OUTPUT),
)
"""Every op that moves tokens between ranks that share their samples."""

ROUTED = {
    **dict.fromkeys(MOVES, Routed(move=_tokens)),
    Op.PEAKS: Routed(move=_moved_peaks),
    Op.CHOICES: Routed(move=_moved_choices),
}
