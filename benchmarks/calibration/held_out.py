"""Results of the papers to which nothing is fitted, beside what the shipped cluster files predict.

Every row of `published_results.csv` is here: with a prediction, or with the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.calibration.tasks import table
from benchmarks.published.layers import LayerSpec, flowmoe_problem, simulated_s
from benchmarks.published.parm_study import run_parm
from benchmarks.published.study import FSMOE_PUBLISHED, grids, run_grid
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.plan import Problem, published_problem
from penstock.plan.published import flowmoe_published_choice, pipemoe_choice, sequential_choice
from penstock.plan.subject import Overrides

SAMPLE: Final = 40
"""Layers of a grid that are simulated; they are drawn with a fixed seed."""

FLOWMOE: Final = ("gpt2-tiny", "bert-large", "llama2-layers", "deepseek-v2-layers-s")
CUSTOMISED: Final = LayerSpec(
    batch=4, seq_len=512, hidden_size=8192, ffn_hidden_size=8192, capacity_factor=1.2
)

PLANNERS: Final[Mapping[str, Callable[[Problem], Decision]]] = {
    "vanilla expert parallelism": sequential_choice,
    "Tutel": pipemoe_choice,
    "FlowMoE": flowmoe_published_choice,
}

NOT_PREDICTED: Final = {
    "FlowMoE-AT": "no schedule here",
    "FlowMoE-AR(BO)": "no schedule here",
    "ScheMoE": "no schedule here",
    "DeepSpeed-MoE": "batch sizes are not printed",
    "NetMoE": "routing is not printed",
    "KM solver": "times of a solver: `python -m benchmarks.solvers`",
    "Pro-Prophet": "routing is not printed",
    "estimate vs measured": "the error of its own model",
}
"""Systems, or what they are compared with, of rows without a prediction."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One published result.

    Attributes:
        predicted: The prediction by the shipped files; "" if there is none.
        why_not: Why there is none.
    """

    paper: str
    setting: str
    system: str
    baseline: str
    metric: str
    published: str
    predicted: str
    why_not: str = ""


def held_out(sample: int = SAMPLE) -> list[Result]:
    """Return every published result.

    Args:
        sample: How many layers of a grid are simulated.
    """
    fsmoe, parm = _fsmoe(sample), _parm(sample)
    results = []
    for row in table("published_results.csv"):
        system, baseline, paper = row["system"], row["baseline"], row["paper"]
        why_not = ""
        if (
            paper == "FlowMoE"
            and row["setting"].startswith(("one customised", "same layer"))
            and system in PLANNERS
        ):
            predicted = f"{_customised(system, baseline):.2f}"
        elif paper == "FlowMoE" and row["setting"].startswith("four models"):
            predicted = _range(_models(system, baseline))
        elif paper == "FSMoE" and "1458 layers" in row["setting"]:
            predicted = " / ".join(f"{each:.2f}" for each in fsmoe[system.split(" (")[0]])
        elif paper == "Parm" and row["setting"] == "1296 layers":
            predicted = parm
        else:
            predicted, why_not = "", NOT_PREDICTED.get(system) or NOT_PREDICTED[baseline]
        given = {name: row[name] for name in ("paper", "setting", "system", "baseline", "metric")}
        results.append(Result(**given, published=row["value"], predicted=predicted, why_not=why_not))
    return results


def _seconds(problem: Problem, system: str) -> float:
    return simulated_s(problem, PLANNERS[system](problem))


def _customised(system: str, baseline: str) -> float:
    problem = flowmoe_problem(CUSTOMISED, "flowmoe-cluster-1")
    return _seconds(problem, baseline) / _seconds(problem, system)


def _models(system: str, baseline: str) -> list[float]:
    """Return the speed-up of every model on 4, 8 and 16 devices."""
    file = find_cluster("flowmoe-cluster-1")
    ratios = []
    for sizes in (Overrides(nodes=1, ranks_per_node=4), Overrides(nodes=1, ranks_per_node=8), Overrides()):
        for model in FLOWMOE:
            problem = published_problem(f"flowmoe/{model}", file, sizes).problem
            ratios.append(_seconds(problem, baseline) / _seconds(problem, system))
    return ratios


FSMOE_NAMES: Final = {
    "FSMoE": "fsmoe",
    "Tutel-Improved": "dense_overlap, one lane",
    "FSMoE without intra/inter-node overlap": "fsmoe, one lane",
}


def _fsmoe(sample: int) -> dict[str, list[float]]:
    """Return mean speed-ups on FSMoE's two testbeds by system."""
    results = [run_grid(grid, sample=sample) for grid in grids() if grid.cluster in FSMOE_PUBLISHED]
    means = [{gain.contender: gain.mean for gain in result.gains} for result in results]
    return {system: [each[name] for each in means] for system, name in FSMOE_NAMES.items()}


def _parm(sample: int) -> str:
    results = [run_parm(cluster, sample=sample) for cluster in ("parm-testbed-a", "parm-testbed-b")]
    of_parm = [next(each for each in result.spreads if each.system == "parm") for result in results]
    return f"{min(each.least for each in of_parm):.2f} to {max(each.most for each in of_parm):.2f}"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
