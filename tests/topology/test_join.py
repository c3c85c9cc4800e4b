"""Joining: what the environment says about us, and real processes that find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.utils.distributed import get_free_port

from penstock.config import ConfigError
from penstock.device import Cpu, using
from penstock.topology.control import CommunicationError
from penstock.topology.join import ALONE, ProcessInfo, _store, detect, join, leave, rendezvous_env
from penstock.topology.meeting_point import interface_names
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.patience import HANG_S
from tests.support.runs import write_config

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1"}
OTHERS = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "PENSTOCK_LAUNCHED", "SLURM_STEP_NUM_TASKS")
CPU = torch.device("cpu")

WORKER = """
import os, torch, torch.distributed as dist
from penstock.topology.join import detect, join, leave
info = detect(os.environ)
torch.set_num_threads(3)
before = dict(os.environ)
join(info, 200.0, torch.device("cpu"))
others = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]  # what accelerate asks for
assert others == [str(info.rank), "2", str(info.local_rank)], others
total = torch.tensor([info.rank + 1.0])
dist.all_reduce(total)
line = f"{info.launcher} {info.rank} {info.local_rank} {int(total)} {torch.get_num_threads()}\\n"
os.write(1, line.encode())  # one write: lines of two processes must not mix
leave()
leave()
assert torch.get_num_threads() == 3
assert os.environ.get("GLOO_SOCKET_IFNAME") == before.get("GLOO_SOCKET_IFNAME")
"""


LATE = """
import os, time, torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
import torch
from penstock.topology import CommunicationError, Control
from penstock.topology.join import detect, join
info = detect(os.environ)
join(info, 0.75, torch.device("cpu"), start_s=200.0)
time.sleep(1.5 * info.rank)
dist.barrier()  # the program's own has torch's limit
control, store = Control(info.rank, 2), _get_default_store()
with control.waiting_for_files():
    time.sleep(1.5 * info.rank)
    control.barrier("waiting for files")
if info.rank == 1:
    store.wait(["failed"])
else:
    try:
        control.barrier("meeting")
    except CommunicationError as error:
        print(error, flush=True)
    store.set("failed", "")
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_may_take_longer_to_meet_than_for_an_exchange(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(LATE)
    done = run_forked(2, program=str(program))
    assert "rank 0: meeting failed: " in done.stdout and "Timed out waiting 750ms" in done.stdout, done


AGAIN = """
import os, time, torch
from pathlib import Path
from penstock.topology import CommunicationError
from penstock.topology.join import detect, join, leave
info, has_tried = detect(os.environ), Path(__file__).with_name("tried")
if info.rank == 0:
    try:
        join(info, 0.5, torch.device("cpu"))
    except CommunicationError:
        has_tried.touch()
while not has_tried.exists():
    time.sleep(0.01)
join(info, 200.0, torch.device("cpu"))
leave()
"""


@pytest.mark.slow
def test_a_rank_that_has_tried_before_meets_one_that_has_not(tmp_path: Path) -> None:
    program = tmp_path / "again.py"
    program.write_text(AGAIN)
    done = run_forked(2, program=str(program))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing started us, and which is as before when the test ends."""
    for name in (*TORCHRUN, *SLURM, *OTHERS):
        monkeypatch.setenv(name, "")  # so that what join sets is undone, even where nothing was set before
        monkeypatch.delenv(name)
    return monkeypatch


# ---- detect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        ({}, None),
        ({"PENSTOCK_LAUNCHED": "1"}, None),
        (TORCHRUN, ProcessInfo(rank=1, world_size=4, local_rank=0, launcher="torchrun")),
        (
            TORCHRUN | {"PENSTOCK_LAUNCHED": "1"},
            ProcessInfo(rank=1, world_size=4, local_rank=0, launcher="penstock"),
        ),
        (SLURM, ProcessInfo(rank=3, world_size=4, local_rank=1, launcher="slurm")),
        (SLURM | TORCHRUN, ProcessInfo(rank=1, world_size=4, local_rank=0, launcher="torchrun")),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        # A step that is part of a larger job, and the interactive step in which a user types.
        (
            SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"},
            ProcessInfo(rank=3, world_size=4, local_rank=1, launcher="slurm"),
        ),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # A batch script, and a task that srun started inside one.
        (SLURM | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, None),
        (
            SLURM | {"ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"},
            ProcessInfo(rank=3, world_size=4, local_rank=1, launcher="slurm"),
        ),
        # mpirun, whose own daemons may be the step; and a program that it has started alone.
        (SLURM | OPEN_MPI, ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="mpirun")),
        (MPICH, ProcessInfo(rank=1, world_size=2, local_rank=0, launcher="mpirun")),
        (MPICH | TORCHRUN, ProcessInfo(rank=1, world_size=4, local_rank=0, launcher="torchrun")),
        (MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        (PALS, ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="mpirun")),
        # srun on a Cray leaves all of these, srun --mpi=pmi2 a part.
        (
            SLURM | PALS | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            ProcessInfo(rank=3, world_size=4, local_rank=1, launcher="slurm"),
        ),
        (
            SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            ProcessInfo(rank=3, world_size=4, local_rank=1, launcher="slurm"),
        ),
        # salloc without srun describes a job but starts nothing.
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),
    ],
)
def test_who_started_us(environ: dict[str, str], info: ProcessInfo | None) -> None:
    assert detect(environ) == info


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: is not set"),
        ({"WORLD_SIZE": "2"}, "RANK: is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK: is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK: is not set"),
        (TORCHRUN | {"RANK": "one"}, 'RANK = "one": must be a whole number'),
        (TORCHRUN | {"RANK": "-1"}, 'RANK = "-1": must be a whole number'),
        (TORCHRUN | {"RANK": "4"}, r"RANK = 4: must be below WORLD_SIZE \(4\)"),
        (TORCHRUN | {"LOCAL_RANK": "9"}, r"LOCAL_RANK = 9: must be below WORLD_SIZE \(4\)"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1"),
        (SLURM | {"SLURM_NTASKS": "many"}, 'SLURM_NTASKS = "many": must be a whole number'),
        (SLURM | {"SLURM_PROCID": "4"}, r"SLURM_PROCID = 4: must be below SLURM_NTASKS \(4\)"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_LOCALID: is not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID: is not set"),
        ({"PMI_RANK": "1"}, "PMI_SIZE: is not set"),
    ],
)
def test_contradictions_name_the_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        detect(environ)


@given(world=st.integers(1, 4096), data=st.data())
def test_any_consistent_numbers_are_taken(world: int, data: st.DataObject) -> None:
    rank, local = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, world - 1))
    info = detect({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)})
    assert info == ProcessInfo(rank=rank, world_size=world, local_rank=local, launcher="torchrun")


# ---- Slurm's rendezvous ------------------------------------------------------------------------------------


def master(nodelist: str) -> str:
    return rendezvous_env(SLURM | {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": nodelist})["MASTER_ADDR"]


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-008,12],other1", "node003"),
        ("node[12,003-008]", "node12"),
        ("rack[1-2]-node[7,9]", "rack1-node7"),
        ("gpu-[01-04].cluster.local,login", "gpu-01.cluster.local"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    assert master(nodelist) == first


SPANS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 99)), min_size=1, max_size=4)
REPLICAS_OF_ALL = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z]", fullmatch=True)


@pytest.mark.slow
@given(
    prefix=REPLICAS_OF_ALL, spans=SPANS, width=st.integers(1, 4), others=st.lists(REPLICAS_OF_ALL, max_size=3)
)
def test_the_first_host_of_any_list(
    prefix: str, spans: list[tuple[int, int]], width: int, others: list[str]
) -> None:
    """Slurm packs equal prefixes into brackets of padded numbers and ranges."""
    items = [f"{low:0{width}}-{low + more:0{width}}" if more else f"{low:0{width}}" for low, more in spans]
    nodelist = ",".join([f"{prefix}[{','.join(items)}]", *others])
    assert master(nodelist) == f"{prefix}{spans[0][0]:0{width}}"


@pytest.mark.parametrize("nodelist", ["node[1-", "[]", ",", "a]b"])
def test_a_broken_list_names_the_variable(nodelist: str) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_NODELIST = .*: is not a list of hosts"):
        master(nodelist)


def test_what_slurm_tasks_share() -> None:
    environ = SLURM | {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "job[1-2]"}
    found = rendezvous_env(environ)
    assert found == {
        "MASTER_ADDR": "job1",
        "MASTER_PORT": "23456",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }
    assert rendezvous_env(environ | {"SLURM_STEP_NODELIST": "job2"})["MASTER_ADDR"] == "job2"


def test_what_the_user_set_is_kept() -> None:
    found = rendezvous_env(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "5")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SLURM | {"SLURM_JOB_ID": "1"}, "MASTER_ADDR: is not set, and Slurm lists no nodes"),
        (SLURM | {"MASTER_ADDR": "a"}, "SLURM_JOB_ID: is not set"),
        (TORCHRUN, "SLURM_PROCID: this process was not started by srun"),
    ],
)
def test_without_slurms_variables_there_is_no_rendezvous(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        rendezvous_env(environ)


# ---- join --------------------------------------------------------------------------------------------------


def test_alone_needs_no_address_and_all_reduces_with_itself(clean: pytest.MonkeyPatch) -> None:
    del clean
    threads = torch.get_num_threads()
    join(ALONE, 10.0, CPU)
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (total.item(), dist.get_world_size(), torch.get_num_threads()) == (1.0, 1, threads)
    finally:
        leave()
    assert not dist.is_initialized()


class WithNccl(Cpu):
    """A device whose groups would need NCCL, which this machine lacks."""

    backend = "cpu:gloo,cuda:nccl"


def test_where_tensors_are_staged_nccl_is_left_out(clean: pytest.MonkeyPatch) -> None:
    del clean
    with using(WithNccl()):
        join(ALONE, 10.0, CPU, "staged")
    assert "nccl" not in str(dist.get_backend_config())
    leave(aborts=True)
    assert not dist.is_initialized()


def test_after_a_failure_this_process_may_join_again(
    clean: pytest.MonkeyPatch,
) -> None:
    del clean
    join(ALONE, 10.0, CPU)
    dist.new_group([0])
    leave(aborts=True)
    leave(aborts=True)
    assert not dist.is_initialized()
    join(ALONE, 10.0, CPU)
    total = torch.ones(1)
    dist.all_reduce(total)
    leave()
    assert total.item() == 1.0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER_PORT": "1"}, "MASTER_ADDR: is not set"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT: is not set"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT = 70000: must be between"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, 'MASTER_PORT = "x": must be a whole number'),
    ],
)
def test_joining_needs_an_address(clean: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    for name, value in variables.items():
        clean.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{message}"):
        join(ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="torchrun"), 1.0, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_when_the_others_do_not_come(clean: pytest.MonkeyPatch, rank: int) -> None:
    port = get_free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        clean.setenv(name, value)
    info = ProcessInfo(rank=rank, world_size=2, local_rank=rank, launcher="torchrun")
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 2 could not .* 127\.0\.0\.1:{port}, within 1 s"):
        join(info, 1.0, CPU)
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "interface"),
    [("127.0.0.1", "lo"), ("127.1.2.3", "lo"), ("localhost", "lo"), ("::1", "lo"), ("192.0.2.1", None)],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name elsewhere")
def test_loopback_traffic_needs_no_host_name(
    clean: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    clean.setenv("MASTER_ADDR", address)
    clean.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError, match="could not join"):
        join(ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="torchrun"), 0.01, CPU)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_an_interface_the_user_chose_is_kept(clean: pytest.MonkeyPatch) -> None:
    there = ",".join(interface_names()[-2:])
    clean.setenv("GLOO_SOCKET_IFNAME", there)
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    clean.setenv("MASTER_PORT", str(get_free_port()))
    with pytest.raises(CommunicationError, match="could not join"):
        join(ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="torchrun"), 0.01, CPU)
    assert os.environ["GLOO_SOCKET_IFNAME"] == there


def test_an_interface_that_is_not_there_is_refused(clean: pytest.MonkeyPatch) -> None:
    """With the variable, its value, and the interfaces that there are."""
    clean.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(ConfigError) as caught:
        join(ALONE, 1.0, CPU)
    assert (caught.value.key, caught.value.value) == ("GLOO_SOCKET_IFNAME", "nothing0")
    assert all(name in caught.value.why for name in interface_names())


def test_the_command_refuses_an_interface_that_is_not_there(
    clean: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    clean.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert 'GLOO_SOCKET_IFNAME = "nothing0"' in cli.refuses(["train", write_config(tmp_path)])


# ---- real processes ----------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path, clean: pytest.MonkeyPatch) -> Path:
    """A script that joins, adds up ranks, and prints what it saw; processes it starts inherit `clean`."""
    del clean
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.mark.slow
def test_two_processes_of_torchrun(worker: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(worker)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 0 3 1", "torchrun 1 1 3 1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "shared", "rank", "place"),
    [
        ("slurm", {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}, "SLURM_PROCID", "SLURM_LOCALID"),
        ("mpirun", {"PMI_SIZE": "2", "MASTER_ADDR": "localhost"}, "PMI_RANK", "MPI_LOCALRANKID"),
    ],
)
def test_two_tasks_of_others(
    worker: Path, launcher: str, shared: dict[str, str], rank: str, place: str
) -> None:
    shared = {**shared, "MASTER_PORT": str(get_free_port())}
    tasks = [shared | {rank: str(number), place: str(number)} for number in range(2)]
    done = run_forked(2, program=str(worker), environs=tasks)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{launcher} 0 0 3 1", f"{launcher} 1 1 3 1"]


def test_a_group_does_not_read_what_one_before_has_left(clean: pytest.MonkeyPatch) -> None:
    """torchrun's store lives as long as the job: addresses in it may be of a session that has ended."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clean.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    info = ProcessInfo(rank=0, world_size=1, local_rank=0, launcher="torchrun")  # waits for no other rank
    first, second = (_store(info, "127.0.0.1", server.port, HANG_S) for _ in range(2))
    first.set("address", "old")
    assert first.check(["address"]) and not second.check(["address"])
