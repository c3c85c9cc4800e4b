"""Shards: what is written is what the library reads, in little memory, and hostile files are refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from penstock.checkpoint.folder import DamagedError, digest_of
from penstock.checkpoint.storage import CODES, Outgoing, Part, Stored, _overlap, misfits, write_shard
from penstock.sharding import Place


def outgoing(tensors: Mapping[str, Tensor], offsets: Place | None = None) -> list[Outgoing]:
    return [Outgoing(name, offsets or (0,) * each.dim(), each) for name, each in tensors.items()]


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of all shards in a folder."""
    stored = Stored(folder, [path.name for path in folder.iterdir()])
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.whole.items()}
    stored.load({name: Part.of(tensor) for name, tensor in found.items()})
    return found


def some_tensors() -> dict[str, Tensor]:
    tensors = {str(dtype): torch.ones(3, dtype=dtype) for dtype in CODES}
    base = torch.arange(24.0).view(4, 6)
    return tensors | {
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "part": base[1:3],
        "step": torch.tensor(5),
        "a name / with ünicode": torch.rand(2, 2),
    }


def test_what_is_written_is_read_by_the_library_and_here(tmp_path: Path) -> None:
    tensors, path = some_tensors(), tmp_path / "shard.safetensors"
    assert write_shard(path, outgoing(tensors)) == digest_of(path)
    for found in (load_file(path), read(tmp_path)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def test_writing_needs_memory_for_one_tensor(tmp_path: Path) -> None:
    """Python's own allocations; torch's are views, but for what is not contiguous."""
    tensors = {f"t{i}": torch.rand(256, 256) for i in range(20)}
    tracemalloc.start()
    write_shard(tmp_path / "a", outgoing(tensors))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 256 * 4


def test_boxes_in_several_files_are_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    write_shard(tmp_path / "0.safetensors", outgoing({"w": whole[:2]}, (0, 0)))
    write_shard(tmp_path / "1.safetensors", outgoing({"w": whole[2:, :1]}, (2, 0)))
    with pytest.raises(DamagedError, match=r"the parts of w \[3, 4\] have 9 numbers"):
        read(tmp_path)
    write_shard(tmp_path / "2.safetensors", outgoing({"w": whole[2:, 1:]}, (2, 1)))
    assert torch.equal(read(tmp_path)["w"], whole)
    inner = whole.new_zeros(3, 2)
    stored = Stored(tmp_path, [path.name for path in tmp_path.iterdir()])
    stored.load({"w": Part(whole.shape, whole.dtype, {(0, 1): inner})})
    assert torch.equal(inner, whole[:, 1:3])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_shard(tmp_path / name, outgoing({"same": torch.ones(2)}))
    with pytest.raises(DamagedError, match=r"the parts of same \[2\] have 4 numbers"):
        read(tmp_path)


def test_a_tensor_of_two_types_is_refused(tmp_path: Path) -> None:
    for at, dtype in enumerate((torch.float32, torch.int32)):
        write_shard(tmp_path / f"{at}.safetensors", outgoing({"w": torch.ones(2, dtype=dtype)}, (2 * at,)))
    with pytest.raises(DamagedError, match="w has numbers of two types"):
        read(tmp_path)


def test_a_shard_that_belongs_to_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_shard(tmp_path / name, outgoing({name: torch.ones(2)}))
    with pytest.raises(DamagedError, match=r"b\.safetensors does not belong to it"):
        Stored(tmp_path, ["a.safetensors"])


def hostile(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HOSTILE = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header of 2^63 bytes": hostile({}, length=1 << 63),
    "a header longer than the file": hostile(one(), bytes(8), length=1 << 20),
    "no JSON": hostile(b"{{{{"),
    "nested": hostile(b'{"a":' * 100_000),
    "terabytes declared": hostile(one(shape=[1 << 40], data_offsets=[0, 1 << 42]), bytes(8)),
    "a shape that overflows": hostile(one(shape=[1 << 40, 1 << 40]), bytes(8)),
    "a negative shape": hostile(one(shape=[-2]), bytes(8)),
    "another width than announced": hostile(one(dtype="F64"), bytes(8)),
    "an unknown type": hostile(one(dtype="X32"), bytes(8)),
    "offsets outside": hostile(one(data_offsets=[8, 16]), bytes(8)),
    "offsets backwards": hostile(one(data_offsets=[8, 0]), bytes(8)),
    "bytes left over": hostile(one(), bytes(99)),
    "bytes missing": hostile(one(), bytes(4)),
    "overlapping": hostile(one() | {"b": one()["a"]}, bytes(8)),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(HOSTILE[name])
    with pytest.raises(DamagedError, match=r"a\.safetensors"):
        read(tmp_path)


PLACED = '{"w": {"saved_offsets": %s}}'
OFFSETS = [
    *("{", "[]", "{}", '{"w": 3}', "[" * 100_000),
    *(PLACED % at for at in ("[0]", "[-1, 0]", "[1, 0]", '["a", 0]', "[1e9, 0]", f"[{10**20}, 0]")),
]


@pytest.mark.parametrize("offsets", OFFSETS)
def test_hostile_offsets_are_refused(tmp_path: Path, offsets: str) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(DamagedError):
        read(tmp_path)


def test_a_type_that_no_state_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(hostile(one(dtype="U32"), bytes(8)))
    whole = Stored(tmp_path, ["a.safetensors"]).whole
    assert misfits({"a": Part.of(torch.ones(2))}, whole, ["a"]) == (
        "a has numbers of type torch.uint32 there and torch.float32 here"
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.safetensors").write_bytes(data)
    try:
        read(folder)
    except DamagedError:
        return


Boxes = list[tuple[tuple[int, int], tuple[int, int]]]


@pytest.mark.parametrize(
    ("boxes", "overlap"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], False),
        ([((2, 0), (2, 4)), ((0, 0), (1, 4)), ((1, 0), (1, 4))], False),
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], False),
        ([((0, 0), (4, 2)), ((1, 2), (3, 2)), ((0, 2), (1, 2))], False),
        ([((0, 0), (3, 4)), ((1, 0), (2, 4)), ((3, 0), (1, 4))], True),
        ([((0, 0), (4, 1)), ((1, 1), (1, 3)), ((3, 0), (1, 4))], True),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], True),
    ],
)
def test_boxes_that_have_a_number_in_common_are_found(boxes: Boxes, overlap: bool) -> None:
    """Whatever their order, and with others between them."""
    chunks = [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size)) for at, size in boxes]
    assert _overlap(chunks) is _overlap(chunks[::-1]) is overlap
