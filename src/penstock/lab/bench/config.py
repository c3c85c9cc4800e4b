"""Settings of a comparison, and names of its contenders such as `penstock+netmoe+zero1`.

The default is a step of four MoE blocks, small enough for one core per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, Final, get_args

from penstock.config import ConfigError, Items, Within, check_bounds, check_name
from penstock.config.bounds import Seed
from penstock.cost import ClusterConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.lab.virtual import VirtualConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.schedule import SCHEDULES
from penstock.topology import Layout, ParallelConfig
from penstock.topology.local import Places, local_processes
from penstock.train.optimizer import OptimizerConfig, ZeroStage

AUTO: Final = "auto"
"""Name among schedules for the plan that the joint search chooses, whatever its schedule."""

STAYS: Final = "none"
SAMPLES: Final[tuple[SampleMoves, ...]] = tuple(name for name in get_args(SampleMoves) if name != STAYS)
EXPERTS: Final[tuple[ExpertMoves, ...]] = tuple(name for name in get_args(ExpertMoves) if name != STAYS)


SHARDED, GRADIENTS = "zero1", "zero2"
"""Stages of ZeRO: shares of the optimiser, and of gradients, too."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """One contender by its name.

    Attributes:
        samples, experts: How these move, as section [placement] calls it.
        dispatch: Name of the dispatch; None = as section [moe] says.
        shares: What ranks share of the update, as a stage of ZeRO; "" = nothing.
    """

    schedule: str
    dispatch: str | None = None
    shares: str = ""
    samples: SampleMoves = STAYS
    experts: ExpertMoves = STAYS

    @staticmethod
    def of(name: str) -> Named:
        """Parse a name.

        Raises:
            ConfigError: If a part of it is unknown, or of a kind that the name has already.
        """
        schedule, *moves = name.split("+")
        named = Named(schedule=schedule)
        check_name("schedules", schedule, SCHEDULES if moves else (*SCHEDULES, AUTO), "schedule")
        for move in moves:
            named = named._with(move, name)
        return named

    @property
    def moves(self) -> bool:
        """Whether something moves, or rows have a dispatch of their own."""
        return (self.dispatch, self.samples, self.experts) != (None, STAYS, STAYS)

    def optimizer(self, given: OptimizerConfig) -> OptimizerConfig:
        """Return section [optimizer] with this contender's shares of the update."""
        stages: dict[str, ZeroStage] = {"": 0, SHARDED: 1, GRADIENTS: 2}
        return replace(given, zero_stage=stages[self.shares])

    def placement(self, given: PlacementConfig) -> PlacementConfig:
        """Return section [placement] with what this contender moves."""
        return replace(given, samples=self.samples, experts=self.experts)

    def moe(self, given: MoEConfig) -> MoEConfig:
        """Return section [moe] with this contender's dispatch."""
        return given if self.dispatch is None else replace(given, dispatch=self.dispatch)

    def _with(self, move: str, name: str) -> Named:
        kinds = {
            "samples": SAMPLES,
            "experts": EXPERTS,
            "dispatch": DISPATCHES,
            "shares": (SHARDED, GRADIENTS),
        }
        valid = [each for names in kinds.values() for each in names]
        for field_name, names in kinds.items():
            if move in names:
                if getattr(self, field_name) not in (None, "", STAYS):
                    why = (
                        "samples can be moved in one way only, experts too, rows have one dispatch, "
                        "and updates one owner"
                    )
                    raise ConfigError("schedules", name, why, "Name one of each at most.")
                changes: dict[str, Any] = {field_name: move}
                return replace(self, **changes)
        hint = f"After a + use one of {', '.join(valid)}."
        raise ConfigError("schedules", name, f"nothing is moved by {move!r}", hint)


Rounds = Annotated[int, Within(1, 100_000, "every round is in memory until the end")]
Samples = Annotated[int, Within(1, 1 << 20, "all samples of a step are in memory at once")]
Seconds = Annotated[float, Within(0, 86400, "measuring takes time, and has to end", above=True)]
Names = Annotated[tuple[str, ...], Items(100, "there are fewer schedules to compare")]

PEERS = ("deepspeed", "megatron")
"""Other systems that can be compared with, installed or not."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Section `[compare]`.

    Attributes:
        schedules: What runs in turns; the first is the base of all ratios. `auto` is the plan that a search
            chooses from a profile taken before; it cannot be the first. A schedule may be followed by what
            moves in its steps, as in `penstock+netmoe+planned`; virtual devices only.
        peers: Other systems, each as shipped and on Penstock's transport.
        rounds: Measured steps of each.
        warmup: Steps before them.
        limit_s: Seconds after which rounds end, with those that are complete by then, one at least.
        batch_per_device: Samples per rank and step.
        seed: Seed of weights and data.
        tune: Whether to predict every schedule with several numbers of pieces and compare it at its best.
        profile_s: Seconds to measure links and tasks for, before a plan is sought (`--plan`). For given
            schedules links take at most this long and at most 4 s, then tasks as well and at most 20 s, or
            steps of virtual devices and at most 10 s.
    """

    schedules: Names = ("sequential", "moe_pipeline", "flowmoe")
    peers: Names = ()
    rounds: Rounds = 5
    warmup: Rounds = 1
    limit_s: Seconds = 3600.0
    batch_per_device: Samples = 4
    seed: Seed = 0
    tune: bool = False
    profile_s: Seconds = 60.0

    def __post_init__(self) -> None:
        check_bounds(self)
        for key in ("schedules", "peers"):
            names = getattr(self, key)
            if len(set(names)) < len(names):
                raise ConfigError(key, list(names), "names one twice", "Name each once.")
        if not self.schedules:
            raise ConfigError("schedules", [], "there is nothing to compare", "Use one or more.")
        if self.schedules[0] == AUTO:
            why = "the base of all ratios must be a schedule by name, and auto may be any"
            raise ConfigError("schedules", list(self.schedules), why, "Name another one first.")
        for name in self.schedules:
            Named.of(name)
        for name in self.peers:
            check_name("peers", name, PEERS, "other system")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Everything that `penstock bench` reads. [schedule].name is not used: see [compare].schedules.

    [cluster] and [virtual] describe virtual devices; without `--virtual` nothing depends on them.
    """

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(num_layers=4, hidden_size=512, num_heads=8, seq_len=256)
    )
    moe: MoEConfig = field(
        default_factory=lambda: MoEConfig(
            num_experts=2, top_k=2, moe_ffn_hidden_size=1024, expert="gelu", capacity_factor=1.25
        )
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(microbatches=4, all_reduce_chunk_bytes=4 << 20)
    )
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(processes=2))
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    virtual: VirtualConfig = field(default_factory=VirtualConfig)


def processes_of_bench(config: BenchConfig) -> int:
    """Return the number of local processes of a benchmark: as configured, or as suits this machine best."""

    def check(processes: int) -> None:
        Layout.build(config.parallel, processes, 0, config.moe.num_experts)

    return local_processes(config.parallel, Places.here(), check)


MICROBATCHES = (2, 4)
ALL_REDUCE_CHUNK_BYTES = (1 << 20, 1 << 22)


def variants(config: BenchConfig, name: str) -> tuple[ScheduleConfig, ...]:
    """Return settings for schedule `name`: those of [schedule], or with compare.tune all worth a trial.

    Numbers of pieces that do not divide the batch evenly are left out, as long as there are others.
    """
    given = replace(config.schedule, name=Named.of(name).schedule)
    if not config.compare.tune:
        return (given,)
    batch = config.compare.batch_per_device
    pieces = [m for m in MICROBATCHES if batch % m == 0] or [given.microbatches]
    tried = product(pieces, ALL_REDUCE_CHUNK_BYTES)
    return tuple(replace(given, microbatches=m, chunks=m, all_reduce_chunk_bytes=size) for m, size in tried)
