"""Ranks with different settings: refused everywhere by the same words, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.config import ConfigError, load
from penstock.topology import Control
from penstock.train.config import RunConfig, resolved_for_all
from tests.support.forked import run_forked
from tests.support.ranks import Pools
from tests.support.runs import write_config

pytestmark = pytest.mark.slow

PRESET = "model.preset=flowmoe/gpt2-tiny"


def compare(rank: int, overrides: list[list[str]]) -> str | None:
    """What a rank is told."""
    try:
        resolved_for_all(load(RunConfig, None, overrides[rank]), Control(rank, len(overrides)))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (["optimizer.lr=0.01"], ["optimizer.lr=0.001"], "optimizer.lr = 0.01: .*on rank 1 it is 0.001"),
        (["train.steps=4"], [], "train.steps = 4: .*on rank 1 it is 200"),
        ([], ["train.eval_every=7"], "train.eval_every = 100: .*on rank 1 it is 7"),
        ([], ["train.checkpoint_every=3", "model.dropout=0.5"], r"model.dropout = 0.0: .*0\.5 \(also diff"),
        (["model.num_layers=4", PRESET], [PRESET], "model.num_layers = 4: .*on rank 1 it is 12"),
        (["data.mixture.a=1", "data.mixture.b=2"], ["data.mixture.c=1", "data.mixture.d=1"], r"\[1, 2\]"),
    ],
)
def test_ranks_that_differ_are_told_the_setting_and_both_values(
    ranks: Pools, first: list[str], second: list[str], says: str
) -> None:
    told = ranks(2).run(compare, [first, second])
    assert told[0] == told[1] and told[0] is not None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(told[0])


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (["data.path=/a", "output.dir=x", "data.cache=y", "parallel.send_buffer_bytes=0"], []),
        (["data.mixture./a/x=1"], ["data.mixture./b/x=1"]),
    ],
)
def test_places_on_a_machine_may_differ(ranks: Pools, own: list[str], other: list[str]) -> None:
    assert ranks(2).run(compare, [own, other]) == [None, None]


def enter(rank: int, rates: list[float]) -> str | None:
    config = load(RunConfig, None, ["model.num_layers=1", f"optimizer.lr={rates[rank]}"])
    try:
        with penstock.session(config):
            return None
    except ConfigError as error:
        return error.key


def test_a_session_refuses_different_settings(ranks: Pools) -> None:
    assert ranks(2).run(enter, [0.01, 0.001]) == ["optimizer.lr"] * 2


def test_the_command_says_it_once(tmp_path: Path) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(
        "import os, sys\n"
        "from penstock.cli.main import main\n"
        "sys.argv.append('optimizer.lr=0.00' + os.environ['RANK'] + '5')\n"
        "sys.exit(main())\n"
    )
    done = run_forked(2, "train", write_config(tmp_path), "train.steps=2", program=str(program))
    assert done.returncode == 2
    assert done.stderr.count("optimizer.lr = 0.0005: is so on rank 0, and on rank 1 it is 0.0015") == 1
    assert done.stderr.count("penstock: ") == 1
