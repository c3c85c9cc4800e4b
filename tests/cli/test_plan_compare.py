"""`penstock plan --against`, `--sweep`, `--global-batch`: plans beside each other, updates of many passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.plan.models import model_name, open_models
from tests.support.cli import Cli

pytestmark = pytest.mark.usefixtures("searched_once")

STEP = ["plan", "--model", "flowmoe/gpt2-tiny", "--layers", "1", "--batch", "1", "--budget", "0.0001"]
STUDY = [*STEP, "--cluster", "flowmoe-cluster-2"]
LINE = [*STEP, "--cluster", "2x4xA100-80GB,net=100gbit"]


@pytest.mark.slow
def test_a_faster_network_never_makes_a_longer_step(cli: Cli) -> None:
    swept = [*LINE, "--sweep", "net=25,100,2x400gbit"]
    rows = cli.finds(swept)["rows"]
    assert [row["value"] for row in rows] == ["25", "100", "2x400gbit"]
    seconds = [row["step_s"] for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert rows[0]["cluster"].endswith("net=25gbit") and rows[0]["tokens_per_s"] > 0
    text = cli.prints(swept)
    assert "tokens/s" in text and "net=100: " in text


@pytest.mark.slow
def test_a_line_may_leave_the_rate_to_the_sweep(cli: Cli) -> None:
    whole = cli.finds([*LINE, "--sweep", "net=25"])["rows"]
    without = [word.partition(",net=")[0] for word in LINE]
    assert without != LINE and cli.finds([*without, "--sweep", "net=25"])["rows"] == whole


@pytest.mark.slow
def test_a_value_with_which_nothing_fits_says_so(cli: Cli) -> None:
    rows = cli.finds([*STUDY, "--memory-gib", "2", "--sweep", "seq_len=128,65536"])["rows"]
    assert "step_s" in rows[0] and "no plan fits" in rows[1]["refused"]


@pytest.mark.slow
def test_a_plan_beside_which_nothing_fits_is_named(cli: Cli) -> None:
    said = cli.refuses([*STUDY, "--memory-gib", "2", "--against", "seq_len=65536"])
    assert said.startswith('penstock: --against = "seq_len=65536": ') and "2.00 GiB" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "net"], "net=25,100,400"),
        (["--sweep", "net=25"], "Describe the cluster in a line"),
        (["--sweep", "colour=1"], "colour"),
        (["--sweep", "seq_len=0"], "seq_len"),
        (["--against", "ep_size=x"], "whole number"),
        (["--against", "recompute=much"], "none, experts, blocks"),
        (["--sweep", f"seq_len={'1' * 5000}"], "whole number"),
        (["--against", "cluster="], "--against cluster"),
        (["--against", ""], "--against"),
        (["--against", "nothing"], "--against"),
        (["--against", "missing.json"], "there is no such file"),
        (["--against", "missing.yaml"], "a configuration has settings"),
        (["--against", f"{'x' * 5000}.json"], "there is no such file"),
        (["--against", "~nobodyx/plan.json"], "no such user"),
        (["--against", "ep_size=1", "--sweep", "ep_size=1,2"], "--against"),
        (["--sweep", "ep_size=1,2", "--out", "plan.json"], "--out"),
        (["--global-batch", "3"], "Nearest valid"),
        (["--global-batch", "512", "--out", "plan.json"], "one pass"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], said: str, cli: Cli) -> None:
    assert said in cli.refuses([*STUDY, *words])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_plan_is_refused_by_its_name(content: bytes, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    assert "plan.json: is not" in cli.refuses([*STUDY, "--against", str(tmp_path / "plan.json")])


@pytest.mark.parametrize("more", [["--sweep", "ep_size=1,2,7"], ["--against", "ep_size=7"]])
def test_what_is_wrong_is_said_before_the_first_plan(
    more: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*given: object) -> None:
        raise AssertionError(given)

    monkeypatch.setattr("penstock.cli.plan_compare.find_best", searched)
    assert cli.refuses([*STUDY, *more]).startswith("penstock: --ep-size = 7: ")


@pytest.mark.usefixtures("stopped_search")
@pytest.mark.slow
def test_a_stop_ends_all_searches_and_prints_what_they_have(cli: Cli) -> None:
    assert main([*STUDY, "--json", "--sweep", "seq_len=96,160"]) == 130
    rows = json.loads(cli.capsys.readouterr().out)["rows"]
    assert [row["step_s"] > 0 for row in rows] == [True, True]


@pytest.mark.slow
def test_json_with_settings_is_a_configuration(cli: Cli, tmp_path: Path) -> None:
    path, cluster = tmp_path / "run.json", ["--cluster", "1x2xA100", "--budget", "0.0001"]
    path.write_text(json.dumps({"model": {"seq_len": 32}, "moe": {"num_experts": 4}}))
    both = cli.finds(["plan", str(path), *cluster, "--against", str(path)])
    assert both["differing"] == {} and both["a"]["step_s"] == both["b"]["step_s"]
    assert cli.refuses(["plan", "--model", str(path), *cluster]).startswith("penstock: --model = ")
    path.write_text(json.dumps({"hidden_size": 64}))
    assert "model_type" in cli.refuses(["plan", str(path), *cluster])


@pytest.mark.slow
def test_names_are_found_in_any_case(cli: Cli) -> None:
    words = [{STEP[2]: "FlowMoE/GPT2-Tiny"}.get(word, word) for word in STEP]
    shown = cli.finds([*words, "--cluster", "FLOWMOE-Cluster-2"])
    assert words != STEP and (shown["model"], shown["cluster"]) == ("flowmoe/gpt2-tiny", "flowmoe-cluster-2")
    assert model_name("Qwen3-30B-A3B") in open_models()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("deepseek-ai/DeepSeek-V2-Chat", "deepseek-v2"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V2.5", "deepseek-ai/DeepSeek-V2.5"),
        ("./qwen3-30b-a3b", "./qwen3-30b-a3b"),
        ("models/openai/gpt-oss-20b", "models/openai/gpt-oss-20b"),
    ],
)
def test_names_on_the_hub_mean_the_model_that_they_begin_with(text: str, name: str) -> None:
    assert model_name(text) == name


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openai" / "gpt-oss-20b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_name("openai/gpt-oss-20b") == "openai/gpt-oss-20b"


@pytest.mark.slow
def test_where_the_study_has_an_expert_per_node_their_number_is_said(cli: Cli) -> None:
    words = ["plan", "--model", "fsmoe/mixtral-7b-layers", "--layers", "1", "--cluster", "fsmoe-testbed-b"]
    words += ["--budget", "0.0001", "--nodes", "4"]
    (said,) = (note for note in cli.finds(words)["notes"] if "--num-experts" in note)
    assert said.startswith("4 experts")
    assert not any("--num-experts" in note for note in cli.finds([*words, "--num-experts", "8"])["notes"])


def test_a_wrong_rate_names_the_part_of_the_line(cli: Cli) -> None:
    said = cli.refuses([*LINE, "--sweep", "net=fast"])
    assert "net" in said and "fast" in said and "8x400gbit" in said


@pytest.mark.slow
def test_two_plans_tell_what_differs(cli: Cli, tmp_path: Path) -> None:
    both = cli.finds([*STUDY, "--against", "seq_len=512"])
    assert "seq_len" in both["differing"] and both["b"]["step_s"] > both["a"]["step_s"]
    assert any("busy for" in line for line in both["why"])
    path = tmp_path / "plan.json"
    cli.prints([*STUDY, "--out", str(path)])
    same = cli.finds(["plan", str(path), "--against", str(path)])
    assert same["differing"] == {} and same["a"] == same["b"]
    assert same["a"]["tokens_per_s"] == pytest.approx(both["a"]["tokens_per_s"])
    assert "B against A" in cli.prints([*STUDY, "--against", str(path)])


@pytest.mark.parametrize("stage", ["0", "1"])
@pytest.mark.slow
def test_an_update_takes_its_passes(stage: str, cli: Cli) -> None:
    """Without shares a pass is a step without its update; shares are updated and gathered once."""
    words = [*STUDY, "--zero-stage", stage]
    once = cli.finds(words)
    samples = 2 * once["sizes"]["ranks"] // once["sizes"]["tp_size"] * once["sizes"]["batch_per_rank"]
    twice = cli.finds([*words, "--global-batch", str(samples)])
    assert twice["sizes"]["passes"] == 2 and once["sizes"]["passes"] == 1
    assert once["predicted_s"] < twice["predicted_s"] <= 2 * once["predicted_s"]
    assert once["lower_bound_s"] < twice["lower_bound_s"] <= twice["predicted_s"]
    assert all(each["lower_bound_s"] > once["lower_bound_s"] for each in twice["others"])
    assert twice["throughput"]["tokens_per_s"] >= once["throughput"]["tokens_per_s"]
    assert twice["memory_bytes"] > once["memory_bytes"], "sums of the first pass are put aside"
    assert "2 passes" in " ".join(cli.prints([*words, "--global-batch", str(samples)]).split())


@pytest.mark.slow
def test_what_is_busy_is_so_in_the_step_that_is_compared(cli: Cli) -> None:
    samples = 4 * cli.finds(STUDY)["sizes"]["ranks"]
    both = cli.finds([*STUDY, "--global-batch", str(samples), "--against", "seq_len=64"])
    for side in (both["a"], both["b"]):
        assert side["sizes"]["passes"] == 4
        assert 0.4 * side["step_s"] <= max(side["busy_s"].values()) <= side["step_s"]
