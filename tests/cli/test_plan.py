"""`penstock plan`: from names to a plan, in a process of its own that has no torch."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.plan_search import find_best
from penstock.cost import ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.plan import PlanFile, published_problem
from penstock.plan.problem import Problem
from penstock.plan.search import FoundPlan, find_plan
from penstock.plan.subject import Overrides, Subject
from tests.plan.problems import problem
from tests.support.cli import Cli
from tests.support.runs import write_config

pytestmark = pytest.mark.usefixtures("searched_once")

OPEN = ["plan", "--model", "qwen3-30b-a3b", "--cluster", "4x8xA100,net=100gbit"]
SMALL = [
    *("plan", "--model", "flowmoe/gpt2-tiny", "--cluster", "flowmoe-cluster-2"),
    *("--layers", "1", "--batch", "2"),
]


@pytest.fixture(scope="module")
def saved(searched_once: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The plan that SMALL asks for in a file, and what was printed."""
    del searched_once
    path, out = tmp_path_factory.mktemp("plan") / "plan.json", io.StringIO()
    with redirect_stdout(out):
        assert main([*SMALL, "--budget", "0.001", "--out", str(path)]) == 0
    return path, out.getvalue()


@pytest.mark.slow
def test_mixtral_is_planned_without_torch() -> None:
    """As on a laptop: no GPU, no network, and torch is never imported."""
    program = (
        "import sys; from penstock.cli import main\n"
        "code = main(['plan', '--model', 'fsmoe/mixtral-7b-layers', '--cluster', 'fsmoe-testbed-b', "
        "'--layers', '1', '--budget', '0.05'])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in (
        "fsmoe/mixtral-7b-layers on fsmoe-testbed-b",
        "Plan ",
        "Time ",
        "Limit ",
        "Next ",
        "What if ",
    ):
        assert words in done.stdout
    for words in ("sequential", "fsmoe", "2x inter-node bandwidth -", "4 ranks of a node share"):
        assert words in done.stdout


@pytest.mark.slow
def test_the_layout_of_a_configuration_is_chosen_where_it_is_left_open(cli: Cli, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    ClusterFile(name="by hand", nodes=1, ranks_per_node=2).save(cluster)
    words = ["plan", str(write_config(tmp_path)), "--cluster", str(cluster), "--budget", "0.001"]
    asked, configured = (
        " ".join(cli.prints([*words, *more]).split())
        for more in (["--layout", "auto"], ["plan.mode=auto", "plan.layout=auto"])
    )
    for said in (asked, configured):
        assert "layout, by quick plans: dp" in said and "next best layout" in said and "per rank" in said
    given = cli.prints([*words, "--layout", "given"])
    assert "layouts compared" not in given and "tiny.toml on by hand" in " ".join(given.split())
    unnamed = replace(ClusterFile.read(cluster), name="this cluster")
    unnamed.save(cluster)
    assert f"tiny.toml on {cluster} " in " ".join(cli.prints(words).split()), "the file stands for its name"


@pytest.mark.slow
def test_json_is_one_object_with_every_number(cli: Cli) -> None:
    found = cli.finds([*SMALL, "--batch", "1"])
    assert found["predicted_s"] <= min(other["predicted_s"] for other in found["others"])
    assert found["lower_bound_s"] <= found["predicted_s"]
    assert len(found["why"]["lines"]) == 5
    search = found["search"]
    assert search["simulated"] > 5 and search["stopped"] is None and found["complete"]
    assert found["sizes"]["layers"] == 1


@pytest.mark.slow
def test_what_if_plans_the_step_that_is_shown_again(cli: Cli, tmp_path: Path) -> None:
    """In its layout and with its optimiser, also where these are open."""
    path = tmp_path / "cluster.json"
    words = [*SMALL, "--batch", "1", "--budget", "0.0001", "--json", "--ep-size", "2"]
    now = json.loads(cli.prints([*words, "--layout", "auto", "--zero-stage", "auto"]))
    sizes = now["sizes"]
    find_cluster("flowmoe-cluster-2").faster(compute=2.0).save(path)
    shown = [f"--tp-size={sizes['tp_size']}", f"--etp-size={sizes['etp_size']}"]
    shown += [f"--zero-stage={sizes['zero_stage']}"]
    on_it = [str(path) if word == "flowmoe-cluster-2" else word for word in [*words, *shown]]
    then = json.loads(cli.prints(on_it))
    gain = then["why"]["predicted_s"] / now["why"]["predicted_s"]
    assert now["why"]["faster"]["faster devices"] == pytest.approx(gain, rel=0.02)


@pytest.mark.slow
def test_a_plan_is_no_slower_than_the_quick_one_for_which_its_layout_was_chosen(cli: Cli) -> None:
    """Also by a search that ends before it has gone far."""
    cluster = "4x4xA100-80GB,net=10gbit"
    words = ["plan", "--model", "flowmoe/gpt2-tiny", "--layers", "2", "--cluster", cluster, "--ep-size", "16"]
    said = " ".join(cli.prints([*words, "--layout", "auto", "--budget", "0.0001"]).split())
    quick_ms, planned_ms = (
        float(re.findall(rf"{where} (\S+) ms", said)[0])
        for where in ("layout, by quick plans: .*? etp 1:", "Time")
    )
    assert planned_ms <= quick_ms


@pytest.mark.slow
def test_a_short_search_finds_how_rows_travel(cli: Cli) -> None:
    """A copy per node halves the step: one per row takes twice as long, however it is cut."""
    words = ["plan", "--model", "qwen3-30b-a3b", "--cluster", "4x8xA100-80GB,net=100gbit"]
    found = cli.finds([*words, "--budget", "0.1"])
    assert found["choice"]["dispatch"] == "node_once"


@pytest.mark.slow
def test_the_given_layout_is_taken_where_its_own_plan_is_faster() -> None:
    def subject(each: Problem, given: Subject | None = None) -> Subject:
        return Subject(title="", cluster_name="", problem=each, given=given)

    def find(each: Problem, starts: tuple[Decision, ...] = (), /) -> FoundPlan:
        return find_plan(each, effort="low", budget=0.1, starts=starts)

    slow, fast = problem(batch=2), problem(batch=1)
    for best, given in ((slow, fast), (fast, slow)):
        found, plan, lines = find_best(subject(best, subject(given)), find)
        assert found.problem is fast and plan.best.predicted_s < find(slow).best.predicted_s
        assert lines[0].startswith("Layout") and ("given" in lines[0]) is (given is slow)


@pytest.mark.slow
def test_a_plan_is_saved_shown_and_can_be_replayed(saved: tuple[Path, str], cli: Cli) -> None:
    path, text = saved
    assert f"\nSaved    {path}\n" in text
    shown = cli.prints(["plan", "--show", str(path)])
    assert "flowmoe/gpt2-tiny" in shown and "Plan " in shown and "the task order in the file" in shown
    assert cli.finds(["plan", "--show", str(path)])["model"].startswith("flowmoe/gpt2-tiny")
    cluster = find_cluster("flowmoe-cluster-2")
    problem = published_problem("flowmoe/gpt2-tiny", cluster, Overrides(layers=1, batch=2)).problem
    PlanFile.read(path).step_plan(problem)


@pytest.mark.slow
def test_what_a_budget_cut_short_is_said_everywhere(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = [*SMALL, "--budget", "0.0001", "--out", str(path)]
    said = "The budget of 0.0001 (20 simulated tasks) was used up in stage 'better cuts'"
    assert said in " ".join(cli.prints(words).split())
    found = cli.finds([*words])
    assert found["search"]["stopped"] == "better cuts" and not found["complete"]
    assert found["search"]["left_out"] > 0 and "flowmoe" in found["search"]["skipped"]
    saved = PlanFile.read(path)
    assert saved.search is not None and saved.search.stopped == "better cuts"
    assert said in " ".join(cli.prints(["plan", "--show", str(path)]).split())


@pytest.mark.slow
def test_it_ends_by_the_clock_and_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing gets done: with the first plans and the first layout."""
    for module in ("plan_search", "plan_subject"):
        monkeypatch.setattr(
            f"penstock.cli.{module}.time_limit", lambda clock, budget, most_s: lambda: most_s > 0
        )
    words = [*SMALL, "--layout", "auto"]
    said = " ".join(cli.prints(words).split())
    for part in (
        "1 layout compared",
        "were not looked at",
        "took too long, as this machine is busy",
        "not planned in the",
    ):
        assert part in said
    found = cli.finds([*words])
    assert found["search"]["late"] and not found["complete"] and found["why"]["faster"] == {}
    assert found["why"]["faster_not_planned"] == [
        "inter-node bandwidth",
        "intra-node bandwidth",
        "faster devices",
    ]


@pytest.mark.slow
def test_a_plan_that_was_edited_is_not_explained_by_its_old_lines(
    saved: tuple[Path, str], cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    shutil.copy(saved[0], path)
    shown = cli.prints(["plan", "--show", str(path)])
    assert "Edited" not in shown
    table = json.loads(path.read_text())
    table["choice"] |= {"schedule": "flowmoe", "microbatches": 2}
    path.write_text(json.dumps({**table, "schedule": None}))
    again = cli.prints(["plan", "--show", str(path)])
    note = again[again.index("Edited") : again.index("Plan  ")]
    words = " ".join(note.split())
    assert "flowmoe: 2 microbatches" in words and "changed after the following lines were written" in words
    assert again.endswith(shown[shown.index("Plan  ") :])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_no_number_that_json_lacks_is_planned_with(cli: Cli, tmp_path: Path, number: str) -> None:
    path = tmp_path / "cluster.json"
    rates = f'{{"link_latency_s": {number}}}'
    path.write_text(f'{{"name": "mine", "nodes": 2, "ranks_per_node": 1, "rates": {rates}}}')
    words = ["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", str(path), "--json"]
    assert "rates.link_latency_s = " in cli.refuses(words)


RATES = [
    *(("flops_per_s", value) for value in (3, 1e5, 1e30)),
    *(("memory_bytes_per_s", value) for value in (0, 3, 1e30)),
    *((f"{link}_bytes_per_s", value) for link in ("link", "intra") for value in (-1, 3, 1e30)),
    *((f"{link}_latency_s", value) for link in ("link", "intra") for value in (0, 1e-300, 1e5)),
    *(("task_overhead_s", value) for value in (0, 1e-300, 1e5)),
]
"""Rates of no machine, by their name in [cluster] and in the `rates` of a cluster file."""


@pytest.mark.parametrize(("name", "value"), RATES)
def test_a_rate_of_no_machine_is_refused_by_name(cli: Cli, tmp_path: Path, name: str, value: float) -> None:
    tiny = Path(__file__).parents[2] / "configs" / "tiny.toml"
    key = f"cluster.{name} = "
    assert cli.refuses(["train", str(tiny), f"cluster.{name}={value}"]).startswith(f"penstock: {key}")
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"name": "mine", "nodes": 1, "ranks_per_node": 2, "rates": {name: value}}))
    said = cli.refuses(["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", str(path)])
    assert said.startswith(f"penstock: {path}.rates.{name} = ")


@pytest.mark.parametrize(
    ("list_", "name", "value"),
    [("links", "alpha_s", 1e5), ("links", "beta_s_per_byte", 1.0), ("tasks", "alpha_s", 1e5)],
)
def test_a_line_of_no_machine_is_refused_by_name(
    cli: Cli, tmp_path: Path, list_: str, name: str, value: float
) -> None:
    link = {"collective": "all_to_all", "group": "ep", "lane": "inter", "ranks": 2, "alpha_s": 1e-4}
    task = {"op": "AT", "phase": "F", "alpha_s": 1e-4, "scale": 1.0}
    entry = {**({**link, "beta_s_per_byte": 1e-9} if list_ == "links" else task), name: value}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"name": "mine", "nodes": 1, "ranks_per_node": 2, list_: [entry]}))
    said = cli.refuses(["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", str(path)])
    assert said.startswith(f"penstock: {path}.{list_}[0].{name} = ")


@pytest.mark.slow
def test_what_a_terminal_would_obey_is_shown_as_text(
    saved: tuple[Path, str], tmp_path: Path, cli: Cli
) -> None:
    table = json.loads(saved[0].read_text())
    table |= {"model": "m\x1b[2J", "cluster": "c\nd\u202e", "why": ["Plan     \x9b31m\x07", *table["why"]]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    shown = cli.prints(["plan", "--show", str(path)])
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert r"m\x1b[2J on c\x0ad\x202e" in shown and r"\x9b31m\x07" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("layers", "batch_per_rank", "seq_len", "hidden_size", "ffn_hidden_size")),
        *((name, 0) for name in ("num_experts", "top_k", "ranks", "ep_size", "tp_size", "etp_size")),
        *(("seq_len", value) for value in (-1, 1 << 70)),
        *((name, 1 << 40) for name in ("moe_layers", "top_k", "ep_size")),
    ],
)
def test_a_saved_plan_of_no_step_is_not_shown(
    saved: tuple[Path, str], tmp_path: Path, cli: Cli, name: str, value: int
) -> None:
    table = json.loads(saved[0].read_text())
    table["sizes"][name] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    said = cli.refuses(["plan", "--show", str(path)])
    assert said.startswith(f"penstock: {path}.sizes.{name} = ") and said.count("\n") == 1


@pytest.mark.slow
def test_a_training_configuration_is_planned(cli: Cli) -> None:
    tiny = Path(__file__).parents[2] / "configs" / "tiny.toml"
    words = [
        "plan",
        str(tiny),
        "model.num_layers=1",
        "data.batch_per_device=2",
        "--cluster",
        "flowmoe-cluster-2",
        "--budget",
        "0.01",
    ]
    text = cli.prints(words)
    assert "tiny.toml on flowmoe-cluster-2" in text and "1 layer (1 MoE)" in text


@pytest.mark.slow
def test_a_configuration_is_planned_in_the_precision_of_the_device_or_of_its_setting(
    cli: Cli, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.json"
    ClusterFile(name="by hand", nodes=1, ranks_per_node=2, device="H100").save(cluster)
    words = ["plan", str(write_config(tmp_path)), "--cluster", str(cluster), "--budget", "0.0001"]
    usual = cli.finds([*words])
    exact = json.loads(cli.prints([*words, "--json", "train.precision=float32"]))
    assert (usual["precision"], exact["precision"]) == ("bfloat16", "float32")
    smaller, larger = (each["why"]["memory_parts_bytes"]["activations"] for each in (usual, exact))
    assert smaller < larger
    assert re.search(r"^dtype +float32 ", cli.prints([*words, "train.precision=float32"]), re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["plan"], "either a configuration or --model"),
        (["plan", "--model", "fsmoe/mixtral-7b-layers"], "--cluster: is needed"),
        (["plan", "--model", "Mixtral", "--cluster", "fsmoe-testbed-b"], "Nearest: mixtral-"),
        (["plan", "--model", "fsmoe/mixtral-7b-layers", "--cluster", "fsmoe"], "Nearest: fsmoe-testbed-"),
        ([*OPEN, "--ep-size", "7"], "penstock: --ep-size = 7: must divide"),
        ([*OPEN, "--batch", "9999999"], "penstock: --batch = 9999999: must be from 1 to"),
        ([*OPEN[:-1], "4x8xA100,net=0gbit"], 'penstock: --cluster = "4x8xA100,net=0gbit": nothing arrives'),
        ([*SMALL, "--batch", "0"], "--batch = 0"),
        ([*SMALL, "--memory-gib", "-1"], "--memory-gib = -1"),
        ([*SMALL, "--memory-gib", "0.01"], "no plan fits"),
        ([*SMALL, "--memory-gib", "0.0000001"], 'memory per rank = "107 bytes"'),
        ([*SMALL, "--memory-gib", "inf"], "--memory-gib = inf: must be positive and finite"),
        ([*SMALL, "--memory-gib", "nan"], "--memory-gib = nan: must be positive and finite"),
        ([*SMALL, "--memory-gib", "1e300"], "must be positive and finite"),
        ([*SMALL, "--budget", "0"], "--budget = 0.0: must be above 0 and at most"),
        ([*SMALL, "--budget", "nan"], "--budget = nan"),
        ([*SMALL, "--budget", "1e9"], "at most 1000"),
        (["plan", "--show", "p.json", "--budget", "2"], "--budget = 2.0: --show only prints"),
        (["plan", "--show", "nowhere.json"], "nowhere.json: there is no such file"),
        (["plan", "configs/tiny.toml", "--batch", "2", "--cluster", "fsmoe-testbed-b"], "section.key=value"),
        (
            ["plan", "--show", "p.json", "--model", "fsmoe/mixtral-7b-layers"],
            '--model = "fsmoe/mixtral-7b-layers": --show only prints',
        ),
        (["plan", "--show", "p.json", "--cluster", "fsmoe-testbed-b"], '--cluster = "fsmoe-testbed-b"'),
        (["plan", "--show", "p.json", "--out", "q.json"], '--out = "q.json"'),
        (["plan", "--show", "p.json", "--memory-gib", "2"], "--memory-gib = 2.0"),
        (["plan", "--show", "p.json", "--ep-size", "2"], "--ep-size = 2"),
        (["plan", "--show", "p.json", "--precision", "auto"], '--precision = "auto"'),
        (["plan", "configs/tiny.toml", "--precision", "auto", "--cluster", "fsmoe-testbed-b"], "section.key"),
        (["plan", "configs/tiny.toml", "--show", "p.json"], 'CONFIG = "configs/tiny.toml"'),
    ],
)
def test_what_is_wrong_is_answered(words: list[str], answer: str, cli: Cli) -> None:
    assert answer in cli.refuses(words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["study", "configuration"])
def test_what_would_fit_is_said_and_fits(kind: str, cli: Cli, tmp_path: Path) -> None:
    words = [*SMALL, "--recompute", "none"]
    if kind == "configuration":
        cluster = tmp_path / "cluster.json"
        ClusterFile(name="by hand", nodes=1, ranks_per_node=2).save(cluster)
        words = ["plan", str(write_config(tmp_path)), "--cluster", str(cluster), "plan.recompute=none"]
    words += ["--budget", "0.0001"]
    needs = cli.finds([*words])["why"]["memory_bytes"]
    words += ["--memory-gib", str(needs / 2 / 2**30)]
    said = " ".join(cli.refuses(words).split())
    options, told = re.findall(r"fit with ([^()]+) \((.+?) per rank\)", said)[0]
    assert ("--" in options) is (kind == "study")
    found = cli.finds([*words, *options.split()])["why"]["memory_bytes"]
    assert found <= needs / 2 and f"fit with {options} ({told} per rank)" in said


@pytest.mark.slow
def test_layouts_are_compared_by_whole_updates(cli: Cli) -> None:
    """The search starts with the quick plan of the layout, so it finds none that takes longer."""
    words = [*SMALL, "--layout", "auto", "--budget", "0.1", "--routing", "zipf", "--global-batch"]
    found = cli.finds([*words, "256"])
    line = next(note for note in found["notes"] if note.startswith("layout, by quick plans"))
    quick_ms = float(re.findall(r": ([\d.,]+) ms", line)[0].replace(",", ""))
    assert found["predicted_s"] <= quick_ms / 1e3 * 1.01
    assert cli.refuses([*words, "255"]).startswith("penstock: --global-batch = 255: ")


@pytest.mark.slow
def test_a_busiest_rank_costs_time(cli: Cli, tmp_path: Path) -> None:
    words, seconds = [*SMALL, "--batch", "1", "--budget", "0.01"], []
    for imbalance in ("1", "2"):
        path = tmp_path / f"{imbalance}.json"
        said = cli.prints([*words, "--imbalance", imbalance, "--out", str(path)])
        seconds.append(PlanFile.read(path).predicted_s)
    assert seconds[1] > 1.1 * seconds[0]
    assert "gets 2 times the mean" in " ".join(said.split())
    error = cli.refuses([*SMALL, "--imbalance", "99"])
    assert "--imbalance = 99.0" in error and "Use 1 for even routing" in error


@pytest.mark.slow
def test_a_plan_that_moves_has_the_order_that_was_found_and_fits_into_memory(
    cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    routed = ["plan", "--model", "pro-prophet/moe-gpt-s", "--layers", "1", "--cluster", "fsmoe-testbed-b"]
    routed += ["--budget", "0.01", "--recompute", "none", "--routing", "hot_expert,hot_share=0.5"]
    routed += ["--json", "--out", str(path)]
    free = json.loads(cli.prints(routed))["moving"]
    choice = PlanFile.read(path).choice
    assert free["pays"] and choice.experts != "none"
    shown = cli.prints(["plan", "--show", str(path)])
    assert "Edited" not in shown and "Placed " in shown
    assert choice.priority == free["best"]["priority"]
    still, moving = (free[each]["memory_bytes"] for each in ("still", "best"))
    assert moving < still, "replicas take more rows from the busiest rank than they need themselves"
    assert PlanFile.read(path).memory_bytes == moving
    limit = still - 1
    tight = json.loads(cli.prints([*routed, "--memory-gib", str(limit / 2**30)]))["moving"]
    assert tight["still"]["memory_bytes"] <= limit, "another plan was found, with room for these rows"
    assert PlanFile.read(path).memory_bytes <= limit


def test_a_routing_of_too_many_ranks_is_refused_at_once(cli: Cli) -> None:
    words = ["plan", "--model", "pro-prophet/moe-gpt-s", "--cluster", "1024x64xH100,net=8x400gbit"]
    assert cli.refuses([*words, "--routing", "gini=0.3"]).startswith("penstock: --routing = ")


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_off_a_terminal_progress_is_a_line_now_and_then(
    every_s: float, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.plan_search.LINE_EVERY_S", every_s)
    assert main([*SMALL, "--json", "--seq-len", "320", "--budget", "0.001"]) == 0
    shown = cli.capsys.readouterr()
    lines = shown.err.splitlines()
    assert json.loads(shown.out) and all(line.startswith("planning: ") for line in lines)
    assert "\x1b" not in shown.err and bool(lines) is (every_s == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("stopped_search")
def test_a_search_that_is_stopped_prints_what_it_has(cli: Cli, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main([*SMALL, "--json", "--seq-len", "384", "--out", str(tmp_path / "plan.json")]) == 130
    found = json.loads(cli.capsys.readouterr().out)
    assert found["predicted_s"] > 0 and not found["complete"]
    assert PlanFile.read(tmp_path / "plan.json").choice.schedule == found["choice"]["schedule"]
    assert signal.getsignal(signal.SIGINT) == before
