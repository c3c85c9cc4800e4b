"""Bytes that ranks sharing attention and experts really send, inside a node and across, against the formulas.

The formulas are Parm's, and FSMoE's beside them. Of a group of ranks that share attention: BLM elements of
tokens, and ETM of rows for experts (f k BLM). y = ETM N_ESP / N_MP, P' = N_EP N_ESP. Parts of a group are all
equal here, so what a rank receives it also sends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from penstock.decision import ScheduleConfig
from penstock.graph import Phase, Task
from penstock.mesh import node_of
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.ops import Op, core
from penstock.runtime import PipelinedStack
from penstock.runtime.executor import Programs
from penstock.runtime.handlers import HANDLERS, Handler, Inputs, Outputs
from penstock.step.shape import TokenLayout
from tests.support.parity import Case, batch_of, stack_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

NODE = 2
SAMPLES, LENGTH, HIDDEN = 2, 16, 8
EXPERTS, TOP_K, FACTOR = 8, 2, 2
BYTES = 4
ROWS = (*core.TRANSFERS, "XG", "XS", "SD", "SG", "BG", "BR", "BS")
EDGES = (Op.KEEP_TOKENS, Op.GATHER_TOKENS, Op.KEEP_OUTPUT, Op.GATHER_OUTPUT)

Elements = tuple[Fraction, Fraction]
"""Inside a node, and to others."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the formulas name. etp and tp groups lie in a node, which they fill."""

    n_ep: int
    n_esp: int
    n_mp: int

    BLM = Fraction(SAMPLES * LENGTH * HIDDEN)
    ETM = FACTOR * TOP_K * BLM

    @property
    def both(self) -> Elements:
        """One all-to-all of y elements over all shards of all experts: y (N_ESP-1)/P', y (N_EP-1)/N_EP."""
        y = self.ETM * self.n_esp / self.n_mp
        return y * (self.n_esp - 1) / (self.n_ep * self.n_esp), self.across(y)[1]

    def across(self, n: Fraction) -> Elements:
        """An all-to-all of n elements between nodes."""
        return Fraction(0), n * (self.n_ep - 1) / self.n_ep

    def tokens(self, n: Fraction) -> Elements:
        """An all-gather of n elements by ranks that share attention."""
        return n * (self.n_mp - 1) / self.n_mp, Fraction(0)

    def shards(self, n: Fraction) -> Elements:
        """An all-gather of n elements by shards of an expert, or a reduce-scatter."""
        return n * (self.n_esp - 1) / self.n_esp, Fraction(0)


def forward(name: str, sizes: Sizes) -> dict[str, Elements]:
    """By op, with all tokens on every rank between blocks."""
    etm, blm, etp, tp = sizes.ETM, sizes.BLM, sizes.n_esp, sizes.n_mp
    gathered, summed = sizes.shards(etm * etp), sizes.shards(2 * etm * etp)
    shared, repeated = sizes.shards(etm * etp / tp), sizes.across(etm * etp)
    fused = {"D": sizes.both, "C": sizes.both}
    return {
        "baseline_esp": {"BG": gathered, "D": repeated, "BR": summed, "C": repeated},
        "parm_s1": {**fused, "UG": sizes.tokens(blm)},
        "parm_s2": {**fused, "SG": sizes.tokens(etm)},
        "fsmoe": {
            "D": sizes.across(etm / tp), "XG": shared, "XS": shared, "C": sizes.across(etm / tp),
            "UG": sizes.tokens(blm),
        },
    }[name]  # fmt: skip


def backward(name: str, sizes: Sizes) -> dict[str, Elements]:
    """The same of gradients: BR has those of all that it went to, and BS those of the others to gather."""
    there = forward(name, sizes)
    back = {"SG": "SD", "UG": "MS", "BR": "BS"}
    return {back.get(op, op): there["BG"] if op == "BR" else size for op, size in there.items()}


def split(name: str, expected: dict[str, Elements], sizes: Sizes, phase: Phase) -> dict[str, Elements]:
    """With every token on one rank between blocks: gate and experts of S1 and FSMoE have them as they are;
    the gate of the others has what attention has gathered, and gradients after unpermute are gathered."""
    kept = {op: size for op, size in expected.items() if op not in EDGES}
    gathers = name in ("baseline_esp", "parm_s2") and phase is Phase.BACKWARD
    return {**kept, "US": sizes.tokens(sizes.BLM)} if gathers else kept


# ---- what is really sent -----------------------------------------------------------------------------------


def case_of(name: str, sizes: Sizes, tokens: TokenLayout) -> Case:
    return Case(
        world_size=sizes.n_ep * sizes.n_esp,
        ep_size=sizes.n_ep,
        tp_size=sizes.n_mp,
        etp_size=sizes.n_esp,
        node_size=NODE,
        tokens=tokens,
        schedule=ScheduleConfig(name=name, all_reduce_chunk_bytes=4096),
        model=ModelConfig(num_layers=1, hidden_size=HIDDEN, num_heads=2, seq_len=LENGTH, vocab_size=16),
        moe=MoEConfig(
            num_experts=EXPERTS,
            top_k=TOP_K,
            moe_ffn_hidden_size=8,
            capacity_factor=FACTOR,
            min_capacity=1,
        ),
        batch=SAMPLES,
    )


Sent = dict[tuple[str, Phase], Counter[int]]
"""Bytes by receiving rank, of all tasks of an op and phase."""


def counted(handler: Handler, sent: Sent) -> Handler:
    """A handler that adds up what its tasks send. A lane has transports of its own, so nothing else is."""

    def run(context: Any, task: Task, inputs: Inputs) -> Outputs:
        if not task.axes:
            return handler(context, task, inputs)
        transport = context.transports.of(task.lane, task.axes)
        before = transport.traffic.copy()
        left = handler(context, task, inputs)
        sent.setdefault((task.op, task.phase), Counter()).update(transport.traffic - before)
        return left

    return run


def watch(stack: PipelinedStack) -> Sent:
    """Count what the stack's tasks send from now on."""
    sent: Sent = {}
    handlers = {key: counted(handler, sent) for key, handler in HANDLERS.items()}
    stack._programs = Programs(handlers, stack.machinery.layout.mesh.silent)
    return sent


def really_sent(rank: int, case: Case) -> tuple[Sent, Counter[int]]:
    """Of one step: bytes by op, and all of them as the transports count."""
    stack = stack_of(rank, case)
    sent = watch(stack)
    tokens, labels = batch_of(case)
    transports = stack.machinery.transports
    before = transports.traffic.copy()
    stack(tokens[case.mine(rank)], labels[case.mine(rank)]).backward()
    return sent, Counter(transports.traffic - before)


def by_link(rank: int, sent: Counter[int]) -> Elements:
    """Elements to ranks of the same node, and to others."""
    inside = sum(size for peer, size in sent.items() if node_of(peer, NODE) == node_of(rank, NODE))
    return Fraction(inside, BYTES), Fraction(sent.total() - inside, BYTES)


def check(pools: Pools, name: str, tokens: TokenLayout, phase: Phase, sizes: Sizes) -> None:
    case = case_of(name, sizes, tokens)
    expected = (forward if phase is Phase.FORWARD else backward)(name, sizes)
    if tokens == "split":
        expected = split(name, expected, sizes, phase)
    expected = {op: size for op, size in expected.items() if any(size)}
    for rank, (sent, total) in enumerate(pools(case.world_size).run(really_sent, case)):
        found = {op: by_link(rank, sizes) for (op, when), sizes in sent.items() if when is phase}
        found = {op: size for op, size in found.items() if op in (*ROWS, *EDGES) and any(size)}
        assert found == expected, f"{name}, rank {rank}: {found}"
        assert sum(sent.values(), Counter()) == total, "something is sent outside of tasks"


LAYOUTS = [
    pytest.param(Sizes(2, 2, 2), id="2-2-2"),
    pytest.param(Sizes(2, 2, 1), id="2-2-1"),
    pytest.param(Sizes(4, 2, 2), id="4-2-2", marks=pytest.mark.soak),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("tokens", ["replicated", "split"])
@pytest.mark.parametrize("name", ["baseline_esp", "parm_s1", "parm_s2", "fsmoe"])
def test_bytes_are_those_of_the_formulas(
    ranks: Pools, name: str, tokens: TokenLayout, phase: Phase, sizes: Sizes
) -> None:
    check(ranks, name, tokens, phase, sizes)
