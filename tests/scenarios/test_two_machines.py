"""torchrun starts one run on two machines, which train together as one would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.lab.emulate import Cluster, EmulateConfig
from tests.scenarios.support import DONE, PATIENT, Trained, check_losses, config_in, on_ranks, train
from tests.support.launched import Started, start_torchrun
from tests.support.patience import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

STEPS = ("train.steps=10", "moe.dispatch=flat", "output.loads=true", PATIENT)


def torchrun(cluster: Cluster, node: int, folder: Path, *words: object) -> Started:
    """Start the command on a machine, as docs/many-machines.md shows it."""
    first = cluster.address(0)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400", "--rdzv-id", "job-1")
    here = ("--local-addr", cluster.address(node), "--rdzv-conf", f"is_host={int(node == 0)}")
    size = ("--nnodes", "2", "--nproc-per-node", "2")
    command = (*size, *meeting, *here, "-m", "penstock", *map(str, words))
    files = {"stdout": folder / f"out{node}", "stderr": folder / f"errors{node}"}
    return start_torchrun(cluster, node, *command, **files)


def test_two_machines_train_as_one(tmp_path: Path) -> None:
    config, folder = config_in(tmp_path), tmp_path / "two"
    words = ("train", config, "--json", *on_ranks(4), *STEPS, f"output.dir={folder}")
    with Cluster(EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=1e9)) as cluster:
        nodes = [torchrun(cluster, node, tmp_path, *words) for node in range(2)]
        codes = [node.wait(timeout=HANG_S) for node in nodes]
    outs, errors = (
        [(tmp_path / f"{name}{node}").read_text() for node in (0, 1)] for name in ("out", "errors")
    )
    assert codes == [DONE, DONE], "\n".join(errors)
    two = Trained(folder, json.loads(outs[0]), errors[0])
    assert outs[1] == "", "the first rank alone prints"
    assert two.found["processes"] == 4
    assert all("rows_crossing_nodes" in line for line in two.metrics), "each is a node of its own"
    one = train(tmp_path, 1, *STEPS, name="one")
    check_losses(two.losses, one.losses, 1e-6)
