"""torchrun starts one run on two machines, which train together as one would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.support import DONE, Trained, check_losses, config_in, on_ranks, train
from tests.support.patience import HANG_S
from tests.support.runs import command, run, start_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

STEPS = ("train.steps=10",)


@pytest.fixture
def machines(namespaces: None) -> Iterator[tuple[str, list[str]]]:
    """Two emulated ones: the name of their cluster, and the address of each."""
    del namespaces
    up = run("emulate", "up", "2x1", "--inter-rate", "1gbit", "--json")
    assert up.returncode == DONE, up.stderr
    found = json.loads(up.stdout)
    yield found["id"], [each["address"] for each in found["ranks"]]
    assert run("emulate", "down", found["id"]).returncode == DONE


def torchrun(machines: tuple[str, list[str]], node: int, *words: object) -> list[str]:
    """Return the command on a machine, as docs/many-machines.md shows it."""
    cluster, addresses = machines
    python = command()[0]
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:29400", "--rdzv-id", "job-1")
    here = ("--local-addr", addresses[node], "--rdzv-conf", f"is_host={int(node == 0)}")
    size = ("--nnodes", "2", "--nproc-per-node", "2")
    inside = command("emulate", "exec", cluster, str(node), "--", python, "-m", "torch.distributed.run")
    return [*inside, *size, *meeting, *here, "-m", "penstock", *map(str, words)]


def test_two_machines_train_as_one(machines: tuple[str, list[str]], tmp_path: Path) -> None:
    config, folder = config_in(tmp_path), tmp_path / "two"
    words = ("train", config, "--json", *on_ranks(4), *STEPS, f"output.dir={folder}")
    outs, errors = ([tmp_path / f"{name}{node}" for node in range(2)] for name in ("out", "errors"))
    nodes = [
        start_command(torchrun(machines, node, *words), stdout=outs[node], stderr=errors[node])
        for node in range(2)
    ]
    codes = [node.wait(timeout=HANG_S) for node in nodes]
    assert codes == [DONE, DONE], "\n".join(file.read_text() for file in errors)
    two = Trained(folder, json.loads(outs[0].read_text()), errors[0].read_text())
    assert outs[1].read_text() == "", "the first rank alone prints"
    assert two.found["processes"] == 4
    assert all("rows_crossing_nodes" in line for line in two.metrics), "each is a node of its own"
    one = train(tmp_path, 1, *STEPS, name="one")
    check_losses(two.losses, one.losses, 1e-6)
