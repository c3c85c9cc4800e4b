"""The layers of the Parm study, as problems: one MoE layer by itself, forward and backward.

What the paper leaves open is decided here. Of devices, ranks that share attention (tp) and ranks that share
every expert (etp), each of 1, 2 and 4, all but tp = etp = 1 count, where there is nothing to choose: with
equal model and hidden sizes these are the study's 1,296 layers. Top-2, one expert for every group of shards,
tokens replicated between blocks, float32. As in the study, gradients are not reduced, and attention is left
out; routing costs what it takes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.published.layers import simulated_s
from penstock.cost import ProfiledCluster, Workload
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.mesh import holders, num_nodes, ranks_per_node
from penstock.ops import OPS, Op
from penstock.plan import Problem
from penstock.plan.published import fsmoe_choice, parm_choice
from penstock.plan.published.parm import SLICES
from penstock.step import Sharing, StepShape
from penstock.timing import Cost

GRID = Path(__file__).with_name("parm_layer_grid.csv")
FLOAT_BYTES, TOP_K = 4, 2
BASELINE, S1, S2, PARM = "baseline_esp", "parm_s1", "parm_s2", "parm"
FSMOE, WHOLE = "fsmoe", "fsmoe, whole"
UNCOUNTED = frozenset(
    {
        *(op for op, spec in OPS.items() if spec.normalises or spec.place in ("input", "output")),
        Op.ATTENTION,
        Op.HEADS,
        Op.TOKEN_COPY,
        Op.TOKEN_REDUCE,
    }
)
"""What the study's layers do not have."""


@dataclass(frozen=True, kw_only=True)
class ParmSpec:
    """One layer.

    Attributes:
        batch: Samples of ranks that share attention.
        tp_size, etp_size: As in `Sharing`.
    """

    devices: int
    tp_size: int
    etp_size: int
    batch: int
    seq_len: int
    hidden_size: int
    capacity_factor: float


class ParmProblem(Problem):
    """An MoE layer alone."""

    def cost(self, choice: Decision, cut: StepShape) -> Cost:
        cost = super().cost(choice, cut)
        return lambda task: 0.0 if task.op in UNCOUNTED else cost(task)


def parm_layers(cluster: str) -> Iterator[ParmSpec]:
    """Yield the layers whose devices a cluster has."""
    names = ("devices", "mp_and_esp", "mp_and_esp", "batch_per_device", "seq_len", "dim_and_hidden")
    values, ranks = _grid(), find_cluster(cluster).ranks
    sizes = product(*([int(each) for each in values[name]] for name in names))
    factors = [float(each) for each in values["capacity_factor"]]
    for (devices, tp_size, etp_size, batch, seq_len, hidden_size), capacity_factor in product(sizes, factors):
        if devices <= ranks and max(tp_size, etp_size) > 1:
            yield ParmSpec(
                devices=devices,
                tp_size=tp_size,
                etp_size=etp_size,
                batch=batch,
                seq_len=seq_len,
                hidden_size=hidden_size,
                capacity_factor=capacity_factor,
            )


def parm_problem(spec: ParmSpec, cluster: str) -> ParmProblem:
    """Return the layer on as many of the cluster's nodes as it needs."""
    file = find_cluster(cluster)
    per_node = ranks_per_node(spec.devices, file.ranks_per_node)
    file = replace(file, nodes=num_nodes(spec.devices, per_node), ranks_per_node=per_node)
    groups = holders(spec.devices, spec.etp_size)
    workload = Workload(
        batch=spec.batch,
        seq_len=spec.seq_len,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.hidden_size,
        vocab_size=0,
        num_experts=groups,
        top_k=TOP_K,
        expert_matrices=2,
        capacity_factor=spec.capacity_factor,
        min_capacity=1,
        world_size=spec.devices,
        ep_size=groups,
        element_bytes=FLOAT_BYTES,
        all_reduce_bytes=(0,),
        expert_all_reduce_bytes=(0,),
        node_size=holders(per_node, spec.etp_size),
        devices_per_node=per_node,
        tp_size=spec.tp_size,
        etp_size=spec.etp_size,
    )
    sharing = Sharing(tp_size=spec.tp_size, etp_size=spec.etp_size, tokens="replicated")
    return ParmProblem(
        shape=StepShape(moe_layers=(True,), exchange_counts=False, sharing=sharing),
        workload=workload,
        cluster=ProfiledCluster.build(file),
    )


def parm_seconds(problem: ParmProblem) -> dict[str, float]:
    """Return simulated seconds of every system.

    S2 with the best number of slices. parm: what Algorithm 1 takes. FSMoE once whole, that is in one piece
    and without overlap as the others are.
    """
    pairs = [Decision(schedule="parm_s2", chunks=count, backward_chunks=count) for count in SLICES]
    return {
        BASELINE: simulated_s(problem, Decision(schedule=BASELINE)),
        S1: simulated_s(problem, Decision(schedule=S1)),
        S2: min(simulated_s(problem, choice) for choice in pairs),
        PARM: simulated_s(problem, parm_choice(problem)),
        WHOLE: simulated_s(problem, Decision(schedule="sequential", expert_form="gather")),
        FSMOE: simulated_s(problem, fsmoe_choice(problem)),
    }


def _grid() -> Mapping[str, list[str]]:
    """Return the values of every parameter, as the study lists them."""
    with GRID.open(newline="") as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        return {name: values.split() for name, values in list(rows)[1:]}
