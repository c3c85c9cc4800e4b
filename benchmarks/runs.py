"""The runs that BENCHMARKS.md shows."""

from __future__ import annotations

from typing import Final

from benchmarks.run import Run
from benchmarks.views import rate_text
from penstock.lab.emulate.links import parse_rate

FOUR_NODES: Final = ("--virtual", "--emulate", "4x4", "--inter-rate", "400mbit", "--intra-rate", "3200mbit")
"""Links inside nodes are eight times as fast as those between them."""

FORMS: Final = ("--schedules", "baseline_esp,parm_s1,parm_s2,fsmoe,auto")


def _cluster(shape: str, rate: str) -> tuple[str, ...]:
    return ("--emulate", shape, "--inter-rate", rate)


def _whole(rate: str, seconds: float) -> Run:
    """Return whole iterations of ours and of others, with AdamW and with its shares, each as shipped."""
    ours = ("--schedules", "sequential,sequential+zero1,penstock,penstock+zero1,penstock+zero2")
    arguments = (*_cluster("2x1", rate), *ours, "--peers", "deepspeed,megatron", "compare.rounds=3")
    return Run(
        name=f"iterations-2x1-{rate}",
        title=f"Whole iterations, {rate_text(parse_rate(rate))}",
        arguments=arguments,
        note="Clipping and the update included: `sequential` with plain AdamW first, then shares of it, then "
        "shares of gradients, too; DeepSpeed with ZeRO stage 1, and Megatron-Core up to the sums of "
        "gradients, as shipped `(gloo)` and on Penstock's all-to-all.",
        seconds=seconds,
    )


SUITE: Final = (
    Run(
        name="sft",
        title="TRL's script, beside transformers and DeepSpeed, 400 Mbit/s",
        benchmark="sft",
        arguments=(
            *_cluster("2x2", "400mbit"),
            *(
                "--contenders",
                "penstock;transformers;autoep",
                "--rounds",
                "3",
                "--steps",
                "5",
                "--warmup",
                "1",
            ),
        ),
        note="The script for supervised fine-tuning that TRL ships, with one line of Penstock, and unchanged "
        "with transformers' expert parallelism (`DistributedConfig`) and AutoEP of DeepSpeed, experts over "
        "all ranks: [docs/peers.md](docs/peers.md#expert-parallelism-of-transformers-and-autoep).",
        seconds=900,
        drawn=False,
    ),
    _whole("300mbit", 215),
    _whole("400mbit", 190),
    _whole("700mbit", 160),
    _whole("2gbit", 135),
    Run(
        name="layouts-s2",
        title="Layouts, 2 nodes of 2 devices: fewer tokens than slots",
        arguments=(
            *(*_cluster("2x2", "400mbit"), "--intra-rate", "3200mbit"),
            *("parallel.tp_size=2", "parallel.etp_size=2", *FORMS),
            *("compare.batch_per_device=1", "moe.top_k=1", "moe.capacity_factor=1.0"),
            *("model.num_layers=2", "model.hidden_size=128", "model.seq_len=64"),
            *("moe.num_experts=16", "moe.min_capacity=32", "moe.moe_ffn_hidden_size=2048"),
            *("compare.profile_s=15", "compare.rounds=9"),
        ),
        note="By the models `parm_s2` wins. An expert has at least 32 slots, more than it gets tokens: for "
        "the tokens of each rank where those are split at the gate, for those of both ranks together in "
        "`parm_s2`, which therefore sends and computes half as many rows.",
        seconds=70,
        drawn=False,
    ),
    Run(
        name="layouts-virtual-4x4",
        title="Layouts, 4 nodes of 4 devices, 400 Mbit/s, virtual",
        arguments=(
            *FOUR_NODES,
            *("parallel.tp_size=4", "parallel.etp_size=4", "moe.num_experts=4"),
            *(*FORMS, "model.num_layers=2", "model.seq_len=128", "compare.rounds=3"),
        ),
        note="All ranks of a node share attention and every expert. Parm reports 2.1 to 5.8 times the speed "
        "of the baseline for such layouts: see [docs/parallelism.md](docs/parallelism.md#measured).",
        seconds=100,
        drawn=False,
    ),
    Run(
        name="node-once-4x4",
        title="One copy per node, 4 nodes of 4 devices, 400 Mbit/s, virtual",
        arguments=(
            *FOUR_NODES,
            *("--schedules", "penstock,penstock+hierarchical_2d,penstock+node_once"),
            *("moe.num_experts=64", "moe.top_k=8", "moe.capacity_factor=none", "moe.moe_ffn_hidden_size=256"),
            *("model.num_layers=2", "model.seq_len=64", "schedule.microbatches=2", "compare.rounds=3"),
        ),
        note="Top-8 of 64 experts with even routing: the first row sends every copy of a token by itself, "
        "the last one copy to every node of its experts, with their numbers and weights beside it. Limits "
        "and bytes are of each dispatch by itself; all-reduces and counts are among them.",
        seconds=170,
        drawn=False,
    ),
    Run(
        name="placement-ablation",
        title="Placement, 4 nodes of 4 devices, virtual: each system alone, and together",
        arguments=(
            *(*FOUR_NODES, "moe.num_experts=16", "moe.capacity_factor=none", "model.seq_len=32"),
            *("compare.batch_per_device=8", "schedule.microbatches=2", "--schedules"),
            "sequential,flowmoe,fsmoe,sequential+netmoe,sequential+pro_prophet,sequential+netmoe+pro_prophet,"
            "flowmoe+netmoe,flowmoe+pro_prophet,flowmoe+netmoe+pro_prophet,penstock,penstock+netmoe,"
            "penstock+planned,penstock+netmoe+planned",
            *("virtual.routing=recorded", "virtual.recorded=benchmarks/data/mixed-text.jsonl"),
            "compare.rounds=3",
        ),
        note="What a small model chose for samples of 15 kinds of text: Python, C++ headers, English "
        "documentation, messages in twelve languages (`python -m benchmarks.mixed_text`). `sequential` is "
        "plain expert parallelism.",
        seconds=320,
        drawn=False,
    ),
    Run(
        name="placement-trained",
        title="Placement in real training, 2 nodes of 1 device, 200 Mbit/s",
        benchmark="trained",
        arguments=(),
        note="Real computation and real routing: a model that has learnt texts of 15 kinds without a balance "
        "loss trains on, with samples and experts that stay or move.",
        seconds=420,
    ),
    Run(
        name="collectives-4x1-400mbit",
        title="Collectives alone, 4 nodes of 1 device, 400 Mbit/s",
        benchmark="collectives",
        arguments=(*_cluster("4x1", "400mbit"), "moe.num_experts=4"),
        note="How near the transport comes to the wire; 0.99 is a wire that is never idle.",
        seconds=30,
    ),
    Run(
        name="predictions",
        title="Predicted and measured iterations at four rates",
        benchmark="predictions",
        arguments=(),
        note="The profile ends with real steps of a model of two layers; intervals come from their scatter. "
        "Error: measured over predicted, less 1.",
        seconds=480,
    ),
    Run(
        name="lossy",
        title="Rows that are rounded in transit: the loss",
        benchmark="lossy",
        arguments=(),
        note="A model of two layers with 8 experts, the same seed and data, 300 steps. The last two rows "
        "round nothing: they change the order of sums.",
        seconds=190,
        drawn=False,
    ),
    Run(
        name="drift",
        title="Drift: the network or a rank gets slower in mid-training",
        benchmark="drift",
        arguments=(),
        note="Each row is two runs: one that meets the change behind step 25, and one that was planned for "
        "the slow state from its start. Real training steps; medians of the last 15.",
        seconds=800,
    ),
    Run(
        name="layer",
        title="The MoE layer in one process",
        benchmark="layer",
        arguments=(),
        note="One thread, forward and backward: the layer beside the same block of Hugging Face transformers "
        "and a loop over experts.",
        seconds=60,
    ),
    Run(
        name="interpreter-2",
        title="What a task costs the host, 2 processes",
        benchmark="interpreter",
        arguments=("parallel.processes=2",),
        note="A step with next to nothing to compute on two processes, which exchange rows, counts, sums and "
        "gradients.",
        seconds=25,
    ),
    Run(
        name="solvers",
        title="What placement costs the host",
        benchmark="solvers",
        arguments=(),
        note="NetMoE's assignment of samples at the sizes of its solver table (MoE-GPT-S, 2 nodes of 8 "
        "devices), and 4,096 samples on 128 nodes; planners of replica experts.",
        seconds=40,
    ),
    Run(
        name="planners",
        title="Planners of replica experts on drifting skewed loads",
        benchmark="planners",
        arguments=(),
        note="By simulation: 3 of 16 experts have over half of the rows, and change slowly. A plan is made "
        "from one step and serves the next, unless it would be slower than none there. Forced balance is "
        "what no planner may do: every rank gets as many rows as any other.",
        seconds=40,
    ),
)
"""What `python -m benchmarks.suite` runs."""
