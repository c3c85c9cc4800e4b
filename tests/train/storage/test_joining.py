"""Parts of tensors on their way to the rank that writes them, on real ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.mesh import Axes, Group, Mesh
from penstock.sharding import Sharding
from penstock.topology import CommunicationError, Control
from penstock.train.storage.held import Held
from penstock.train.storage.joining import PURPOSE, Joining
from penstock.train.storage.shards import Outgoing, write_shard
from penstock.train.storage.stored import Entry
from tests.support.ranks import Pools, RankPool

pytestmark = pytest.mark.slow
SHAPE = (8, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class World:
    """Four ranks; tensors that are shared along mp and, expert by expert, along esp."""

    mp_size: int
    ep_size: int
    esp_size: int

    @property
    def mesh(self) -> Mesh:
        sizes = {"mp_size": self.mp_size, "ep_size": self.ep_size, "esp_size": self.esp_size}
        return Mesh(world_size=4, **sizes)


def whole_of(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPE, generator=generator).to(DTYPES[number % len(DTYPES)])


def names_of(mesh: Mesh, rank: int) -> dict[str, tuple[int, Axes]]:
    """What a rank has parts of: five tensors of everybody's and three of its own experts'."""
    found = {f"model.{number}": (number, Group.TENSOR) for number in range(5)}
    own = mesh.place(rank, Group.EXPERT)
    experts = {f"expert.{own}.{n}": (10 + 10 * own + n, Group.SHARDS) for n in range(3)}
    return {name: (number, axes) for name, (number, axes) in (found | experts).items() if mesh.size(axes) > 1}


def held_by(mesh: Mesh, rank: int) -> dict[str, Held]:
    found = {}
    for name, (number, axes) in names_of(mesh, rank).items():
        dim = number % 2
        sharding = Sharding.along(dim, SHAPE, axes, mesh.place(rank, axes), mesh.size(axes))
        found[name] = Held(sharding.part(whole_of(number)), sharding)
    return found


def written_by(rank: int, world: World, folder: Path, full: int | None) -> str:
    """Write every tensor at some rank that has it, whatever the rank; rank `full` cannot write."""
    mesh, held = world.mesh, held_by(world.mesh, rank)
    joining = Joining(held, mesh, Control(rank, 4))
    mine = [name for name in held if writer_of(mesh, name) == rank]
    try:
        with joining.on_behalf_of(mine):
            if rank == full:
                raise OSError(28, "No space left on device")
            if mine:
                write_shard(folder / f"{rank}.safetensors", [outgoing(name, held, joining) for name in mine])
    except OSError as error:
        return str(error)
    return ""


def writer_of(mesh: Mesh, name: str) -> int:
    ranks = [rank for rank in range(4) if name in names_of(mesh, rank)]
    return ranks[sum(map(ord, name)) % len(ranks)]


def outgoing(name: str, held: dict[str, Held], joining: Joining) -> Outgoing:
    entry = Entry(shape=held[name].shape, dtype=held[name].tensor.dtype)
    return Outgoing(name=name, entry=entry, load=lambda: joining.take(name))


WORLDS = [World(2, 2, 2), World(4, 4, 1), World(1, 1, 4), World(2, 1, 2), World(4, 1, 4), World(2, 2, 1)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_tensor_is_written_whole_and_once(ranks: Pools, tmp_path: Path, world: World) -> None:
    assert ranks(4).run(written_by, world, tmp_path, None) == [""] * 4
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    everywhere = [names_of(world.mesh, rank) for rank in range(4)]
    wanted = {name: number for names in everywhere for name, (number, _) in names.items()}
    assert sum(map(len, files)) == len(wanted)
    for name, number in wanted.items():
        (found,) = (file[name] for file in files if name in file)
        assert torch.equal(found, whole_of(number)), name


@pytest.mark.parametrize("full", range(4))
def test_a_rank_that_cannot_write_still_serves_the_others(ranks: Pools, tmp_path: Path, full: int) -> None:
    errors = ranks(4).run(written_by, WORLDS[0], tmp_path, full)
    assert [rank for rank, error in enumerate(errors) if error] == [full]
    for rank in set(range(4)) - {full}:
        path = tmp_path / f"{rank}.safetensors"
        for name, tensor in (load_file(path) if path.exists() else {}).items():
            assert torch.equal(tensor, whole_of(names_of(WORLDS[0].mesh, rank)[name][0]))


def left_alone(rank: int) -> str:
    """Rank 1 dies when its part is wanted."""
    whole, mesh = whole_of(0), Mesh(world_size=2, mp_size=2)
    sharding = Sharding.along(0, SHAPE, Group.TENSOR, rank, 2)
    joining = Joining({"model": Held(sharding.part(whole), sharding)}, mesh, Control(rank, 2))
    if rank == 1:
        joining._control.gather([], PURPOSE)  # all of `on_behalf_of` that comes before the parts
        os._exit(7)
    with pytest.raises(CommunicationError) as caught, joining.on_behalf_of(["model"]):
        joining.take("model")
    return str(caught.value)


def test_a_rank_that_dies_ends_the_others_wait() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(left_alone)
        assert str(caught.value) == "rank 1 died with exit code 7", (
            "rank 0 gave up in time, with its own error"
        )
    finally:
        pool.close()


def test_a_stand_in_takes_no_memory() -> None:
    sharding = Sharding.along(0, (1 << 20, 1 << 10), Group.TENSOR, 0, 1 << 10)
    held = Held(torch.zeros(1 << 10, 1 << 10), sharding)
    assert held.stand_in.shape == (1 << 20, 1 << 10) and held.stand_in.dtype == torch.float32
    assert held.stand_in.untyped_storage().nbytes() == 4


def test_a_part_is_filled_from_the_whole() -> None:
    whole = torch.arange(12.0).view(4, 3)
    part = Held(torch.zeros(2, 3), Sharding.along(0, (4, 3), Group.TENSOR, 1, 2))
    part.fill(whole)
    assert torch.equal(part.tensor, whole[2:])
    alone = Held(torch.zeros(4, 3))
    alone.fill(whole)
    assert torch.equal(alone.tensor, whole) and alone.shape == (4, 3)
