"""Section `[moe]`: what an MoE layer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.config import ConfigError, Within, check_bounds, check_name
from penstock.features.dispatch import DISPATCHES
from penstock.ops.work import EXPERT_MATRICES
from penstock.routing.sizes import compressed_row_bytes

ChoiceKind = Literal["token", "expert", "soft"]
PermutationName = Literal["sort", "index", "einsum"]

MIXES = "a slot of SoftMoE mixes all tokens of a sample, so"
REFUSED: dict[tuple[str, str], str] = {
    ("expert", "sort"): "where experts choose, every slot is filled, with none to sort; use index or einsum",
    ("soft", "sort"): f"{MIXES} no token has a row of its own; use einsum",
    ("soft", "index"): f"{MIXES} it has no index; use einsum",
}


def refusal(kind: ChoiceKind, permutation: PermutationName, *, dropless: bool) -> str | None:
    """Return why a permutation cannot serve a kind of gate; None if it can.

    Args:
        dropless: Whether there is no capacity.
    """
    if (kind, permutation) in REFUSED:
        return REFUSED[kind, permutation]
    if kind == "soft":
        return None
    if permutation == "sort" and not dropless:
        return "sort gives every choice a row, so a capacity_factor would have no effect; use index"
    if permutation != "sort" and dropless:
        return f"{permutation} has a fixed number of slots per expert; set a capacity_factor"
    return None


ExpertKind = Literal["gelu", "swiglu"]
BalanceGroup = Literal["microbatch", "sequence", "global"]
RouterName = Literal["softmax", "noisy", "sigmoid", "cosine", "expert_choice", "soft"]
PermutationSetting = Literal["auto", "sort", "index", "einsum"]
Compression = Literal["bfloat16", "int8"]

Experts = Annotated[int, Within(1, 1 << 16, "the router compares every token with all of them")]
Width = Annotated[int, Within(1, 1 << 20, "the widest published experts have some 30,000")]
Slots = Annotated[int, Within(1, 1 << 16, "rows of all slots are in memory at once")]
Coefficient = Annotated[
    float, Within(0, 1e6, "with more, the router would learn nothing else", hint="Use 0 for none.")
]
Scale = Annotated[float, Within(0, 1e6, "larger outputs overflow float32", above=True)]
BoundFactor = Annotated[
    float,
    Within(
        1,
        1000,
        "it multiplies the most rows of earlier steps; below 1 most steps would run twice",
    ),
]
Capacity = Annotated[
    float,
    Within(
        0,
        1000,
        "at 0 no expert would take any token, at 1000 none drops one",
        above=True,
        hint="For dropless routing use none.",
    ),
]
KINDS: dict[RouterName, ChoiceKind] = {"expert_choice": "expert", "soft": "soft"}


TOKENS_ONLY = (("norm_topk_prob", None), ("num_groups", None), ("expert_bias_rate", 0.0))
"""Settings about how tokens choose, each with the value that means "not set"."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The MoE layer."""

    num_experts: Experts = 8
    """Experts in total, over all ranks."""
    top_k: Experts = 2
    """Experts per token; where experts choose, on average."""
    moe_ffn_hidden_size: Width = 256
    """Hidden width of an expert."""
    expert: ExpertKind = "swiglu"
    """Kind of the experts."""
    shared_ffn_hidden_size: Annotated[int, Within(0, 1 << 20, "as experts' width; 0 = none")] = 0
    """Total hidden width of the shared experts, which process every token; 0 = no shared experts."""
    gate: RouterName = "softmax"
    """Router: "softmax", "noisy" (softmax with learnt noise in training), "sigmoid" (DeepSeek-V3, BASE),
    "cosine" (X-MoE), "expert_choice" or "soft"; with the last two a causal model sees the future
    ([more](moe-layer.md))."""
    gate_proj_size: Width = 256
    """Width of the cosine gate's projection."""
    norm_topk_prob: bool | None = None
    """Scale the chosen weights to sum to one; none = if top_k > 1. Refused with one choice, whose weight
    would always be one: the router would get no gradient."""
    routed_scaling_factor: Scale = 1.0
    """Multiplies the weights of the chosen experts."""
    num_groups: Experts | None = None
    """Groups of experts; a token's come from its best `group_top_k` of them (DeepSeek); none = no groups."""
    group_top_k: Experts | None = None
    """How many groups of experts a token's experts come from."""
    expert_bias_rate: Coefficient = 0.0
    """Loss-free balancing (DeepSeek-V3): how far the experts' bias moves after each optimiser step; 0 = off.
    """
    capacity_factor: Capacity | None = None
    """Limits every expert to that multiple of the even share, per rank and microbatch; first choices go
    first, then earlier tokens; none = dropless."""
    min_capacity: Slots = 4
    """The least number of slots with a `capacity_factor`."""
    bound_factor: BoundFactor | None = None
    """Dropless routing without an exchange of counts: how many rows each expert is sent, over the most of the
    last 32 steps ([more](gpu.md#rows-that-are-known-before-the-gates-choose)); none = rows are counted."""
    slots_per_expert: Slots = 4
    """Slots per sample and expert with `gate = "soft"`."""
    permutation: PermutationSetting = "auto"
    """How rows are ordered: "sort" (dropless), "index" or "einsum" (both need a `capacity_factor`); "auto" =
    the fastest that supports the gate and capacity."""
    dispatch: str = "auto"
    """How rows reach their experts: "flat", "hierarchical_1d", "hierarchical_2d" or "node_once" (a token
    crosses once to a node); "auto" = where experts span nodes, the fastest by the measured links
    ([more](moe-layer.md#parts))."""
    one_copy_per_rank: bool = False
    """A token with several experts on one rank is sent to that rank once, and its outputs are summed there.
    """
    comm_dtype: Compression | None = None
    """Of rows in transit, in forward and backward: "bfloat16" or "int8" (one scale per row); none = as they
    are."""
    aux_loss_coeff: Coefficient = 0.01
    """Coefficient of the balance loss."""
    z_loss_coeff: Coefficient = 0.001
    """Coefficient of the router z-loss."""
    aux_loss_group: BalanceGroup = "global"
    """The tokens over which the balance loss is computed: the whole batch ("global"), each "sequence"
    (splitting changes neither), or each rank's "microbatch"."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("dispatch", self.dispatch, ("auto", *DISPATCHES))
        if self.top_k > self.num_experts:
            why = f"a token can choose between 1 and num_experts ({self.num_experts}) experts"
            raise ConfigError("top_k", self.top_k, why, f"Nearest valid: {self.num_experts}.")
        if self.kind == "expert" and self.capacity_factor is None:
            why = "this gate fills a fixed number of slots per expert, and capacity_factor says how many"
            raise ConfigError("gate", self.gate, why, "Set capacity_factor; 1.0 is usual.")
        if self.kind == "soft" and self.routed_scaling_factor != 1.0:
            why = "with gate = soft weights of slots sum to one, and nothing scales them"
            raise ConfigError("routed_scaling_factor", self.routed_scaling_factor, why, "Use 1.0.")
        if self.kind == "soft" and self.capacity_factor is not None:
            why = "with gate = soft nothing is dropped, and slots_per_expert says how many slots there are"
            raise ConfigError("capacity_factor", self.capacity_factor, why, "Use none.")
        # Bounds are for rows whose numbers are not fixed anyway, and each of which serves one expert.
        for key, is_set in (
            ("capacity_factor", self.capacity_factor is not None),
            ("gate", self.kind != "token"),
            ("one_copy_per_rank", self.one_copy_per_rank),
            ("dispatch", self.joins_rows),
        ):
            if self.bound_factor is not None and is_set:
                why = (
                    f"bounds the rows of each expert in dropless routing, which {key} = {getattr(self, key)} "
                )
                why += "is not" if key in ("capacity_factor", "gate") else "sends to several experts at once"
                raise ConfigError("bound_factor", self.bound_factor, why, f"Use none, or another {key}.")
        self._check_router()
        refused_by_gate = refusal(self.kind, self.permutation_name, dropless=self.capacity_factor is None)
        if refused_by_gate is not None:
            why = f"with gate = {self.gate}: {refused_by_gate}"
            raise ConfigError("permutation", self.permutation, why, "Or use permutation = auto.")
        # A row cannot always serve all of its token's experts in a node.
        for key, which, other, refused in self._unjoinable if self.joins_rows else ():
            if refused:
                why = f"sends one row for several experts, and {key} = {getattr(self, key)} is set, {which}"
                raise ConfigError("dispatch", self.dispatch, why, f"Use flat, or {other}.")
        if self.one_copy_per_rank and self.permutation_name != "sort":
            why = "slots belong to experts, so a row cannot serve two of them"
            raise ConfigError(
                "one_copy_per_rank", True, why, "Use it with the sort permutation (no capacity_factor)."
            )
        if self.one_copy_per_rank and self.comm_dtype is not None:
            why = "numbers that travel with a shared row would be rounded with it"
            raise ConfigError("comm_dtype", self.comm_dtype, why, "Use none, or one_copy_per_rank = false.")

    @property
    def kind(self) -> ChoiceKind:
        """Who chooses: tokens, experts, or nobody."""
        return KINDS.get(self.gate, "token")

    @property
    def warning(self) -> str | None:
        """What to know before training a causal model with this layer; None if there is nothing."""
        if self.kind == "token":
            return None
        return f"gate {self.gate} looks at later tokens, too: the loss of a causal model will look too good"

    @property
    def renormalise(self) -> bool:
        return self.top_k > 1 if self.norm_topk_prob is None else self.norm_topk_prob

    @property
    def permutation_name(self) -> PermutationName:
        """Name of the permutation, with `auto` resolved: the fastest that a gate of this kind can have."""
        if self.permutation != "auto":
            return self.permutation
        if self.kind == "soft":
            return "einsum"
        return "sort" if self.capacity_factor is None and self.kind == "token" else "index"

    @property
    def expert_groups(self) -> tuple[int, int] | None:
        """Number of groups of experts, and how many of these groups a token may use; None without groups."""
        if self.num_groups is None or self.group_top_k is None:
            return None
        return self.num_groups, self.group_top_k

    @property
    def joins_rows(self) -> bool:
        """Whether the dispatch sends one row for all of a token's experts in a node."""
        return self.dispatch != "auto" and DISPATCHES[self.dispatch].joins_rows

    @property
    def can_join(self) -> bool:
        """Whether another dispatch may send one row for all of a token's experts in a node."""
        return self.bound_factor is None and not any(refused for *_, refused in self._unjoinable)

    @property
    def exchanges_counts(self) -> bool:
        """Whether the number of rows depends on the routing, so that ranks have to exchange counts."""
        return self.permutation_name == "sort" or self.joins_rows

    @property
    def slots_factor(self) -> float | None:
        """The rows that an expert is sent, used or not, over those of even loads; None = only used ones."""
        return self.capacity_factor if self.bound_factor is None else self.bound_factor

    @property
    def slots_per_sample(self) -> int:
        """Rows that each sample has at each expert, where their number is fixed (gate=soft); else 0."""
        return self.slots_per_expert if self.kind == "soft" else 0

    @property
    def expert_matrices(self) -> int:
        """Matrix products of one expert: 2 for GELU, 3 for SwiGLU."""
        return EXPERT_MATRICES[self.expert]

    def row_bytes(self, hidden_size: int, element_bytes: int) -> int:
        """Return the bytes of one row in transit, without the numbers that may travel beside it."""
        if self.comm_dtype is None:
            return hidden_size * element_bytes
        return compressed_row_bytes(self.comm_dtype, hidden_size)

    def _check_router(self) -> None:
        if self.norm_topk_prob and self.top_k == 1:
            why = "with top_k = 1 every weight would be 1 and the router would learn nothing from the loss"
            raise ConfigError("norm_topk_prob", True, why, "Use false, or top_k of 2 or more.")
        if (self.num_groups is None) != (self.group_top_k is None):
            missing = "num_groups" if self.num_groups is None else "group_top_k"
            why = "num_groups and group_top_k belong together"
            raise ConfigError(missing, None, why, "Set both, or neither.")
        if self.num_groups is not None and self.group_top_k is not None:
            groups, top = self.num_groups, self.group_top_k
            if self.num_experts % groups:
                valid = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
                nearest = min(valid, key=lambda n: abs(n - groups))
                why = f"must divide num_experts ({self.num_experts})"
                raise ConfigError("num_groups", groups, why, f"Nearest valid: {nearest}.")
            least = -(-self.top_k * groups // self.num_experts)
            if not least <= top <= groups:
                nearest = min(max(top, least), groups)
                why = f"top_k = {self.top_k} experts need {least} groups at least, and there are {groups}"
                raise ConfigError("group_top_k", top, why, f"Nearest valid: {nearest}.")
        if self.kind != "token":
            for key, unset in TOKENS_ONLY:
                if getattr(self, key) != unset:
                    why = f"is about how tokens choose, and with gate = {self.gate} they do not"
                    raise ConfigError(key, getattr(self, key), why, "Leave it out, or use another gate.")

    @property
    def _unjoinable(self) -> tuple[tuple[str, str, str, bool], ...]:
        """Settings with which rows cannot be joined: name, reason, alternative, and whether it is set so."""
        return (
            ("gate", "whose tokens do not choose experts", "another gate", self.kind != "token"),
            (
                "permutation",
                "whose masks have a slot for every choice",
                "permutation = auto",
                self.permutation == "einsum",
            ),
            ("one_copy_per_rank", "which is the same by rank", "false for it", self.one_copy_per_rank),
            (
                "comm_dtype",
                "which rounds what is beside it",
                "none for it",
                self.comm_dtype is not None,
            ),
        )
