"""The runs that BENCHMARKS.md shows of samples and experts that move."""

from __future__ import annotations

from typing import Final

from benchmarks.run import Run

MANY: Final = (
    *("--virtual", "--emulate", "4x4", "--inter-rate", "400mbit", "--intra-rate", "3200mbit"),
    *("moe.num_experts=16", "moe.capacity_factor=none", "model.seq_len=32", "compare.batch_per_device=8"),
    "schedule.microbatches=2",
)
STILL_AND_MOVED: Final = "sequential,sequential+netmoe,penstock,penstock+netmoe"
MIXED: Final = ("virtual.routing=recorded", "virtual.recorded=benchmarks/data/mixed-text.jsonl")
"""What a small model chose for samples of 15 very different texts, see `benchmarks.mixed_text`."""


def _moving(
    name: str, title: str, contenders: str, settings: tuple[str, ...], note: str, seconds: float
) -> Run:
    """Small batches of short samples on 16 virtual devices, where samples or experts may move."""
    arguments = (*MANY, "--schedules", contenders, *settings)
    title = f"Placement, 4 nodes of 4 devices, virtual: {title}"
    return Run(
        name=f"placement-{name}", title=title, arguments=arguments, note=note, seconds=seconds, drawn=False
    )


def _locality(name: str, concentration: float, note: str) -> Run:
    """Samples that prefer few experts, more or less strongly."""
    routing = ("virtual.routing=dirichlet", f"virtual.dirichlet_concentration={concentration:g}")
    settings = (*routing, "compare.rounds=3")
    return _moving(name, f"{name} locality", STILL_AND_MOVED, settings, note, 110)


PLACEMENT: Final = (
    _locality(
        "weak",
        1.0,
        "Samples have preferences of their own for experts, in every layer. Rows bring the residual of "
        "samples that move. NetMoE reports 34 to 43 % less volume of rows; the uplinks carry sums of "
        "gradients, too, which no move makes smaller.",
    ),
    _locality("strong", 0.1, "The same, and a sample wants two or three experts of 16 in a layer."),
    _moving(
        "top-8",
        "strong locality, top-8 of 64",
        STILL_AND_MOVED,
        (
            *("virtual.routing=dirichlet", "virtual.dirichlet_concentration=0.02", "moe.num_experts=64"),
            *("moe.top_k=8", "model.hidden_size=256", "moe.moe_ffn_hidden_size=512", "compare.rounds=3"),
        ),
        "Eight experts of a token are seldom on one node: there is less to be saved than with two.",
        110,
    ),
    _moving(
        "recorded",
        "samples of mixed text",
        STILL_AND_MOVED,
        (*MIXED, "compare.rounds=3"),
        "What the small model really chose for samples of 15 kinds of text: Python, C++ headers, English "
        "documentation, messages in twelve languages (`python -m benchmarks.mixed_text`).",
        110,
    ),
    _moving(
        "experts",
        "hot experts that drift",
        "sequential,sequential+shadowing,sequential+pro_prophet,sequential+least_loaded,sequential+planned",
        (
            *("virtual.routing=slow_drift", "virtual.zipf_exponent=1.2"),
            *("model.hidden_size=256", "moe.moe_ffn_hidden_size=256", "model.seq_len=64"),
            *("compare.rounds=3", "compare.warmup=2"),
        ),
        "Three of 16 experts have over half of the rows, and which three these are changes slowly. "
        "Plans are made from the step before. An expert has as many bytes as half of a device's rows: with "
        "four times as many bytes, only `planned` finds copies that pay. Pro-Prophet reports 1.36 to "
        "2.66 times the speed of none, and 1.01 to 1.50 times that of shadowing.",
        200,
    ),
    _moving(
        "ablation",
        "each system alone, and together",
        "sequential,flowmoe,fsmoe,sequential+netmoe,sequential+pro_prophet,sequential+netmoe+pro_prophet,"
        "flowmoe+netmoe,flowmoe+pro_prophet,flowmoe+netmoe+pro_prophet,penstock,penstock+netmoe,"
        "penstock+planned,penstock+netmoe+planned",
        (*MIXED, "compare.rounds=3"),
        "Routing of a real run (see above). `sequential` is plain expert parallelism.",
        320,
    ),
    _moving(
        "ablation-shared",
        "each system alone, and together, where nodes share attention and experts",
        "baseline_esp,parm_s1,parm_s2,fsmoe,fsmoe+netmoe,fsmoe+pro_prophet,fsmoe+netmoe+pro_prophet,penstock,"
        "penstock+netmoe+planned",
        (*MIXED, "parallel.mp_size=4", "parallel.esp_size=4", "compare.rounds=3"),
        "The same routing in Parm's layout: the devices of a node share one batch, and every expert that the "
        "node has. `baseline_esp` is DeepSpeed-MoE's order.",
        250,
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
)
"""Part of the suite."""
