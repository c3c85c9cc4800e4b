"""Device meshes that say how ranks share a scheduled model, and those that it hands out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import penstock
from tests.adapt.test_parity import LIMITS, agreement
from tests.support.adapted import DIVISIBLE, Batch, small
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

Dims = Mapping[str, int]


def mesh_of(dims: Dims) -> Any:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def groups_of(dims: Dims) -> Any:
    """Process groups of single dimensions, as a program has them that knows no meshes."""
    mesh = mesh_of(dims)
    return {name: mesh.get_group(name) for name in dims}


def two_views(dims: Dims) -> Any:
    """Two meshes, of dense parts and of experts, as transformers has them."""
    tp, ep, world = dims.get("tp", 1), dims.get("ep", 1), dist.get_world_size()
    return [
        mesh_of({"pp": 1, "dp_replicate": 1, "fsdp": world // tp, "tp": tp}),
        mesh_of({"pp": 1, "dp_replicate": 1, "efsdp": world // ep, "ep": ep}),
    ]


Case = tuple[str, Callable[[Dims], Any], Dims, dict[str, Any]]

ON_TWO: list[Case] = [
    ("mixtral", mesh_of, {"ep": 2}, {"ep_size": 2}),
    ("olmoe", mesh_of, {"dp": 2, "ep": 1}, {"ep_size": 1}),
    ("qwen3_moe", mesh_of, {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}, {"tp_size": 2}),
    ("gpt_oss", mesh_of, {"ep": 1, "etp": 2}, {"ep_size": 1, "etp_size": 2}),
    ("mixtral", groups_of, {"dp": 1, "tp": 2}, {"tp_size": 2}),
]
ON_FOUR: list[Case] = [
    ("qwen3_moe", mesh_of, {"dp_shard_mod_ep": 2, "dp_shard_in_ep": 1, "ep": 2}, {"ep_size": 2}),
    ("mixtral", mesh_of, {"ep": 2, "tp": 2}, {"ep_size": 2, "etp_size": 2, "tp_size": 2}),
    ("qwen3_moe", two_views, {"tp": 2, "ep": 2}, {"ep_size": 2, "tp_size": 2}),
    ("gpt_oss", groups_of, {"ep": 2, "etp": 2}, {"ep_size": 2, "etp_size": 2}),
]
PLAIN: list[Case] = [
    ("mixtral", mesh_of, {"dp": 2, "ep": 2}, {"ep_size": 2}),
    ("mixtral", mesh_of, {"dp": 2, "tp": 2}, {"tp_size": 2}),
]


def agreements(rank: int, world: int, cases: list[Case]) -> dict[str, float]:
    return {
        f"{family} {dict(dims)}": max(
            agreement(rank, world, family, "flowmoe", torch.float64, mesh=make(dims), **sizes).values()
        )
        for family, make, dims, sizes in cases
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "cases"), [(2, ON_TWO), (4, ON_FOUR), pytest.param(4, PLAIN, marks=pytest.mark.soak)]
)
def test_a_step_of_a_mesh_is_that_of_transformers(ranks: Pools, world: int, cases: list[Case]) -> None:
    for found in ranks(world).run(agreements, world, cases, timeout_s=300):
        assert max(found.values()) < LIMITS[torch.float64], found


def ask(rank: int, folder: str) -> None:
    """A model's own meshes serve collectives, DTensors, and a second model."""
    changes: dict[str, Any] = DIVISIBLE
    model = penstock.parallelize(
        small("mixtral", **changes), mesh=mesh_of({"ep": 2, "tp": 2}), plan="flowmoe"
    )
    meshes = model.device_mesh
    assert {name: mesh.size() for name, mesh in meshes.items()} == {
        "dp": 2,
        "tp": 2,
        "edp": 1,
        "ep": 2,
        "etp": 2,
    }
    assert meshes["ep"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert meshes["dp"].get_local_rank() == rank // 2 and meshes["dp", "tp"].shape == (2, 2)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=meshes["ep"].get_group())
    assert total.item() == 2 * (rank % 2) + 2
    whole = torch.arange(8.0)
    part: Any = distribute_tensor(whole, meshes["ep"], [Shard(0)])
    assert part.to_local().equal(whole.chunk(2)[rank // 2]) and part.sum().full_tensor() == whole.sum()
    second = penstock.parallelize(small("mixtral", **changes), mesh=meshes, plan="flowmoe")
    given = Batch().inputs(rank // 2, rank // 2 + 1)
    assert second(**given).loss.item() == model(**given).loss.item()
    second.save_pretrained(folder)
    third = penstock.load_pretrained(folder, mesh=meshes, plan="flowmoe")
    assert third(**given).loss.item() == model(**given).loss.item()


def test_a_model_hands_out_meshes(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(ask, str(tmp_path))


def test_on_one_rank() -> None:
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    assert all(mesh.size() == 1 for mesh in model.device_mesh.values())
    assert "nowhere" not in model.device_mesh
    assert repr(model.device_mesh) == "RankMeshes(dp=1, tp=1, edp=1, ep=1, etp=1)"


def refuse(rank: int) -> list[str]:
    """What is said of meshes that are none of Penstock's layouts; the model stays whole."""
    changes: dict[str, Any] = DIVISIBLE
    model, said = small("mixtral", **changes), []
    square, alone = mesh_of({"dp": 2, "ep": 2}), mesh_of({"dp": 4})
    wrong: list[dict[str, Any]] = [
        {"mesh": square, "ep_size": 4},
        {"mesh": mesh_of({"dp": 2, "tp": 2}), "tp_size": 1},
        {"mesh": mesh_of({"ep": 2, "dp": 2})},
        {"mesh": mesh_of({"tp": 2, "dp": 2})},
        {"mesh": mesh_of({"dp": 2, "cp": 2})},
        {"mesh": mesh_of({"pp": 2, "ep": 2})},
        {"mesh": mesh_of({"dp": 2, "experts": 2})},
        {"mesh": init_device_mesh("cpu", (2, 2))},
        {"mesh": square["ep"]},
        {"mesh": {"ep": square}},
        {"mesh": {"ep": DeviceMesh("cpu", [0, 1])}},
        {"mesh": (2, 2)},
        {"mesh": [square, mesh_of({"ep": 4})]},
        {"mesh": alone if rank else square},
        {"mesh": alone, "ep_size": 3},
        {"mesh": [alone, mesh_of({"tp": 4})]},
    ]
    before = {name: p.shape for name, p in model.named_parameters()}
    for each in wrong:
        with pytest.raises(penstock.ConfigError) as caught:
            penstock.parallelize(model, plan="flowmoe", **each)
        said.append(str(caught.value))
    assert {name: p.shape for name, p in model.named_parameters()} == before
    return said


def test_what_is_no_layout_is_refused_on_all_ranks(ranks: Pools) -> None:
    wanted = (
        "^ep_size = 4: the mesh has 2 ranks along ep. Leave ep_size out",
        "^tp_size = 1: the mesh has 2 ranks along tp",
        "ep of rank 0 are the ranks 0, 2, and must be 0, 1: .* dimensions before ep",
        "tp of rank 0 are the ranks 0, 2, and must be 0, 1: .* Make tp the last dimension",
        "cp = 2: ranks that share a sample's tokens share attention, too: that is `tp`",
        "pp = 2: every rank runs all layers",
        "no dimension is called 'experts'. There are tp, mp, ep",
        r"^mesh = \[2, 2\]: its dimensions have no names",
        r"it has 2 of 4 ranks, and all of them train the model. .*\{\"ep\": mesh\[\"ep\"\]\}",
        "'ep' is DeviceMesh, and no process group or mesh of one dimension",
        "on rank 2, 'ep' of rank 2 has the ranks 0, 1, which are others",
        '^mesh = "tuple": is no DeviceMesh',
        "two meshes have a dimension 'ep', of other ranks",
        "rank 1 has dimensions dp, and rank 0 has dp, ep",
        r"^parallel\.ep_size = 3: must divide",
        "dp of rank 0 are the ranks 0, 1, 2, 3, and must be among 0: ranks that share attention have",
    )
    for said in ranks(4).run(refuse):
        for words, text in zip(wanted, said, strict=True):
            assert re.search(words, text), text
