"""Real ranks for tests: processes that have joined over Gloo and run functions when asked."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from tests.support.patience import HANG_S
from tests.support.searching import short_search

TIMEOUT_S = HANG_S
MOST_THREADS = 30
PRELOADED = [
    "torch._dynamo",
    "ot.lp.emd_wrap",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest",
    "hypothesis.strategies",
    "penstock.lab.commands.bench",
    "penstock.cli.profile",
    "penstock.cli.train_rank",
    "tests.support.ranks",
    "tests.support.parity",
    "tests.support.adapted",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
]
"""What every rank has imported from the start: a server does it once, and ranks are forked off it.

Beside what they run that is what test files import, since ranks find functions there.
"""


@dataclass
class RankFailed:
    """What a rank sends instead of a result."""

    text: str


class _Pickler(pickle.Pickler):
    """Tensors as the bytes of arrays: multiprocessing would open a file and a connection for each."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is torch.Tensor and found.device.type == "cpu" and found.dtype in EXACT_IN_NUMPY:
            return _tensor, (found.detach().numpy(), found.requires_grad)
        return NotImplemented


EXACT_IN_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}


def _tensor(array: Any, requires_grad: bool) -> torch.Tensor:
    return torch.from_numpy(array).requires_grad_(requires_grad)


def send(pipe: Connection, message: Any) -> None:
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(message)
    pipe.send_bytes(written.getbuffer())


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def forking() -> ForkServerContext:
    """Starts processes that have imported already what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def told(rank: int, kind: Any, function: Callable[..., Any], *args: Any) -> str:
    """What an error of this kind says in which a function of a rank ends; "" if it does not."""
    try:
        function(rank, *args)
    except kind as error:
        return str(error)
    return ""


class RankPool:
    """`world_size` processes. `run(function, ...)` calls `function(rank, ...)` on all of them.

    What they run searches for orders only briefly, see `short_search`.
    Functions must be importable. A failed call breaks the pool; `alive` says so.
    """

    def __init__(self, world_size: int) -> None:
        from torch._C._distributed_c10d import TCPStore

        context = forking()
        self.world_size, self.alive = world_size, True
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, self._store.port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = TIMEOUT_S,
        lost: int | None = None,
    ) -> list[Any]:
        """Results by rank; AssertionError with the traceback of every rank that failed.

        lost: a rank that will not answer, and has no result.
        """
        self.signal(signal.SIGCONT)
        for pipe in self._pipes:
            send(pipe, (function, arguments))
        results = [self._receive(rank, timeout_s) for rank in range(self.world_size) if rank != lost]
        failures = [r.text for r in results if isinstance(r, RankFailed)]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def told(
        self, kind: type[Exception] | tuple[type[Exception], ...], function: Callable[..., Any], *args: Any
    ) -> list[str]:
        """By rank what an error of this kind says in which a function ends; "" where it does not."""
        return self.run(told, kind, function, *args)

    def _receive(self, rank: int, timeout_s: float) -> Any:
        try:
            if self._pipes[rank].poll(timeout_s):
                return receive(self._pipes[rank])
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout_s)  # its pipe closes before it has an exit code
            return RankFailed(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        return RankFailed(f"rank {rank} did not answer within {timeout_s} s")

    @property
    def crowded(self) -> bool:
        """Whether transports that tests have left behind keep the processors busy: their threads poll."""
        threads = Path(f"/proc/{self.processes[0].pid}/task")
        return threads.is_dir() and len(list(threads.iterdir())) > MOST_THREADS

    def signal(self, number: int) -> None:
        """Stop the ranks, or let them go on; one that is dead stays so."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    gc.freeze()  # what came with the fork stays, and the server's memory is shared until it is written to
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=HANG_S)
    )
    with short_search():
        while True:
            try:
                loaded = len(sys.modules)
                function, arguments = receive(pipe)
            except EOFError:
                return
            if len(sys.modules) > loaded:  # what a file of tests has loaded stays, too
                gc.collect()
                gc.freeze()
            try:
                send(pipe, function(rank, *arguments))
            except Exception:
                send(pipe, RankFailed(f"rank {rank}:\n{traceback.format_exc()}"))


class Pools:
    """One pool per number of ranks, made when first asked for, made again after a failure or when crowded.

    The others are stopped until they are asked to run something: each of their transports' threads looks a
    hundred times a second for work, and a thousand of them took a tenth of the machine.
    """

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        pool = self._pools.get(world_size)
        if pool is not None and pool.crowded:
            pool.close()
        if pool is None or not pool.alive:
            pool = self._pools[world_size] = RankPool(world_size)
        for other in self._pools.values():
            if other is not pool and other.alive:
                other.signal(signal.SIGSTOP)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
