"""The shipped rates are the likeliest by the papers' tasks and by their class, and the page shows them."""

from __future__ import annotations

import pytest

from benchmarks.calibration.__main__ import PAGE, PRICED
from benchmarks.calibration.fit import fitted, misses
from benchmarks.calibration.gpu import measured_step
from benchmarks.calibration.hardware import HARDWARE
from benchmarks.calibration.held_out import NOT_PREDICTED, Result
from benchmarks.calibration.page import page, priced_tasks
from benchmarks.calibration.tasks import rows, table
from penstock.cost import ProfiledCluster, Span
from penstock.cost.clusters import find_cluster, names
from penstock.plan import published_problem
from penstock.plan.published import PUBLISHED

FITTED = ("flowmoe-cluster-1", "fsmoe-testbed-a", "fsmoe-testbed-b")
FLOWMOE = ("flowmoe/gpt2-tiny", "flowmoe/bert-large", "flowmoe/llama2-layers", "flowmoe/deepseek-v2-layers-s")
FARTHEST = {"flowmoe-cluster-1": 0.37, "fsmoe-testbed-a": 0.105, "fsmoe-testbed-b": 0.075}
"""How far any fitted row is from its price."""


@pytest.mark.parametrize("name", names())
@pytest.mark.slow
def test_the_shipped_file_is_what_is_fitted(name: str) -> None:
    shipped, found = find_cluster(name), fitted(name).file
    for each, value in vars(found.rates).items():
        assert getattr(shipped.rates, each) == (
            pytest.approx(value, rel=2e-3) if isinstance(value, float) else value
        )
    assert name in HARDWARE and shipped.source == found.source
    assert (shipped.device, shipped.precision) == (found.device, "float32")


@pytest.mark.parametrize("name", FITTED)
def test_fitted_rows_are_priced(name: str) -> None:
    errors = misses(find_cluster(name)).errors
    assert max(map(abs, errors)) < FARTHEST[name]
    assert {row.cluster for row in rows()} == set(FITTED)


def test_rows_are_all_there() -> None:
    """Thirty, with the sums of the papers' tables in milliseconds."""
    sums = {name: sum(row.measured_ms for row in rows() if row.cluster == name) for name in FITTED}
    assert len(rows()) == 30
    assert sums == pytest.approx(
        {"flowmoe-cluster-1": 11549.8, "fsmoe-testbed-a": 31.36, "fsmoe-testbed-b": 388.4}
    )


@pytest.mark.parametrize("name", sorted(set(names()) - {"fsmoe-testbed-a", "fsmoe-testbed-b"}))
def test_start_ups_are_those_of_the_class_of_network_and_library(name: str) -> None:
    """Of an all-reduce, in milliseconds; FSMoE's testbeds have what its linear models say."""
    file = find_cluster(name)
    span = Span.regular(file.nodes, file.ranks_per_node)
    start_s = ProfiledCluster.build(file).all_reduce(span).alpha_s
    assert 0.09e-3 <= start_s <= 0.42e-3


@pytest.mark.parametrize("model", FLOWMOE)
def test_devices_half_as_fast_make_steps_longer(model: str) -> None:
    """FlowMoE's models on its cluster 1, under plain expert parallelism and its own planner."""
    file = find_cluster("flowmoe-cluster-1")
    for planner, least in (("sequential", 1.2), ("flowmoe", 1.05)):
        seconds = []
        for each in (file, file.faster(compute=0.5)):
            problem = published_problem(model, each).problem
            choice = PUBLISHED[planner](problem)
            seconds.append(problem.simulate(choice, problem.plan(choice)).iteration_s)
        assert seconds[1] / seconds[0] > least


def test_the_page_is_what_the_command_writes() -> None:
    """But for the rows that are simulated, which take longer."""
    names = ("paper", "setting", "system", "baseline", "metric")
    written = PAGE.read_text(encoding="utf-8")
    results = [
        Result(**{name: row[name] for name in names}, published=row["value"], predicted="")
        for row in table("published_results.csv")
    ]
    parts = page(results, []).split("## Results of the papers")
    assert written.startswith(parts[0])
    for each in results:
        assert each.paper in written
        without = each.system in NOT_PREDICTED or each.baseline in NOT_PREDICTED
        assert without or (each.setting in written and each.published in written)
    for row in table("gpu_calibration.csv"):
        assert f"{float(row['step_s']):.4g}" in written


def test_the_file_of_tasks_is_what_the_command_writes() -> None:
    assert PRICED.read_text(encoding="utf-8") == priced_tasks()
    assert len(table(PRICED.name)) == len(rows())


@pytest.mark.slow
def test_a_step_on_gpus_is_predicted_in_its_layout() -> None:
    row = {"group": "nemo-automodel", "model": "", "gpus": "8", "system": "H100", "seq": "4096", "gbs": "32"}
    row |= {
        "mbs": "4",
        "tp": "1",
        "pp": "2",
        "vp": "",
        "ep": "4",
        "recompute": "",
        "step_s": "1",
        "tok_s_gpu": "",
    }
    found = measured_step(row)
    assert found.predicted_s and found.predicted_rate and found.plan
    assert found.predicted_s * found.predicted_rate * 8 == pytest.approx(32 * 4096)
    assert measured_step({**row, "group": "ms-swift"}).predicted_s is None
