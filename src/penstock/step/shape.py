"""The shape of one iteration: how many layers, microbatches and chunks. Everything a graph needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

from penstock.graph.task import ScheduleError
from penstock.ops.base import Op
from penstock.ops.core import COMBINE_OF, FLAT, GRADIENT_KINDS, ByKind, Hop, KindName
from penstock.step.rewrite import Pass, check_passes

TokenLayout = Literal["split", "replicated"]
Recompute = Literal["none", "experts", "blocks"]
"""What is recomputed before its backward, and keeps only its inputs until then: nothing, routed experts, or
all computation of a block up to the sum of its experts' outputs."""

ExpertForm = Literal["gather", "s1", "s2", "baseline"]
"""How rows meet all shards of their experts: as in FSMoE, in Parm's S1 and S2, and in DeepSpeed-MoE."""

FORM_TOKENS: dict[ExpertForm, TokenLayout] = {
    "gather": "split",
    "s1": "split",
    "s2": "replicated",
    "baseline": "replicated",
}
"""By form, what ranks that share attention have of every sample's tokens at the gate."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which ranks share what.

    Attributes:
        tp_size: The ranks that share attention.
        etp_size: The ranks that share every expert.
        tokens: What ranks that share attention have of every sample's tokens between two blocks.
        judges_samples: Whether balance is judged by sample or microbatch, of which those ranks may each have
            a part.
    """

    tp_size: int = 1
    etp_size: int = 1
    tokens: TokenLayout = "split"
    judges_samples: bool = False

    @property
    def is_none(self) -> bool:
        """Whether every rank has attention and experts of its own."""
        return self.tp_size == self.etp_size == 1

    @property
    def why_samples_stay(self) -> str:
        """Why samples cannot move; "" = they may, between devices that begin with the same shard."""
        if self.tp_size % self.etp_size and self.etp_size % self.tp_size:
            return (
                f"of parallel.tp_size={self.tp_size} and parallel.etp_size={self.etp_size} neither divides "
                "the other, so ranks with the same samples differ in their shards of experts"
            )
        return ""

    @property
    def forms(self) -> tuple[ExpertForm, ...]:
        """The forms of experts' shards that differ from each other, "gather" first.

        Without shards, s1 sends what gather does; with the tokens of one rank there is nothing to deal.
        """
        if self.is_none:
            return ("gather",)
        s1: tuple[ExpertForm, ...] = ("s1",) if self.etp_size > 1 else ()
        s2: tuple[ExpertForm, ...] = ("s2",) if self.tp_size > 1 else ()
        return "gather", *s1, *s2, "baseline"


@dataclass(frozen=True, kw_only=True)
class Updating:
    """How a step updates parameters, of which every rank owns a share.

    Attributes:
        clips: Whether gradients are clipped by their norm, for which every update waits.
        edp: Whether several ranks own each expert; else each rank owns all of its experts.
        releases: Whether whole gradients are freed as soon as their share of the sum is there (ZeRO's stage
            2).
    """

    clips: bool = True
    edp: bool = False
    releases: bool = False

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO that this is."""
        return 2 if self.releases else 1


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The facts that decide which tasks exist.

    Attributes:
        moe_layers: For every layer, whether its feed-forward part is an MoE layer.
        microbatches: The pieces of the batch, split along samples, that go through whole blocks (FlowMoE's
            R).
        chunks: The pieces of the tokens inside one MoE layer (the pipeline degree of Tutel, PipeMoE, FSMoE).
        degree_backward: The chunks in the backward half; 0 = as many as forward. Read `backward_chunks`
            instead.
        exchange_counts: Whether sizes of pieces are exchanged first, since dropless routing sends uneven
            ones.
        pieces: The number of pieces into which every layer's gradients are cut, by kind; a kind that is not
            named has its usual number. Where no ranks share attention there are no partial gradients,
            whatever this says.
        all_reduce_parts: The relative sizes of the pieces of replicated gradients, by layer; empty = nearly
            equal ones.
        dispatch: The legs of a dispatch in their order; combine takes them in reverse.
        shared_experts: Whether every MoE layer has shared experts, whose task waits for no transfer.
        more: The passes in addition to those that the other fields ask for.
        split_experts: Whether experts' weight gradients are tasks of their own (W), which only their update
            needs.
        sharing: The ranks that share attention or experts.
        expert_form: How rows meet all shards of their experts.
        pair_slices: The slices of combine and of the gather after it, which overlap (Parm's SAA, form s2).
        moves_samples: Whether combine takes whole samples to new homes (NetMoE).
        carries_residual: Whether rows can bring the residual stream of those samples home; it matters only
            where samples move.
        replica_slots: The experts of other ranks for which every rank has room in every MoE layer
            (Pro-Prophet); 0 = experts stay.
        replica_pieces: The pieces in which their parameters and gradients travel.
        gathers_loads: Whether ranks exchange, once per step, how many of their rows went to each expert.
        recompute: What is recomputed before its backward.
        updating: How the step updates parameters; None = it does not, and leaves the sums of all gradients on
            every rank.
    """

    moe_layers: tuple[bool, ...]
    microbatches: int = 1
    chunks: int = 1
    degree_backward: int = 0
    exchange_counts: bool = True
    pieces: Mapping[KindName, tuple[int, ...]] = ByKind({})
    all_reduce_parts: tuple[tuple[int, ...], ...] = ()
    dispatch: tuple[Hop, ...] = FLAT
    shared_experts: bool = False
    split_experts: bool = False
    sharing: Sharing = Sharing()
    expert_form: ExpertForm = "gather"
    pair_slices: int = 1
    moves_samples: bool = False
    carries_residual: bool = False
    replica_slots: int = 0
    replica_pieces: int = 1
    gathers_loads: bool = False
    recompute: Recompute = "none"
    updating: Updating | None = None
    more: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        check_passes(self.more)
        pieces = {
            name: self.pieces.get(name) or (kind.usual_pieces,) * self.num_layers
            for name, kind in GRADIENT_KINDS.items()
        }
        if self.all_reduce_parts:
            pieces["replicated"] = tuple(map(len, self.all_reduce_parts))
        for name, numbers in pieces.items():
            if len(numbers) != self.num_layers:
                raise ScheduleError(f"pieces of {name} gradients: one number per layer ({self.num_layers})")
        object.__setattr__(self, "pieces", ByKind(pieces))
        if self.replica_slots < 0 or self.replica_pieces < 1:
            raise ScheduleError("replica slots are 0 or more, and a replica travels in one piece or more")
        if not self.moe_layers or min(self.microbatches, self.chunks, self.backward_chunks) < 1:
            raise ScheduleError("a step needs at least one layer, one microbatch and one chunk")
        ops = [hop.op for hop in self.dispatch]
        if self.expert_form not in FORM_TOKENS:
            raise ScheduleError(f"expert_form = {self.expert_form!r}: use {', '.join(FORM_TOKENS)}")
        whole = self.chunks == self.backward_chunks == 1
        paired = self.expert_form == "s2" and self.sharing.tp_size > 1 and whole
        if self.pair_slices > 1 and not paired:
            raise ScheduleError(
                "a simultaneous pair needs expert_form=s2, ranks that share attention, and no chunks"
            )
        if not set(ops) <= set(COMBINE_OF) or ops.count(Op.DISPATCH) != 1 or len(set(ops)) < len(ops):
            raise ScheduleError(
                f"the legs of a dispatch are {', '.join(COMBINE_OF)}, one of them D; got {ops}"
            )

    @property
    def moves(self) -> bool:
        """Whether samples or experts move."""
        return self.moves_samples or self.replica_slots > 0

    @property
    def packed_residual(self) -> bool:
        """Whether rows bring the residual stream of samples that move."""
        return self.moves_samples and self.carries_residual

    @property
    def backward_chunks(self) -> int:
        """Chunks of an MoE layer in the backward half."""
        return self.degree_backward or self.chunks

    @property
    def slices(self) -> int:
        """Pieces that every chunk, forward or backward, is made of; saved values are addressed by slice."""
        return self.pair_slices * lcm(self.chunks, self.backward_chunks)

    def tokens_of(self, layer: int) -> TokenLayout:
        """Return what ranks that share attention have of a sample's tokens after attention in a layer."""
        return FORM_TOKENS[self.expert_form] if self.moe_layers[layer] else self.sharing.tokens

    @cached_property
    def copies_differ(self) -> bool:
        """Whether ranks with the same tokens compute them in different places, and so differ by rounding.

        In the baseline form every copy of a row is computed separately. Gradients of what those ranks have
        whole must then be averaged over them, or their parameters would drift apart.
        """
        return self.sharing.tp_size > 1 and self.expert_form == "baseline" and any(self.moe_layers)

    @property
    def degrees(self) -> tuple[int, int]:
        """Chunks of an MoE layer, forward and backward."""
        return self.chunks, self.backward_chunks

    @cached_property
    def transfer_degrees(self) -> tuple[int, ...]:
        """The numbers of chunks in which rows travel: forward, backward, and slices of a pair."""
        return tuple(sorted({self.chunks, self.backward_chunks, self.pair_slices}))

    def parts_of(self, layer: int, kind: KindName = "replicated") -> tuple[int, ...]:
        """Return the relative sizes of the pieces of a layer's gradients: one tuple for all calls."""
        return self._parts[kind][layer]

    @cached_property
    def _parts(self) -> dict[KindName, tuple[tuple[int, ...], ...]]:
        """Sizes of pieces by kind and layer, made once: every piece asks, and a layer may have thousands."""
        equal = {n: (1,) * n for numbers in self.pieces.values() for n in numbers}
        parts = {name: tuple(equal[n] for n in numbers) for name, numbers in self.pieces.items()}
        return parts | ({"replicated": self.all_reduce_parts} if self.all_reduce_parts else {})

    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def last(self) -> int:
        return self.num_layers - 1
