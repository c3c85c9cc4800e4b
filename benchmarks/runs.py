"""The runs that BENCHMARKS.md shows."""

from __future__ import annotations

from typing import Final

from benchmarks.mixed_text import MANY_EXPERTS
from benchmarks.placement_runs import PLACEMENT
from benchmarks.run import Run
from benchmarks.views import rate_text
from penstock.emulate.config import parse_rate

ALL: Final = ("--schedules", "sequential,moe_pipeline,flowmoe,penstock")
ENDS: Final = ("--schedules", "sequential,penstock")
SHARED: Final = (
    *("--emulate", "2x2", "--inter-rate", "400mbit", "--intra-rate", "3200mbit"),
    *("parallel.mp_size=2", "parallel.esp_size=2"),
)
"""Links inside nodes are eight times as fast as those between them."""

FEW: Final = ("compare.batch_per_device=1", "moe.top_k=1", "moe.capacity_factor=1.0")
SMALL: Final = ("model.num_layers=2", "model.seq_len=128")


def _cluster(shape: str, rate: str) -> tuple[str, ...]:
    return ("--emulate", shape, "--inter-rate", rate)


def _rates(rate: str, note: str, seconds: float) -> Run:
    """All schedules, each with the number of pieces that promises most, one rank per core."""
    arguments = (*_cluster("2x1", rate), *ALL, "compare.tune=true", "compare.rounds=3")
    title = _title("2x1", rate)
    return Run(name=f"2x1-{rate}", title=title, arguments=arguments, note=note, seconds=seconds)


def _whole(rate: str, seconds: float) -> Run:
    """Whole iterations of ours and of others, with AdamW and with its shares, each as shipped."""
    ours = ("--schedules", "sequential,sequential+sharded,penstock,penstock+sharded,penstock+shard_gradients")
    arguments = (*_cluster("2x1", rate), *ours, "--peers", "deepspeed,megatron", "compare.rounds=3")
    return Run(
        name=f"iterations-2x1-{rate}",
        title=f"Whole iterations, {rate_text(parse_rate(rate))}",
        arguments=arguments,
        note="Clipping and the update included: `sequential` with plain AdamW first, then shares of it, then "
        "shares of gradients, too; DeepSpeed with ZeRO stage 1, and Megatron-Core up to the sums of "
        "gradients, as shipped `(gloo)` and on Penstock's all-to-all.",
        seconds=seconds,
        drawn=False,
    )


def _shared(shape: str, note: str) -> Run:
    """Four ranks that compute on the cores of two."""
    arguments = (*_cluster(shape, "400mbit"), *ENDS, "moe.num_experts=4", "compare.rounds=2")
    title = _title(shape, "400mbit")
    return Run(name=f"{shape}-400mbit", title=title, arguments=arguments, note=note, seconds=70)


def _virtual(shape: str, experts: int, pieces: str, note: str) -> Run:
    settings = (f"moe.num_experts={experts}", pieces, "compare.rounds=2")
    arguments = ("--virtual", *_cluster(shape, "400mbit"), *ENDS, *settings)
    title = f"{_title(shape, '400mbit')}, virtual"
    name = f"virtual-{shape}-400mbit"
    return Run(name=name, title=title, arguments=arguments, note=note, seconds=65)


def _skewed(name: str, settings: tuple[str, ...], title: str, note: str) -> Run:
    """Small steps with uneven routing: what every rank computes and sends is priced rank by rank."""
    sizes = ("model.num_layers=2", "model.seq_len=128", "moe.num_experts=8", "moe.capacity_factor=none")
    routing = (f"virtual.routing={name}", *settings)
    pieces = ("schedule.microbatches=2", "compare.rounds=3", "compare.profile_s=20")
    schedules = ("--schedules", "sequential,flowmoe,penstock")
    return Run(
        name=f"virtual-2x2-{name.replace('_', '-')}",
        title=f"Uneven routing, virtual: {title}",
        arguments=("--virtual", *_cluster("2x2", "400mbit"), *schedules, *sizes, *pieces, *routing),
        note=note,
        seconds=60,
        drawn=False,
    )


def _collectives(shape: str, experts: int, note: str) -> Run:
    arguments = (*_cluster(shape, "400mbit"), f"moe.num_experts={experts}")
    title = f"Collectives alone, {_title(shape, '400mbit')}"
    return Run(
        name=f"collectives-{shape}-400mbit",
        title=title,
        benchmark="collectives",
        arguments=arguments,
        note=note,
        seconds=30,
    )


def _dispatch(shape: str, rate: str, experts: int, note: str, seconds: float) -> Run:
    arguments = (*_cluster(shape, rate), f"moe.num_experts={experts}", "compare.rounds=3")
    title = f"Ways to dispatch, {_title(shape, rate)}"
    return Run(
        name=f"dispatch-{shape}-{rate}",
        title=title,
        benchmark="dispatches",
        arguments=arguments,
        note=note,
        seconds=seconds,
    )


def _plan(rate: str, note: str) -> Run:
    """What is chosen, beside four published plans, all predicted from one profile."""
    arguments = ("--plan", *_cluster("2x1", rate), "compare.rounds=5")
    title = f"The chosen plan, {rate_text(parse_rate(rate))}"
    return Run(name=f"plan-2x1-{rate}", title=title, arguments=arguments, note=note, seconds=170, drawn=False)


def _predictions(name: str, title: str, arguments: tuple[str, ...], seconds: float) -> Run:
    """Every schedule at four rates, each rate with a profile of its own."""
    return Run(
        name=name,
        title=f"Predicted and measured iterations at four rates: {title}",
        benchmark="predictions",
        arguments=arguments,
        note="The profile ends with real steps of a model of two layers; intervals come from their scatter. "
        "Error: measured over predicted, less 1.",
        seconds=seconds,
    )


def _interpreter(processes: int, note: str) -> Run:
    return Run(
        name=f"interpreter-{processes}",
        title=f"What a task costs the host, {processes} process{'es' if processes > 1 else ''}",
        benchmark="interpreter",
        arguments=(f"parallel.processes={processes}",),
        note=note,
        seconds=25,
    )


def _layout(name: str, title: str, settings: tuple[str, ...], note: str, seconds: float) -> Run:
    """Ranks that share attention and experts in pairs, by every form and as the search has it."""
    compared = ("--schedules", "baseline_esp,parm_s1,parm_s2,fsmoe,auto")
    arguments = (*SHARED, *compared, *settings)
    title = f"Layouts, 2 nodes of 2 devices: {title}"
    return Run(
        name=f"layouts-{name}", title=title, arguments=arguments, note=note, seconds=seconds, drawn=False
    )


def _node_once(name: str, title: str, note: str, *routing: str) -> Run:
    """Ways to dispatch a token's rows for eight of many experts."""
    return Run(
        name=f"node-once-4x4{name}",
        title=f"One copy per node, 4 nodes of 4 devices, 400 Mbit/s, virtual{title}",
        arguments=(
            *("--virtual", "--emulate", "4x4", "--inter-rate", "400mbit", "--intra-rate", "3200mbit"),
            *("--schedules", "penstock,penstock+hierarchical_2d,penstock+node_once"),
            *("moe.num_experts=64", "moe.top_k=8", "moe.capacity_factor=none", "moe.moe_ffn_hidden_size=256"),
            *("model.num_layers=2", "model.seq_len=64", "schedule.microbatches=2", "compare.rounds=3"),
            *routing,
        ),
        note=note,
        seconds=170,
        drawn=False,
    )


def _title(shape: str, rate: str) -> str:
    nodes, devices = shape.split("x")
    plural = "s" if devices != "1" else ""
    return f"{nodes} nodes of {devices} device{plural}, {rate_text(parse_rate(rate))}"


SUITE: Final = (
    Run(
        name="sft",
        title="TRL's script, beside transformers and DeepSpeed, 400 Mbit/s",
        benchmark="sft",
        arguments=_cluster("2x2", "400mbit"),
        note="The script for supervised fine-tuning that TRL ships, with one line of Penstock, and unchanged "
        "with the expert parallelism of transformers (`DistributedConfig`) and DeepSpeed's AutoEP, each with "
        "experts over all ranks and over those of a node: "
        "[docs/peers.md](docs/peers.md#expert-parallelism-of-transformers-and-autoep).",
        seconds=900,
        drawn=False,
    ),
    _rates("300mbit", "A slow link: the bytes take longer than the computation.", 120),
    _rates("400mbit", "Bytes and computation take about the same time: there is most to hide.", 110),
    _rates("700mbit", "A faster link: computation takes longer than the bytes.", 100),
    _rates("2gbit", "A link so fast that little is left to hide.", 90),
    Run(
        name="peers-2x1-400mbit",
        title="Beside DeepSpeed and Megatron-Core, 400 Mbit/s",
        arguments=(
            *_cluster("2x1", "400mbit"),
            *ENDS,
            "--peers",
            "deepspeed,megatron",
            "compare.rounds=3",
        ),
        note="The same attention, weights and data through the MoE layers of other systems, with their own "
        "gradient synchronisation. `(gloo)` is as shipped; the other row of each has Penstock's all-to-all "
        "under it, so that a better all-to-all is not mistaken for better scheduling. What had to be worked "
        "around to run them on CPUs: [docs/peers.md](docs/peers.md).",
        seconds=140,
    ),
    _whole("300mbit", 215),
    _whole("400mbit", 190),
    _whole("700mbit", 160),
    _whole("2gbit", 135),
    _shared("2x2", "Two devices share each uplink, and four ranks share two cores."),
    _shared("4x1", "Four nodes with an uplink each; four ranks share two cores."),
    _virtual(
        "4x2", 8, "schedule.microbatches=4", "More devices than cores: they sleep instead of computing."
    ),
    _virtual("4x4", 16, "schedule.microbatches=2", "The same with four devices behind each uplink."),
    _layout(
        "fsmoe",
        "many tokens",
        (*SMALL, "compare.profile_s=40"),
        "The usual model, smaller. By the models `fsmoe` wins: its rows cross nodes once, and those of "
        "`parm_s1` and `parm_s2` once for every shard. Limits and bytes are of each form by itself.",
        130,
    ),
    _layout(
        "s2",
        "fewer tokens than slots",
        (
            *(*FEW, "model.num_layers=2", "model.hidden_size=128", "model.seq_len=64"),
            *("moe.num_experts=16", "moe.min_capacity=32", "moe.moe_ffn_hidden_size=2048"),
            *("compare.profile_s=15", "compare.rounds=9"),
        ),
        "By the models `parm_s2` wins. An expert has at least 32 slots, more than it gets tokens: for the "
        "tokens of each rank where those are split at the gate, for those of both ranks together in "
        "`parm_s2`, which therefore sends and computes half as many rows. So high a floor is no usual "
        "setting; with 64 experts of 4 slots each, tried before, `parm_s2` was the slowest of the three, "
        "predicted and measured, since products that small do not get cheaper with half the rows.",
        70,
    ),
    _layout(
        "s1",
        "one small block",
        (
            *(*FEW, "model.num_layers=1", "model.hidden_size=64", "model.seq_len=16"),
            *("moe.num_experts=2", "moe.min_capacity=1", "moe.moe_ffn_hidden_size=256"),
            *("compare.profile_s=20", "compare.rounds=100"),
        ),
        "By the models, with start-ups as assumed, `parm_s1` wins by a few percent: little else counts, and "
        "it has two transfers fewer than `fsmoe`. One block, because with more `fsmoe` hides gradients.",
        70,
    ),
    Run(
        name="layouts-virtual-4x4",
        title="Layouts, 4 nodes of 4 devices, 400 Mbit/s, virtual",
        arguments=(
            *("--virtual", "--emulate", "4x4", "--inter-rate", "400mbit", "--intra-rate", "3200mbit"),
            *("parallel.mp_size=4", "parallel.esp_size=4", "moe.num_experts=4"),
            *("--schedules", "baseline_esp,parm_s1,parm_s2,fsmoe,auto"),
            *(*SMALL, "compare.rounds=3"),
        ),
        note="All ranks of a node share attention and every expert. Parm reports 2.1 to 5.8 times the speed "
        "of the baseline for such layouts: see [docs/parallelism.md](docs/parallelism.md#measured).",
        seconds=100,
        drawn=False,
    ),
    _node_once(
        "",
        "",
        "Top-8 of 64 experts with even routing: the first row sends every copy of a token by itself, "
        "the last one copy to every node of its experts, with their numbers and weights beside it. Limits "
        "and bytes are of each dispatch by itself; all-reduces and counts are among them.",
    ),
    _node_once(
        "-recorded",
        ", samples of mixed text",
        "The same with what a small model really chose, see below. A recording says how often every sample "
        "chose each expert, and not which of them together, so on how many nodes a token's experts are is "
        "estimated: 3.65 of 4 in both layers, where the model itself has 3.50 in one and 3.73 in the other.",
        *("virtual.routing=recorded", f"virtual.recorded={MANY_EXPERTS}"),
    ),
    Run(
        name="lanes",
        title="FSMoE on two lanes and on one",
        benchmark="lanes",
        arguments=(*SHARED, "schedule.chunks=2", *SMALL, "compare.rounds=7"),
        note="The same schedule with traffic inside nodes and between them at once, and on one lane.",
        seconds=45,
        drawn=False,
    ),
    _skewed(
        "zipf", (), "zipf, exponent 1", "The busiest experts get most of the rows, and their ranks wait."
    ),
    _skewed("hot_rank", ("virtual.hot_share=0.6",), "a hot rank", "60 % of all rows go to one rank of 4."),
    *PLACEMENT,
    _collectives("2x1", 2, "How near the transport comes to the wire; 0.99 is a wire that is never idle."),
    _collectives("4x1", 4, "The same with four ranks."),
    _dispatch(
        "2x2", "2gbit", 4, "Which of the three is the fastest, and whether the fitted models say so.", 60
    ),
    _dispatch("4x4", "2gbit", 16, "The same with sixteen ranks, which only send.", 150),
    _plan("200mbit", "A profile, a search, and what was promised against what was measured."),
    _plan("300mbit", "The same on a faster link."),
    _plan("400mbit", "The same on a faster link."),
    _plan("700mbit", "The same on a faster link."),
    _plan("2gbit", "The same on a link that is hardly felt."),
    _predictions("predictions", "real computation", (), 480),
    _predictions("predictions-virtual", "virtual devices, 4 nodes of 2", ("--virtual",), 850),
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
        name="published",
        title="The layers of the FSMoE and FlowMoE studies",
        benchmark="published",
        arguments=(),
        note="By simulation, from rates fitted to tasks that the studies measured; how they are read and why "
        "figures differ: [docs/planning.md](docs/planning.md).",
        seconds=180,
    ),
    Run(
        name="layer",
        title="The MoE layer in one process",
        benchmark="layer",
        arguments=(),
        note="One thread, forward and backward: the layer beside the same block of Hugging Face transformers "
        "and a loop over experts; orders beside the machine's copy; compression of rows.",
        seconds=90,
    ),
    _interpreter(
        1,
        "A step with next to nothing to compute, beside the same modules under plain autograd, cut into the "
        "same microbatches.",
    ),
    _interpreter(2, "The same step on two processes, which exchange rows, counts, sums and gradients."),
    Run(
        name="solvers",
        title="What placement costs the host",
        benchmark="solvers",
        arguments=(),
        note="NetMoE's assignment of samples at the sizes of its solver table (MoE-GPT-S, 2 nodes of 8 "
        "devices), and 4,096 samples on 128 nodes; planners of guest experts.",
        seconds=40,
    ),
    Run(
        name="planners",
        title="Planners of guest experts on drifting skewed loads",
        benchmark="planners",
        arguments=(),
        note="By simulation: 3 of 16 experts have over half of the rows, and change slowly. A plan is made "
        "from one step and serves the next, unless it would be slower than none there. Forced balance is "
        "what no planner may do: every rank gets as many rows as any other.",
        seconds=40,
    ),
)
"""What `python -m benchmarks.suite` runs."""
