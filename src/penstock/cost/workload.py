"""Computation and bytes of every task, from the sizes of the model and of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from penstock.cost.span import Span, span_of
from penstock.decision import GradientBytes
from penstock.features.dispatch import DISPATCHES
from penstock.features.field import PartialByForm
from penstock.mesh import Axes, Mesh, holders, node_of, num_nodes
from penstock.ops.core import KindName
from penstock.ops.work import FLOAT32_BYTES
from penstock.placement import ExpertPlacement
from penstock.routing.joined import distinct_parts
from penstock.routing.rows import BatchCut
from penstock.routing.sizes import capacity_slots, compressed_row_bytes, split_sizes
from penstock.step.shape import FORM_TOKENS, ExpertForm, StepShape


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes on a rank of a model that is not trained as a whole, or not in float32.

    Attributes:
        weights: The bytes of all parameters, frozen ones too.
        trained_experts: The bytes of those of its experts that are trained.
        cast: Whether weights are float32, and are copied into the type of products.
    """

    weights: int
    trained_experts: int
    cast: bool = False


@dataclass(frozen=True, kw_only=True)
class StateTypes:
    """Bytes of a parameter, of its gradient and of each of its moments, where others train so.

    Penstock's own are float32. Parameters of fewer bytes are updated as float32 copies, of which every rank
    that owns moments has its share.

    Attributes:
        fully_sharded: Whether parameters are gathered for each use, forward and backward (ZeRO 3).
    """

    parameter_bytes: int = FLOAT32_BYTES
    gradient_bytes: int = FLOAT32_BYTES
    moment_bytes: int = FLOAT32_BYTES
    fully_sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a step on one rank.

    Attributes:
        num_experts: The number of experts on all ranks together.
        capacity_factor: The room of every expert over its even share; None = dropless (even routing is
            assumed for cost).
        expert_matrices: The matrices of an expert: 2 for GELU, 3 for SwiGLU.
        element_bytes: The bytes of a number of the activations on the wire.
        slots_per_sample: The rows of each sample at each expert where that is fixed (SoftMoE); 0 = it is not.
        wire_row_bytes: The bytes of a row in transit, where it is not a plain hidden state; None = a plain
            one.
        coded: Whether encoding and decoding rows is not part of what tasks were measured to take.
        one_copy_per_rank: Whether one row serves all of a token's experts on a rank.
        expert_groups: How many groups of experts there are, and how many of them a token may use; None = it
            may use all.
        dispatch, node_size: How rows travel, and how many ranks of an expert group are in one node (0 = all).
        devices_per_node: The consecutive ranks of the cluster in a node; 0 = not known, unless node_size
            tells.
        shared_ffn_hidden_size: The width of the shared experts, 0 = there are none.
        tp_size, etp_size: The ranks that share attention, and every expert; `batch` is what the former have
            together.
        all_reduce_bytes, expert_all_reduce_bytes, partial_all_reduce_bytes: The gradients of every layer on
            one rank; the last are those of which ranks that share attention have each a part.
        partial_by_form: See GradientBytes.
        attention_size, key_value_size: The width of all heads of queries, and of those of keys and values; 0
            = hidden_size, and attention_size.
        attention: The attention, where it is not made of such heads alone.
        tied_embeddings: Whether embedding and head are one weight, which counts with the first layer.
        dense_ffn_hidden_size: The width of dense blocks.
        held: The weights that a rank has, for memory; None = all of them are trained, in float32.
        held_expert_bytes: See `expert_bytes`, in the type in which a rank has them; 0 = in float32.
        state: The types of parameters, gradients and moments.
    """

    batch: int
    seq_len: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    num_experts: int
    top_k: int
    expert_matrices: int
    capacity_factor: float | None
    min_capacity: int
    world_size: int
    ep_size: int
    element_bytes: int
    all_reduce_bytes: tuple[int, ...]
    expert_all_reduce_bytes: tuple[int, ...]
    attention_size: int = 0
    key_value_size: int = 0
    attention: Attention | None = None
    dense_ffn_hidden_size: int = 0
    slots_per_sample: int = 0
    wire_row_bytes: int | None = None
    coded: bool = False
    one_copy_per_rank: bool = False
    expert_groups: tuple[int, int] | None = None
    dispatch: str = "flat"
    node_size: int = 0
    devices_per_node: int = 0
    shared_ffn_hidden_size: int = 0
    tp_size: int = 1
    etp_size: int = 1
    partial_all_reduce_bytes: tuple[int, ...] = ()
    partial_by_form: PartialByForm = ()
    held: HeldBytes | None = None
    held_expert_bytes: int = 0
    tied_embeddings: bool = False
    state: StateTypes = StateTypes()  # frozen

    @property
    def samples(self) -> int:
        """The samples of one pass on all ranks together."""
        return self.batch * holders(self.world_size, self.tp_size)

    @property
    def gradient_bytes(self) -> GradientBytes:
        """Bytes of every layer's gradients, by kind."""
        partial = self.partial_all_reduce_bytes or (0,) * len(self.all_reduce_bytes)
        return GradientBytes(
            self.all_reduce_bytes,
            self.expert_all_reduce_bytes,
            partial,
            self.partial_by_form,
            int(self.expert_bytes),
        )

    def gradients_of(self, form: ExpertForm) -> Mapping[KindName, tuple[int, ...]]:
        """Return bytes of every layer's gradients with this expert form, by kind."""
        return self.gradient_bytes.of_form(form).by_kind

    @cached_property
    def heads(self) -> Attention:
        """The attention of a layer."""
        if self.attention is not None:
            return self.attention
        queries = self.attention_size or self.hidden_size
        return Attention.of_heads(self.hidden_size, queries, self.key_value_size or queries)

    @property
    def mesh(self) -> Mesh:
        """The ranks of the step, as its layers share them."""
        return Mesh(
            world_size=self.world_size,
            ep_size=self.ep_size,
            ep_local_size=self.node_size,
            tp_size=self.tp_size,
            etp_size=self.etp_size,
        )

    def part(self, groups: int) -> Workload:
        """Return the workload of the first ranks alone: of so many groups with the same samples."""
        ranks = groups * self.tp_size
        return self if ranks == self.world_size else replace(self, world_size=ranks)

    @property
    def placement(self) -> ExpertPlacement:
        """Placement of experts: even and contiguous."""
        return ExpertPlacement.even(self.num_experts, self.ep_size)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of an expert group in one node."""
        return self.node_size or self.ep_size

    @property
    def nodes(self) -> int:
        """Nodes that an expert group covers."""
        return num_nodes(self.ep_size, self.ranks_per_node)

    @property
    def joins_rows(self) -> bool:
        """Whether one row serves all of a token's experts in a node, or on a rank."""
        return self.one_copy_per_rank or DISPATCHES[self.dispatch].joins_rows

    @property
    def fixed_slots(self) -> bool:
        """Whether every expert has slots that travel whether they are used or not."""
        return (self.capacity_factor is not None and not self.joins_rows) or self.slots_per_sample > 0

    @property
    def known_per_node(self) -> int:
        """Ranks of the world in one node; 0 = not known."""
        return self.devices_per_node or (self.node_size * self.etp_size if self.nodes > 1 else 0)

    @property
    def world_nodes(self) -> int:
        """Nodes that all ranks cover; 1 where nodes are not known."""
        return node_of(self.world_size - 1, self.known_per_node or self.world_size) + 1

    def span(self, axes: Axes) -> Span:
        """Return the span of the groups along `axes`: where they are, and what they share."""
        return span_of(self.mesh, axes, self.known_per_node)

    def tokens(self, microbatch: int, microbatches: int, shares: int = 1) -> int:
        """Return tokens of one microbatch on one rank: that with most, if `shares` ranks cut every sample."""
        return split_sizes(self.batch, microbatches)[microbatch] * split_sizes(self.seq_len, shares)[0]

    def rows(
        self, microbatch: int, microbatches: int, chunk: int, chunks: int, shares: int = 1, dealt: int = 1
    ) -> float:
        """Return token copies that one rank sends to all experts in one chunk of one microbatch.

        Args:
            shares: The ranks that cut every sample; each counts slots for its own tokens.
            dealt: The ranks that route the same tokens and deal each other the rows of every expert.
        """
        tokens = self.tokens(microbatch, microbatches, shares)
        chosen = split_sizes(split_sizes(tokens, chunks)[chunk], dealt)[0] * self.top_k
        if self.capacity_factor is None and not self.slots_per_sample:
            return chosen
        if self.slots_per_sample:
            slots = split_sizes(self.batch, microbatches)[microbatch] * self.slots_per_sample
        else:
            slots = self.slots(tokens)
        kept = split_sizes(split_sizes(slots, chunks)[chunk], dealt)[0] * self.num_experts
        return kept if self.fixed_slots else min(chosen, kept)

    def slots(self, tokens: int) -> int:
        """Return slots of every expert for this number of a rank's tokens, with a capacity_factor."""
        assert self.capacity_factor is not None, "slots are limited"
        return capacity_slots(tokens, self.num_experts, self.top_k, self.capacity_factor, self.min_capacity)

    def cut(self, shape: StepShape) -> BatchCut:
        """Return how the batch of a step of this shape is cut into pieces of rows."""
        token_shards = shape.sharing.tp_size if FORM_TOKENS[shape.expert_form] == "split" else 1
        slots: tuple[int, ...] = ()
        samples = split_sizes(self.batch, shape.microbatches)
        if self.slots_per_sample:
            slots = tuple(count * self.slots_per_sample for count in samples)
        elif self.capacity_factor is not None:  # by the longest part of samples
            longest = split_sizes(self.seq_len, token_shards)[0]
            slots = tuple(self.slots(count * longest) for count in samples)
        return BatchCut(
            mesh=self.mesh,
            samples=self.batch,
            seq_len=self.seq_len,
            top_k=self.top_k,
            microbatches=shape.microbatches,
            slices=shape.slices,
            token_shards=token_shards,
            slots=slots,
            fixed=self.fixed_slots,
        )

    def attention_flops(self, tokens: int) -> float:
        """Return operations of projections, causal scores and values, and the router."""
        per_token = 2 * self.heads.weights + self.heads.score_flops(self.seq_len)
        return tokens * per_token + self.router_flops(tokens)

    def router_flops(self, tokens: int) -> float:
        """Return operations of the gate's matrix product."""
        return tokens * 2 * self.hidden_size * self.num_experts

    def expert_flops(self, rows: float) -> float:
        """Return operations of the forward matrix products of `rows` token copies."""
        return rows * 2 * self.expert_matrices * self.hidden_size * self.ffn_hidden_size

    @property
    def expert_bytes(self) -> float:
        """Bytes of the parameters of one expert, or of a rank's shard of it."""
        numbers = self.expert_matrices * self.hidden_size * self.ffn_hidden_size
        return self.held_expert_bytes or numbers * FLOAT32_BYTES / self.etp_size

    def dense_flops(self, tokens: int) -> float:
        """Return operations of the feed-forward part of a dense block: three matrices."""
        return tokens * 6 * self.hidden_size * self.dense_ffn_hidden_size

    def logit_bytes(self, tokens: int) -> float:
        """Return bytes of the logits over the whole vocabulary."""
        return tokens * self.vocab_size * self.element_bytes

    def head_flops(self, tokens: int) -> float:
        return tokens * 2 * self.hidden_size * self.vocab_size

    def shared_flops(self, tokens: int) -> float:
        """Return operations of the shared experts."""
        return tokens * 2 * self.expert_matrices * self.hidden_size * self.shared_ffn_hidden_size

    def wire_bytes(self, rows: float) -> float:
        """Return bytes of `rows` rows in transit."""
        return self.hidden_bytes(rows) if self.wire_row_bytes is None else rows * self.wire_row_bytes

    def compressed(self, form: str) -> Workload:
        """Return the workload with rows in transit in another form."""
        row_bytes = compressed_row_bytes(form, self.hidden_size)
        return replace(self, wire_row_bytes=row_bytes, coded=row_bytes != self.wire_row_bytes)

    def coding_bytes(self, rows: float) -> float:
        """Return bytes that encoding or decoding this number of rows reads and writes."""
        return self.hidden_bytes(rows) + self.wire_bytes(rows) if self.coded else 0.0

    def row_bytes(self, *, outward: bool) -> float:
        """Return bytes of a row on its way to experts (or of its gradient on the way back), or home.

        Where it is for several experts, their numbers and weights travel beside it.
        """
        beside = 2 * self.top_k * self.element_bytes if outward and self.joins_rows else 0
        return self.wire_bytes(1) + beside

    def leg_bytes(self, rows: float, *, outward: bool, between: bool) -> float:
        """Return bytes in one leg of a dispatch with even routing.

        Args:
            rows: The number of rows, one for each choice.
            outward: See `row_bytes`.
            between: Whether it is the leg between nodes.
        """
        return rows * self.joined_share(between=between) * self.row_bytes(outward=outward)

    def joined_share(self, *, between: bool) -> float:
        """Return the number of rows that travel in a leg for each choice."""
        if not self.joins_rows:
            return 1.0
        parts = self.nodes if between and not self.one_copy_per_rank else self.ep_size
        return self._distinct(parts, *(self.expert_groups or (1, 1))) / self.top_k

    def nearness(self, parts: int) -> float:
        """Return how many of `parts` parts of the experts a token meets, over the number without groups."""
        if self.expert_groups is None:
            return 1.0
        return self._distinct(parts, *self.expert_groups) / self._distinct(parts, 1, 1)

    def _distinct(self, parts: int, groups: int, limit: int) -> float:
        return distinct_parts(parts, self.num_experts, self.top_k, groups, limit)

    def hidden_bytes(self, rows: float) -> float:
        """Return bytes of `rows` hidden states."""
        return rows * self.hidden_size * self.element_bytes


# ---- the sizes of attention: what every token is multiplied by, and what its heads compare it with --------


Form = Literal["all", "window", "chunk", "state"]


@dataclass(frozen=True)
class Reach:
    """How far some of a model's layers look back.

    Attributes:
        share: The share of all layers that look back so far; those left have no heads.
        form: "all" tokens before; a "window" of the last `size`; those of the same "chunk" of `size`; or a
            "state" of so many columns, as linear attention has it, whose reading and writing takes as many
            operations as comparing with so many keys.
    """

    share: float
    form: Form = "all"
    size: int = 0

    def keys(self, seq_len: int) -> float:
        """Return the number of keys that a token meets on average, itself left out."""
        if self.form == "state":
            return self.size
        size = min(self.size, seq_len) if self.form != "all" else seq_len
        return size / 2 if self.form != "window" else size - size * size / (2 * seq_len)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a model's layers, as the mean over all of them.

    Attributes:
        matrices: The matrices that multiply every token outside of feed-forward parts: columns in, columns
            out, and the number of such matrices in a layer.
        queries, values: The widths of all heads together.
        width: The width of one head of values.
        kept: The numbers that the heads keep of every token until backward.
        moved: The numbers that they read and write in memory on the way from projections to scores.
    """

    matrices: tuple[tuple[int, int, float], ...]
    queries: float
    values: float
    kept: float
    moved: float
    width: float = 128
    reaches: tuple[Reach, ...] = (Reach(1.0),)

    @staticmethod
    def of_heads(hidden_size: int, queries: int, keys: int) -> Attention:
        """Return usual attention with heads of queries, and of keys and values, of these widths.

        Queries and keys are kept as projected, scaled and turned; values and the output once.

        Args:
            queries, keys: The widths of all heads of queries, and of those of keys and values.
        """
        outward = ((hidden_size, queries, 1.0), (hidden_size, keys, 2.0), (queries, hidden_size, 1.0))
        kept = 4 * (queries + keys)
        return Attention(matrices=outward, queries=queries, values=queries, kept=kept, moved=kept)

    @property
    def weights(self) -> float:
        """Numbers in the matrices of a layer."""
        return sum(rows * columns * number for rows, columns, number in self.matrices)

    def keys(self, seq_len: int) -> float:
        """Return the number of keys that a token meets in a layer, on average over tokens and layers."""
        return sum(each.share * each.keys(seq_len) for each in self.reaches)

    def score_flops(self, seq_len: int) -> float:
        """Return the operations of a token's scores and of its sum of values."""
        return 2 * (self.queries + self.values) * self.keys(seq_len)
