"""What control groups allow, by both versions: in trees as the kernel shows them, and in a real group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from penstock.topology.local import Places, cpu_limit, free_memory_bytes, limit_threads, memory_limit
from tests.support.patience import HANG_S
from tests.support.ranks import forking

A = TypeVar("A")
T = TypeVar("T")

REAL = Path("/sys/fs/cgroup/cpu/penstock-test"), Path("/sys/fs/cgroup/penstock-test")
"""A group of version 1, and one of version 2."""

V2 = "31 23 0:28 {top} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup rw,nsdelegate"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
HYBRID = "42 31 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def tree(root: Path, own: list[str], mounts: list[str], files: dict[str, str]) -> Path:
    """A file system in which a process has these lines in /proc, and its groups these files."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("".join(f"{line}\n" for line in own))
    disk = "22 1 8:1 / / rw - ext4 /dev/sda1 rw"
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in [disk, *mounts]))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_version_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    files = {
        "job/cpu.max": "250000 100000",
        "job/step/cpu.max": "max 100000",
        "job/memory.max": "8589934592",
        "job/step/memory.max": "4294967296",
        "other/cpu.max": "10000 100000",
    }
    root = tree(tmp_path, ["0::/job/step"], [V2.format(top="/")], files)
    assert cpu_limit(root) == 2.5
    assert memory_limit(root) == 4 << 30


def test_version_1_has_a_hierarchy_for_every_controller(tmp_path: Path) -> None:
    mounts = [V1.format(top="/docker/ab", name="cpu,cpuacct"), V1.format(top="/", name="memory"), HYBRID]
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/cpu.cfs_period_us": "50000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/docker/ab/memory.limit_in_bytes": "1073741824",
    }
    own = ["4:cpu,cpuacct:/docker/ab", "3:memory:/docker/ab", "0::/"]
    root = tree(tmp_path, own, mounts, files)
    assert cpu_limit(root) == 3.0
    assert memory_limit(root) == 1 << 30


def counts(**mib: int) -> str:
    """Lines of a memory.stat."""
    return "\n".join(f"{name} {size << 20}" for name, size in mib.items())


V2_FREE = {
    "memory.stat": counts(anon=1),  # the topmost group has no limit and no use, as the kernel shows it
    "pod/memory.max": f"{64 << 30}",
    "pod/memory.current": f"{60 << 30}",  # a sidecar's, too
    "pod/memory.stat": counts(
        anon=40 << 10, active_file=8 << 10, inactive_file=1 << 10, slab_reclaimable=1024
    ),
    "pod/run/memory.max": f"{32 << 30}",
    "pod/run/memory.current": f"{1 << 30}",
}
V1_FREE = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": f"{99 << 30}",
    "memory/pod/memory.limit_in_bytes": f"{4 << 30}",
    "memory/pod/memory.usage_in_bytes": f"{3 << 30}",
    "memory/pod/memory.stat": counts(active_file=0, total_active_file=512, inactive_file=0),
}
V1_FULL = V1_FREE | {"memory/pod/memory.usage_in_bytes": f"{5 << 30}"}


@pytest.mark.parametrize(
    ("own", "mount", "files", "free_mib"),
    [
        ("0::/pod/run", V2.format(top="/"), V2_FREE, 14 << 10),
        ("0::/pod/run", V2.format(top="/"), {}, 100 << 10),
        ("3:memory:/pod", V1.format(top="/", name="memory"), V1_FREE, 1536),
        ("3:memory:/pod", V1.format(top="/", name="memory"), V1_FULL, 0),
    ],
)
def test_free_is_what_a_group_does_not_hold_yet(
    tmp_path: Path, own: str, mount: str, files: dict[str, str], free_mib: int
) -> None:
    root = tree(tmp_path, [own], [mount], files)
    (root / "proc/meminfo").write_text(f"MemTotal: {200 << 20} kB\nMemAvailable: {100 << 20} kB\n")
    assert free_memory_bytes(root) == free_mib << 20


@pytest.mark.parametrize(
    ("own", "mounts", "files"),
    [
        ([], [], {}),  # no Linux
        (["0::/"], [V2.format(top="/")], {"cpu.max": "max 100000", "memory.max": "max"}),
        (["2:cpu:/"], [V1.format(top="/", name="cpu")], {"cpu/cpu.cfs_quota_us": "-1"}),
        (["0::/"], [V2.format(top="/")], {}),  # the controller is not enabled
    ],
)
def test_no_limit_is_none(tmp_path: Path, own: list[str], mounts: list[str], files: dict[str, str]) -> None:
    if "cpu/cpu.cfs_quota_us" in files:
        files |= {"cpu/cpu.cfs_period_us": "100000"}
    root = tree(tmp_path, own, mounts, files)
    assert cpu_limit(root) is None and memory_limit(root) is None


def test_a_group_that_is_not_mounted_here_is_read_where_the_mount_is(tmp_path: Path) -> None:
    root = tree(tmp_path, ["0::/kubepods/pod1"], [V2.format(top="/lxc")], {"cpu.max": "100000 100000"})
    assert cpu_limit(root) == 1.0


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group in which processes have one and a half processors' worth of time."""
    for folder in REAL:
        with suppress(OSError):
            folder.mkdir()
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_quota_us").write_text("150000")
            else:
                (folder / "cpu.max").write_text("150000 100000")
            yield folder
            folder.rmdir()
            return
    pytest.skip("needs root and control groups that can be written")


@pytest.mark.slow
def test_places_of_a_process_in_a_real_group(real_group: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    why = f"(there are {cores}, and a limit of the container or job allows no more time)"
    assert forked(in_group, real_group) == (f"2 processes on 1 processor core {why}, one thread each", 1)


def in_group(group: Path) -> tuple[str, int]:
    (group / "cgroup.procs").write_text("0")
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(8)
    limit_threads()
    return Places.here().describe(2), torch.get_num_threads()


@pytest.mark.slow
def test_places_of_a_process_that_is_bound_to_one_core() -> None:
    assert forked(bound_to, min(os.sched_getaffinity(0))) == 1


def bound_to(core: int) -> int:
    os.sched_setaffinity(0, {core})
    return Places.here().number


def forked(work: Callable[[A], T], argument: A) -> T:
    """What `work` returns in a process of its own."""
    theirs, ours = Pipe()
    child = forking().Process(target=tell, args=(theirs, work, argument), daemon=True)
    child.start()
    found: T = ours.recv() if ours.poll(HANG_S) else pytest.fail("the process said nothing")
    child.join(HANG_S)
    return found


def tell(pipe: Connection, work: Callable[[A], T], argument: A) -> None:
    pipe.send(work(argument))
