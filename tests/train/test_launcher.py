"""The launcher, with real processes: how ranks end, who is stopped, and that nobody is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.stops import SIGNALS
from penstock.train import stopping
from penstock.train.launcher import Failure, LaunchOutcome, launch
from tests.support.launched import alone, started
from tests.support.patience import HANG_S, wait_for

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the parent-death signal")

pytestmark = pytest.mark.slow

ENDLESS_S = 10 * HANG_S
"""A grace that no test lives to see the end of."""


def be_parent(
    folder: Path, same_request_s: float, terminal: str | None, ignored: signal.Signals | None
) -> None:
    """Launch two ranks, in a process of its own that leads a session, and leave in a file how they ended."""
    alone(folder / "errors")
    if terminal is not None:
        os.dup2(os.open(terminal, os.O_RDWR), 0)  # the first one controls a session
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    vars(stopping)["SAME_REQUEST_S"] = same_request_s
    child = str(folder / "child.py")
    outcome = launch([sys.executable, child, str(folder)], 2, grace_s=ENDLESS_S)
    by = outcome.interrupted_by and outcome.interrupted_by.name
    (folder / "outcome").write_text(f"{outcome.exit_codes} {by} {outcome.first_failure}")
    sys.exit(outcome.exit_code)


# A rank that says it is ready by leaving its process id in a file, and then does nothing.
SLEEPER = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def be_ready():
    (here / f"half{rank}").write_text(str(os.getpid()))
    (here / f"half{rank}").rename(here / f"pid{rank}")
    time.sleep(600)
"""
PLAIN = SLEEPER + "be_ready()"

# One that notes every signal, saves what it has for a moment or as long as a file is there, and exits with 0.
SAVER = (
    SLEEPER
    + """
caught = []
def save(number, frame):
    caught.append(signal.Signals(number).name)
    (here / f"caught{rank}").write_text(" ".join(caught))
    if len(caught) == 1:
        while (here / "saving").exists():
            time.sleep(0.01)
        time.sleep(0.4)  # a signal that should not come is caught as well
        sys.exit(0)
for number in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(signal.Signals[number], save)
be_ready()
"""
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., LaunchOutcome]:
    """Launches a script from this process, with `tmp_path` as its only argument."""

    def launch_script(
        text: str, processes: int = 2, grace_s: float = ENDLESS_S, *, meets: bool = False
    ) -> LaunchOutcome:
        path = tmp_path / "script.py"
        path.write_text(text)
        return launch([sys.executable, str(path), str(tmp_path)], processes, grace_s=grace_s, meets=meets)

    return launch_script


Run = Callable[..., LaunchOutcome]


def alive(pid: int) -> bool:
    """Whether the process runs; a dead one whose parent has not noticed yet does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class Parent:
    """A running launcher with two ranks that are ready."""

    def __init__(
        self,
        folder: Path,
        child: str,
        terminal: str | None = None,
        ignored: signal.Signals | None = None,
        same_request_s: float = ENDLESS_S,
    ) -> None:
        (folder / "child.py").write_text(child)
        self._outcome = folder / "outcome"
        self._process = started(be_parent, folder, same_request_s, terminal, ignored)
        self.pid = self._process.pid
        self.caught = [folder / f"caught{rank}" for rank in range(2)]
        files = [folder / f"pid{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() for file in files))
        self.pids = [int(file.read_text()) for file in files]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Its exit code and how the ranks have ended, once they are gone too."""
        code = self._process.wait(timeout=HANG_S)
        wait_for(lambda: not any(map(alive, self.pids)))
        return code, self._outcome.read_text() if self._outcome.exists() else ""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: the end on which one types, and the end of the programs."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


# ---- how ranks end -----------------------------------------------------------------------------------------


def test_ranks_know_who_they_are(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PENSTOCK_LAUNCHED")
    outcome = run(
        "import os, pathlib, sys\n"
        f"said = ' '.join(os.environ[name] for name in {names})\n"
        "(pathlib.Path(sys.argv[1]) / f'rank{os.environ[\"RANK\"]}').write_text(said)\n",
        3,
    )
    assert outcome.exit_codes == (0, 0, 0)
    assert (outcome.exit_code, outcome.first_failure, outcome.stopped) == (0, None, frozenset())
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert said == [f"{rank} {rank} 3 3 1 {os.getpid()}" for rank in range(3)]


def test_arguments_reach_ranks_as_they_are(tmp_path: Path) -> None:
    words = ["$$", "${local_rank}", "$local_rank", "a b", "X=1", ""]
    script = "import json, os, sys; open(os.environ['RANK'], 'w').write(json.dumps(sys.argv[1:]))"
    with contextlib.chdir(tmp_path):
        assert launch([sys.executable, "-c", script, *words], 2, grace_s=1.0).exit_code == 0
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [words] * 2


def test_a_number_of_threads_that_is_set_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run("import os; assert os.environ['OMP_NUM_THREADS'] == '7'", 1).exit_code == 0


@pytest.mark.parametrize(("code", "meets"), [(3, False), (0, True)])
def test_an_exit_code_is_the_first_failure_and_the_others_are_stopped(
    run: Run, code: int, meets: bool
) -> None:
    """So is a zero where the others wait in vain to meet the rank."""
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': sys.exit({code})\ntime.sleep(600)"
    outcome = run(script, 3, 0.3, meets=meets)
    assert outcome.exit_codes == (-signal.SIGTERM, code, -signal.SIGTERM)
    assert outcome.first_failure == Failure(rank=1, returncode=code)
    assert (outcome.stopped, outcome.exit_code) == (frozenset({0, 2}), 1)


def test_a_killed_rank_is_named_with_its_signal(run: Run) -> None:
    text = "import os, time\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    outcome = run(text, 3, 0.3)
    assert outcome.first_failure is not None
    assert outcome.first_failure.describe() == "rank 2 was killed by signal 9 (SIGKILL)"
    assert outcome.exit_codes == (-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)


def test_the_others_may_end_by_themselves_within_the_grace(run: Run) -> None:
    outcome = run(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '0':\n"
        "    (here / 'half').write_text(str(os.getpid()))\n"
        "    (here / 'half').rename(here / 'first')\n"
        "    sys.exit(2)\n"
        "while not (here / 'first').exists(): time.sleep(0.01)\n"
        "first = pathlib.Path('/proc', (here / 'first').read_text())\n"
        "while first.exists(): time.sleep(0.01)\n"  # until the launcher has looked
        "sys.exit(4)"
    )
    assert (outcome.exit_codes, outcome.stopped) == ((2, 4), frozenset())
    assert outcome.first_failure == Failure(rank=0, returncode=2)
    assert outcome.exit_code == 1


def test_a_rank_that_ignores_sigterm_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.launcher.KILL_AFTER_TERM_S", 0.2)
    outcome = run(
        "import os, pathlib, signal, sys, time\n"
        "ready = pathlib.Path(sys.argv[1]) / 'ready'\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not ready.exists(): time.sleep(0.01)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ready.touch()\n"
        "time.sleep(600)",
        grace_s=0.1,
    )
    assert outcome.exit_codes == (-signal.SIGKILL, 1)


def test_of_two_that_end_at_once_the_killed_one_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death is what the other one failed of; the launcher finds both dead when it looks."""

    def both_end(seconds: float) -> None:
        del seconds
        (tmp_path / "go").touch()
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() for file in files))
        wait_for(lambda: not any(alive(int(file.read_text())) for file in files))

    clock = SimpleNamespace(**{**vars(time), "sleep": both_end})
    monkeypatch.setattr("torch.distributed.elastic.agent.server.api.time", clock)
    note = "echo $$ > half$RANK && mv half$RANK pid$RANK; while [ ! -e go ]; do sleep 0.01; done"
    ends = '[ "$RANK" = 0 ] && exit 1; kill -9 $$'
    outcome = launch(["sh", "-c", f"cd {tmp_path} && {note}; {ends}"], 2, grace_s=ENDLESS_S)
    assert outcome.exit_codes == (1, -9)
    assert outcome.first_failure == Failure(rank=1, returncode=-9)


HELD = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


@pytest.mark.parametrize("hears", [False, True])
def test_signals_wait_for_a_command_that_hears_them(hears: bool) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    outcome = launch([sys.executable, "-c", HELD], 1, grace_s=1.0, hears=hears)
    assert outcome.exit_codes == (len(before) + (len(SIGNALS) if hears else 0),)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_end_is_told_while_signals_are_still_noted() -> None:
    told: list[LaunchOutcome] = []

    def ended(outcome: LaunchOutcome) -> None:
        signal.raise_signal(signal.SIGINT)
        told.append(outcome)

    assert told == [] and launch(["true"], 1, grace_s=1.0, ended=ended) == told[0]


@pytest.mark.parametrize("processes", [0, -1])
def test_at_least_one_process(processes: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        launch(["true"], processes, grace_s=1.0)


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        launch(["no-such-command"], 2, grace_s=1.0)


def test_another_thread_may_launch() -> None:
    outcomes: list[LaunchOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(launch(["true"], 2, grace_s=1.0)))
    thread.start()
    thread.join(timeout=HANG_S)
    assert [outcome.exit_code for outcome in outcomes] == [0]


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (Failure(rank=0, returncode=3), "rank 0 exited with code 3"),
        (Failure(rank=1, returncode=143), "rank 1 was stopped by SIGTERM"),
        (Failure(rank=2, returncode=-11), "rank 2 was killed by signal 11 (SIGSEGV)"),
        (Failure(rank=2, returncode=-40), "rank 2 was killed by signal 40 (a real-time signal)"),
    ],
)
def test_a_failure_describes_itself(failure: Failure, text: str) -> None:
    assert failure.describe() == text


@pytest.mark.parametrize(
    ("codes", "cause", "text"),
    [
        ((3, 1), (None, ""), "rank 1 exited with code 1"),
        ((3, 1), (1, "task a: no"), "rank 1 exited with code 1: task a: no"),
        ((3, 1), (0, "task a: no"), "rank 0 exited with code 3: task a: no"),
        ((3, 1), (None, "rank 0 waited in task a"), "rank 1 exited with code 1; rank 0 waited in task a"),
        ((0, 1), (None, "rank 1 waited in task a"), "rank 0 exited with code 0; rank 1 waited in task a"),
        ((3, -9), (1, "task a: no"), "rank 1 was killed by signal 9 (SIGKILL): task a: no"),
        ((3, -9), (0, "task a: no"), "rank 1 was killed by signal 9 (SIGKILL)"),
        ((0, -9), (None, "rank 0 was b"), "rank 1 was killed by signal 9 (SIGKILL); rank 0 was b"),
    ],
)
def test_the_last_line_has_the_cause(
    codes: tuple[int, int], cause: tuple[int | None, str], text: str
) -> None:
    first, known = Failure(rank=1, returncode=codes[1]), {"stopped": frozenset[int](), "interrupted_by": None}
    outcome = LaunchOutcome(exit_codes=codes, first_failure=first, cause=cause, **known)  # type: ignore[arg-type]
    assert outcome.describe() == text


def outcome_of(*codes: int, stopped: tuple[int, ...] = (), by: signal.Signals | None = None) -> LaunchOutcome:
    return LaunchOutcome(exit_codes=codes, first_failure=None, stopped=frozenset(stopped), interrupted_by=by)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (outcome_of(0, 0), 0),
        (outcome_of(0, 1), 1),
        (outcome_of(2, 2), 2),
        (outcome_of(2, 1), 1),
        (outcome_of(2, -15, stopped=(1,)), 2),
        (outcome_of(-9, 0), 1),
        (outcome_of(0, 0, by=signal.SIGINT), 0),
        (outcome_of(-2, -2, by=signal.SIGINT), 130),
        (outcome_of(130, 130, by=signal.SIGINT), 130),
        (outcome_of(1, 130, by=signal.SIGINT), 1),
        (outcome_of(-15, 0, stopped=(0,), by=signal.SIGTERM), 143),
    ],
)
def test_the_exit_code_of_a_launch(outcome: LaunchOutcome, code: int) -> None:
    assert outcome.exit_code == code


@pytest.mark.parametrize(
    ("codes", "code"), [((143, -15), 143), ((143, 0), 143), ((143, 1), 1), ((1, 143), 1)]
)
def test_a_signal_to_one_rank_is_the_exit_code_unless_a_rank_failed(
    codes: tuple[int, int], code: int
) -> None:
    first = Failure(rank=0, returncode=codes[0])
    assert replace(outcome_of(*codes), first_failure=first).exit_code == code


# ---- the store ---------------------------------------------------------------------------------------------


@linux_only
def test_the_store_is_reachable_from_this_machine_only(run: Run, tmp_path: Path) -> None:
    run(
        "import os, pathlib, sys\n"
        "port = format(int(os.environ['MASTER_PORT']), '04X')\n"
        "tables = [pathlib.Path('/proc/net', name).read_text() for name in ('tcp', 'tcp6')]\n"
        "sockets = [row.split() for table in tables for row in table.splitlines()[1:]]\n"
        "addresses = [at for _, at, _, state, *_ in sockets if state == '0A' and at.endswith(':' + port)]\n"
        "(pathlib.Path(sys.argv[1]) / 'listening').write_text(' '.join(addresses))\n",
        1,
    )
    assert (tmp_path / "listening").read_text().startswith("0100007F:")
    assert len((tmp_path / "listening").read_text().split()) == 1


# ---- interruption ------------------------------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize("number", SIGNALS)
def test_ranks_may_save_and_end_well(tmp_path: Path, number: signal.Signals) -> None:
    parent = Parent(tmp_path, SAVER)
    parent.send(number)
    assert parent.end() == (0, f"(0, 0) {number.name} None")
    assert [file.read_text() for file in parent.caught] == [number.name] * 2


@linux_only
def test_what_nohup_ignores_ends_nothing(tmp_path: Path) -> None:
    parent = Parent(tmp_path, PLAIN, ignored=signal.SIGHUP)
    for pid in (parent.pid, *parent.pids):
        os.kill(pid, signal.SIGHUP)
    parent.send(signal.SIGTERM)
    assert parent.end() == (143, "(-15, -15) SIGTERM None")


@linux_only
def test_ctrl_c_at_a_terminal_reaches_each_rank_once(tmp_path: Path, terminal: tuple[int, int]) -> None:
    keyboard, screen = terminal
    parent = Parent(tmp_path, SAVER, terminal=os.ttyname(screen))
    os.write(keyboard, b"\x03")
    assert parent.end() == (0, "(0, 0) SIGINT None")
    assert [file.read_text() for file in parent.caught] == ["SIGINT", "SIGINT"]


@linux_only
def test_a_second_interruption_ends_the_grace(tmp_path: Path) -> None:
    notes = "signal.signal(signal.SIGINT, lambda *_: (here / f'caught{rank}').touch())\nbe_ready()"
    parent = Parent(tmp_path, SLEEPER + notes, same_request_s=0.0)
    parent.send(signal.SIGINT)
    wait_for(lambda: all(file.exists() for file in parent.caught), "the ranks' part of it")
    parent.send(signal.SIGINT)
    assert parent.end() == (130, "(-15, -15) SIGINT None")


@linux_only
@pytest.mark.parametrize(
    ("grace_s", "first", "second", "codes"),
    [
        (0.1, "time.sleep(0.6)", "time.sleep(0.4)", (0, 0)),
        (0.1, "sys.exit(1)", "time.sleep(600)", (1, -signal.SIGTERM)),
        (ENDLESS_S, "sys.exit(1)", "os.kill(os.getpid(), signal.SIGSTOP)", (1, -signal.SIGKILL)),
    ],
    ids=["both save for longer than the grace", "one fails", "one fails and one is stopped"],
)
def test_after_a_stop_the_grace_begins_with_a_failure(
    tmp_path: Path, grace_s: float, first: str, second: str, codes: tuple[int, int]
) -> None:
    ends = f"def end(*_):\n    {first} if rank == '0' else {second}\n    sys.exit(0)\n"
    (tmp_path / "child.py").write_text(f"{SLEEPER}{ends}signal.signal(signal.SIGINT, end)\nbe_ready()")
    files = [tmp_path / f"pid{rank}" for rank in range(2)]

    def interrupt() -> None:
        wait_for(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = launch([sys.executable, str(tmp_path / "child.py"), str(tmp_path)], 2, grace_s=grace_s)
    thread.join()
    assert (outcome.exit_codes, outcome.interrupted_by) == (codes, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@linux_only
def test_a_request_that_arrives_twice_is_one(tmp_path: Path, number: signal.Signals) -> None:
    """As from timeout(1), which signals its child and then the child's whole group: ranks may still save."""
    parent = Parent(tmp_path, SAVER)
    (tmp_path / "saving").touch()
    parent.send(number)
    wait_for(lambda: all(file.exists() for file in parent.caught), "the ranks' part of it")
    parent.send(number)
    (tmp_path / "saving").unlink()
    assert parent.end() == (0, f"(0, 0) {number.name} None")
    assert [file.read_text() for file in parent.caught] == [number.name, number.name]


@linux_only
def test_killing_the_parent_takes_the_ranks_with_it(tmp_path: Path) -> None:
    parent = Parent(tmp_path, SLEEPER + "from penstock.stops import STOPS; STOPS.hear(); be_ready()")
    parent.send(signal.SIGKILL)
    assert parent.end() == (-9, "")
