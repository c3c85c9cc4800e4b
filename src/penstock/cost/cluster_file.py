"""The cluster file: what was measured of a cluster, or what is known of one that is not available.

JSON that people can read and write. `links` and `tasks` may be empty: the rates stand in for what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from penstock.config import (
    UNSET,
    Checked,
    ConfigError,
    Items,
    Within,
    check_bounds,
    check_name,
    from_dict,
    read_json,
    to_dict,
)
from penstock.config.bounds import MOST_RANKS, Name, Ranks
from penstock.cost.cluster import AlphaBeta, ClusterConfig
from penstock.cost.devices import CPU, Computing, find_device, usable_bytes
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase
from penstock.mesh import Group
from penstock.ops import OPS
from penstock.writing import write_whole

OLDEST, VERSION = 1, 2
"""Versions of the file that can be read; version 1 has no figures of real steps."""

WHOSE_RATE: Final = "is missing, so nobody can tell whose rate link_bytes_per_s is"
WHAT_TO_WRITE: Final = (
    'Write "node" if the devices of a node share so much, or "device" if each has a card of its own with '
    "that rate. Files that gave a device's share of its node's card: \"node\", and the share times "
    "ranks_per_node."
)
OF_DEVICES: Final = ("flops_per_s", "memory_bytes_per_s")
"""Rates that a file without measurements must have, if it has any."""

PAIR: Final = "simultaneous_pair"
"""Combine and the gather that follows it, run simultaneously: Parm's SAA, with its alpha_o and beta_o."""

PRODUCT: Final = "matmul"
"""The kernel that multiplies matrices of the model's sizes."""

COLLECTIVES = (
    "all_to_all",
    "uneven_all_to_all",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "point_to_point",
    PAIR,
)
"""Collectives that are measured, besides legs of dispatches, which have the dispatch's name and an op."""


RECOMPUTE = "Measure it again, or correct the number."
Seconds = Annotated[float, Within(0, 1e3, "nothing waits a quarter of an hour to begin", hint=RECOMPUTE)]
SecondsPerUnit = Annotated[
    float, Within(0, 1e-3, "modems of 1990 took a millisecond for a byte", True, hint=RECOMPUTE)
]
Factor = Annotated[float, Within(0, 1e9, "it multiplies durations", above=True, hint=RECOMPUTE)]
Slowdown = Annotated[float, Within(1, 1e9, "other work on a rank never makes a task shorter", hint=RECOMPUTE)]
Scatter = Annotated[float, Within(0, 1e3, "a duration that scatters more says nothing", hint=RECOMPUTE)]
Quality = Annotated[float, Within(-1e300, 1, "1 is a perfect line", hint=RECOMPUTE)]
Residual = Annotated[float, Within(0, 1e300, "it is a distance", hint=RECOMPUTE)]
Measured = Annotated[float, Within(0, 1e18, "bytes, operations or seconds", hint=RECOMPUTE)]
Point = Annotated[tuple[Measured, ...], Items(8, "size, seconds")]
Points = Annotated[tuple[Point, ...], Items(10_000, "a line needs few points")]
MemoryBytes = Annotated[int, Within(1, 2**62, "no machine has more", hint="Leave it out if it is not known.")]
MOST_MODELS = 4096

DOCTOR: Final = "doctor"
"""The key of a file under which `penstock doctor --gpu` keeps what is no cluster file."""


@dataclass(frozen=True, kw_only=True)
class Fit(Checked):
    """Quality of a line through measured points.

    Attributes:
        points: The measurements, [size, seconds], outliers included.
        r2: The share of the variance that the line explains; 1 is a perfect line.
        residual: The typical distance of a point from the line, relative to the line.
    """

    r2: Quality
    residual: Residual
    points: Points = ()


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Model `t = alpha + beta * n` of one collective in one kind of group on one lane.

    n: bytes by the convention of ClusterConfig: what each rank sends to all (all-to-all), the gathered output
    (all-gather), the whole input (reduce-scatter), the tensor (all-reduce, broadcast, point-to-point).

    Attributes:
        collective: Its name, see COLLECTIVES, or that of a dispatch for its legs.
        group: The kind of group as Group names it: ep, node, rail, edp, world, etp, tp, dp or ep x etp.
        op: The leg of a hierarchical dispatch, else "".
        nodes: The nodes that a group covers, while all ranks of the cluster communicate; None = there is one
            node, or nobody knows, and only the number of ranks counts.
        in_steps: How many times longer a transfer takes in a step than by this line.
        contended: An additional factor beside computation; None = as the file says of all transfers.
    """

    collective: str
    group: str
    lane: str
    ranks: Ranks
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerUnit
    op: str = ""
    nodes: Ranks | None = None
    in_steps: Factor = 1.0
    contended: Slowdown | None = None
    fit: Fit | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("collective", self.collective, (*COLLECTIVES, *DISPATCHES))
        check_name("lane", self.lane, Lane)
        if self.op:
            check_name("op", self.op, OPS, "op of a task")

    @property
    def measures(self) -> tuple[object, ...]:
        """What was measured, whatever came out; of two links with the same, one is a repetition."""
        return self.collective, self.group, self.op, self.ranks, self.nodes

    @property
    def model(self) -> AlphaBeta:
        return AlphaBeta(alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte)

    @property
    def stays_inside(self) -> bool:
        """Whether nothing leaves a node."""
        return self.nodes == 1 or Lane(self.lane).is_inside


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """Model of a compute task: `alpha + scale * nominal`, where nominal is its work by the two rates.

    Attributes:
        op, phase: The op and the phase, as in task names (AT, F).
        contended: How many times longer the task takes beside traffic.
    """

    op: str
    phase: str
    alpha_s: Seconds
    scale: Factor
    contended: Slowdown = 1.0
    fit: Fit | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("op", self.op, OPS, "op of a task")
        check_name("phase", self.phase, Phase)


@dataclass(frozen=True, kw_only=True)
class MoveModel:
    """Transfers of one op of moving samples or experts, as a run has tried them.

    Attributes:
        op: The op, as in task names (GP, GG).
        in_steps: How many times longer they took than by their collective's line.
    """

    op: str
    in_steps: Factor

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("op", self.op, OPS, "op of a task")


@dataclass(frozen=True, kw_only=True)
class KernelModel(Checked):
    """Model `t = alpha + beta * work` of one kind of computation alone, on all ranks at once: for the reader.

    Attributes:
        unit: The unit of its work, operations or bytes.
    """

    name: str
    unit: Literal["flop", "byte"]
    alpha_s: Seconds
    beta_s_per_unit: SecondsPerUnit
    fit: Fit | None = None

    @property
    def points(self) -> Points:
        """Work and seconds of every measurement that took any time."""
        return () if self.fit is None else tuple(each for each in self.fit.points if each[1] > 0)


@dataclass(frozen=True, kw_only=True)
class StepFit:
    """Ratio of real steps to their simulation from everything else in the file.

    Attributes:
        ratio: The typical ratio of measured to simulated seconds.
        low, high: The ratios between which 95 % of steps are expected.
        steps: The number of measured steps.
    """

    ratio: Factor
    low: Factor
    high: Factor
    steps: Annotated[int, Within(1, 2**62, "it is a number of steps")] = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.low <= self.ratio <= self.high:
            why = f"does not lie between low = {self.low:g} and high = {self.high:g}"
            raise ConfigError("ratio", self.ratio, why, RECOMPUTE)

    def around(self, predicted_s: float) -> tuple[float, float]:
        """Return the interval in which a step predicted at `predicted_s` (`ratio` included) is expected."""
        return predicted_s * self.low / self.ratio, predicted_s * self.high / self.ratio


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Place and time of a measurement."""

    host: str
    date: str
    processor: str
    device: str
    python: str
    torch: str
    penstock: str


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """A cluster: its rates, and the models of what was measured.

    Attributes:
        rates: The rates that count where nothing was measured; those of several nodes say whose rate theirs
            is (a measured file that does not has that of a device).
        contended_transfers: How many times longer a transfer takes beside computation.
        jitter: How much a compute task's duration scatters, relative (standard deviation).
        slowness: How many times longer every rank's computation takes than `tasks` says; empty = all ranks
            are alike.
        steps: The ratio of real steps to their simulation; None = not measured, or of no use.
        moves: What a run has learnt of transfers that no profile has, when a plan that moves samples or
            experts was tried.
        memory_bytes: The bytes that tensors of one rank may take, beside what contexts and communicators of
            GPUs do; None = not known.
        measured: The place and time of the measurement; None for a file written by hand.
        source: Where its numbers come from.
        doubts: What real steps could not tell, as text.
        device: The name of one device, such as H100 or cpu, if it was not measured.
        precision: The type of the products that flops_per_s and `tasks` are about; None = of whatever is
            planned for.
        kernels_of: What tells how long tasks take that were not measured: the rates alone, or the sizes of
            kernels on such a device, too, with products in `precision` or as others compute them, in float8.
    """

    version: Annotated[int, Within(0, 2**62, "versions count up from 1")] = VERSION
    name: str
    nodes: Ranks
    ranks_per_node: Ranks
    rates: ClusterConfig = field(default_factory=ClusterConfig)
    links: Annotated[tuple[LinkModel, ...], Items(MOST_MODELS, "one per collective and group")] = ()
    tasks: Annotated[tuple[TaskModel, ...], Items(MOST_MODELS, "one per op and phase")] = ()
    kernels: Annotated[tuple[KernelModel, ...], Items(MOST_MODELS, "they are for the reader")] = ()
    contended_transfers: Slowdown = 1.0
    jitter: Scatter = 0.0
    slowness: Annotated[tuple[Factor, ...], Items(MOST_RANKS, "one per rank")] = ()
    steps: StepFit | None = None
    moves: Annotated[tuple[MoveModel, ...], Items(MOST_MODELS, "one per op")] = ()
    memory_bytes: MemoryBytes | None = None
    device: Name | None = None
    precision: Computing | None = None
    kernels_of: Literal["rates", "device", "device in float8"] = "rates"
    measured: Machine | None = None
    source: str = ""
    doubts: Annotated[tuple[str, ...], Items(MOST_MODELS, "they are for people")] = ()

    def __post_init__(self) -> None:
        if not OLDEST <= self.version <= VERSION:
            hint = f"Measure it again with `penstock profile`; this version writes {VERSION}."
            raise ConfigError("version", self.version, "is a version that cannot be read here", hint)
        check_bounds(self)
        if self.ranks > MOST_RANKS:
            why = f"makes {self.ranks} ranks on {self.nodes} nodes, and {MOST_RANKS} can be planned for"
            raise ConfigError("ranks_per_node", self.ranks_per_node, why, "Use fewer.")
        for number, link in enumerate(self.links):  # outside a file, "" stands for several groups at once
            check_name(f"links[{number}].group", link.group, Group.NAMES, "group of ranks")
        if self.slowness and len(self.slowness) != self.ranks:
            why = f"needs a number for each of the {self.ranks} ranks"
            raise ConfigError("slowness", list(self.slowness), why, "Use [] if all are alike.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def device_name(self) -> str:
        """The name of one device; "" = not known."""
        return self.device or ("" if self.measured is None else self.measured.device)

    @property
    def usual_precision(self) -> tuple[Computing, str]:
        """What `train.precision=auto` means on these devices, and why, as text."""
        name = self.device_name
        device = find_device(name)
        if device is not None:
            units = "has" if device.bfloat16_tflops is not None else "has no"
            return device.usual, f"the device, {name}, {units} units for bfloat16"
        if name == CPU:
            return "float32", "the devices are CPUs"
        if self.precision:
            return self.precision, "as the cluster file's rates"
        if name:
            return "bfloat16", f"assumed: {name} is not among the devices that are known here"
        return "float32", "assumed: the cluster file names no device"

    def computing_in(self, precision: Computing) -> ClusterFile:
        """Return the cluster with operations per second of this precision.

        A device is assumed to reach the same share of its published peak in either. Where it is not known, or
        has no units for the precision, the rate stays.
        """
        if self.precision in (None, precision):
            return self
        device = find_device(self.device_name)
        now, then = (
            None if device is None else device.peak_tflops(kind) for kind in (self.precision, precision)
        )
        if now is None or then is None:
            return self
        rate = self.rates.flops_per_s * then / now
        return replace(self, rates=replace(self.rates, flops_per_s=rate), precision=precision)

    @property
    def peak_flops_per_s(self) -> float | None:
        """Highest rate of a matrix product on one rank while all ranks multiply; None = not measured."""
        rates = (
            point[0] / point[1]
            for kernel in self.kernels
            if kernel.name == PRODUCT
            for point in kernel.points
        )
        return max(rates, default=None)

    def link(self, collective: str, group: str, op: str = "") -> LinkModel | None:
        """Return the measured model of a collective in a kind of group; None if there is none.

        Args:
            op: The leg of a hierarchical dispatch, else "".
        """
        matching = (x for x in self.links if (x.collective, x.group, x.op) == (collective, group, op))
        return next(matching, None)

    def beside(self, other: ClusterFile) -> ClusterFile:
        """Return file with missing links and tasks taken from another file, measured by the same rates."""
        links = {x.measures: x for x in (*other.links, *self.links)}
        tasks = {(x.op, x.phase): x for x in (*other.tasks, *self.tasks)}
        own = [x for x in links.values() if x in self.links], [x for x in tasks.values() if x in self.tasks]
        return replace(
            self,
            links=(*own[0], *(x for x in links.values() if x not in own[0])),
            tasks=(*own[1], *(x for x in tasks.values() if x not in own[1])),
        )

    def save(self, path: Path) -> None:
        """Write the file to a path; a half-written file never replaces a whole one."""
        write_json(path, to_dict(self))

    @staticmethod
    def read(path: Path) -> ClusterFile:
        """Read a file of this or an older version.

        Raises:
            ConfigError: For a file that cannot be used. It names the file and the key that is wrong.
        """
        table = read_json(path, "Give a cluster file, or measure one with `penstock profile`.")
        if isinstance(table, dict):
            table = {key: value for key, value in table.items() if key != DOCTOR}
        file = replace(from_dict(ClusterFile, table, str(path)), version=VERSION)
        if file.measured is not None:
            return file
        # A file written by hand must have all that no default can replace.
        given = table.get("rates", {})
        if file.nodes > 1 and "link_rate_of" not in given:
            raise ConfigError(f"{path}.rates.link_rate_of", UNSET, WHOSE_RATE, WHAT_TO_WRITE)
        if "flops_per_s" in given and "precision" not in table:
            why = "is missing, so nobody can tell in which precision flops_per_s is reached"
            hint = 'Write "float32" or "bfloat16"; null if devices compute as fast in either.'
            raise ConfigError(f"{path}.precision", UNSET, why, hint)
        of_links = {"link_bytes_per_s": file.nodes > 1, "intra_bytes_per_s": file.ranks_per_node > 1}
        needed = [*OF_DEVICES, *(name for name, is_used in of_links.items() if is_used and not file.links)]
        missing = [name for name in needed if name not in given]
        if missing and (given or file.device_name not in ("", CPU)):
            why = "is missing, and the default is the rate of one core and its loopback link"
            hint = f"A data sheet has it, or `penstock profile` measures it. Missing: {', '.join(missing)}."
            raise ConfigError(f"{path}.rates.{missing[0]}", UNSET, why, hint)
        device = find_device(file.device_name)
        if device is not None and "memory_bytes" not in table:
            return replace(file, memory_bytes=usable_bytes(max(device.memory_gb)))
        return file

    def faster(self, *, inter: float = 1.0, intra: float = 1.0, compute: float = 1.0) -> ClusterFile:
        """Return the cluster with these factors on bandwidth between and inside nodes, and on compute.

        Args:
            inter, intra: The factors on the bandwidth between nodes, and inside them.
            compute: The factor on the speed of devices.
        """
        links = tuple(
            replace(link, beta_s_per_byte=link.beta_s_per_byte / (intra if link.stays_inside else inter))
            for link in self.links
        )
        tasks = tuple(replace(task, alpha_s=task.alpha_s / compute) for task in self.tasks)
        rates = self.rates.faster(inter=inter, intra=intra, compute=compute)
        return replace(self, links=links, tasks=tasks, rates=rates)


NO_MATTER = ("date",)


def mismatch(file: ClusterFile, machine: Machine, ranks: int, nodes: int) -> str | None:
    """Return why a measured file may not hold here, as one line for a warning; None if it fits.

    A file written by hand describes no measured machine, so it is never compared.

    Args:
        machine, ranks, nodes: The machine, and the numbers of ranks and nodes, in use now.
    """
    if file.measured is None:
        return None
    pairs = [("ranks", file.ranks, ranks), ("nodes", file.nodes, nodes)]
    pairs += [
        (fact.name, getattr(file.measured, fact.name), getattr(machine, fact.name))
        for fact in fields(Machine)
        if fact.name not in NO_MATTER
    ]
    differences = [f"{what} {then} (here {now})" for what, then, now in pairs if then != now]
    if not differences:
        return None
    measured = f"cluster file {file.name!r} was measured with {', '.join(differences)}"
    return f"{measured}: its times may not hold; measure again with `penstock profile`"


# ---- JSON files that are complete or not there at all -----------------------------------------------------


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a readable JSON file and make its folder; a half-written file never replaces a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(plain, indent=1) + "\n")
