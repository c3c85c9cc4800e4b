"""Checkpoints of earlier versions are read, and those that would run something run nothing."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.train.storage.files import DamagedError
from penstock.train.storage.inert_pickle import parse
from penstock.train.storage.old_format import METADATA, OldShards


def written(folder: Path) -> dict[str, Tensor]:
    """A checkpoint as earlier versions saved it."""
    state = {
        "model.a": torch.randn(3, 4),
        "model.t": torch.randn(3, 4).t(),
        "optimizer.a.step": torch.tensor(3.0),
        "train.step": torch.tensor(300),
        "generator.rank0": torch.get_rng_state(),
        "double": torch.randn(2, dtype=torch.float64),
    }
    save(state, checkpoint_id=folder, no_dist=True)
    return state


def read(folder: Path) -> dict[str, Tensor]:
    stored = OldShards(folder)
    return dict(stored.read(list(stored.entries)))


def test_what_earlier_versions_saved_is_read(tmp_path: Path) -> None:
    state = written(tmp_path)
    found = read(tmp_path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


class Bomb:
    """What the trial planted: a command that runs when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_crafted_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    written(tmp_path)
    witness = tmp_path / "witness"
    bomb = pickle.dumps(Bomb(f"touch {witness}"), protocol)
    pickle.loads(bomb)
    assert witness.exists(), "the bomb works where pickles are run"
    witness.unlink()
    (tmp_path / METADATA).write_bytes(bomb)
    with pytest.raises(DamagedError):
        OldShards(tmp_path)
    assert not witness.exists()


def test_a_bomb_inside_real_metadata_runs_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    metadata, witness = FileSystemReader(tmp_path).read_metadata(), tmp_path / "witness"
    metadata.planner_data = Bomb(f"touch {witness}")  # where nobody looks
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    assert len(read(tmp_path)) == 6
    assert not witness.exists()


def test_a_bomb_inside_a_shard_runs_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    metadata, witness = FileSystemReader(tmp_path).read_metadata(), tmp_path / "witness"
    data = io.BytesIO()
    torch.save(Bomb(f"touch {witness}"), data)
    (tmp_path / "__0_0.distcp").write_bytes(data.getvalue())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(data.getvalue())
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="holds no tensor at 0"):
        read(tmp_path)
    assert not witness.exists()


def rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    """The metadata of a checkpoint in `folder` after `change`."""
    written(folder)
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def all_extents(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(changes)

    return change


def set_shapes(metadata: Any) -> None:
    for tensor in metadata.state_dict_metadata.values():
        tensor.size = torch.Size([1 << 40, 1 << 10])


def set_types(metadata: Any) -> None:
    for tensor in metadata.state_dict_metadata.values():
        tensor.properties.dtype = torch.int8


def drop_one(metadata: Any) -> None:
    metadata.storage_data.pop(next(iter(metadata.storage_data)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (all_extents(relative_path="../../etc/passwd"), "no shard of a checkpoint"),
        (all_extents(relative_path="/dev/zero"), "no shard of a checkpoint"),
        (all_extents(relative_path="__9_9.distcp"), "cannot be opened"),
        (all_extents(length=1 << 50), "ends before the tensors"),
        (all_extents(offset=1 << 50), "ends before the tensors"),
        (all_extents(offset=-1), "where a size should be"),
        (all_extents(offset=7), "holds no tensor at 7"),
        (all_extents(offset=0, length=0), "holds no tensor at 0"),
        (all_extents(transform_descriptors=["zstd"]), "no shard of a checkpoint"),
        (set_shapes, "holds another tensor"),
        (set_types, "holds another tensor"),
        (drop_one, "names a tensor twice|describes other tensors"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 3), "where a dictionary should be"),
    ],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(DamagedError, match=words):
        read(tmp_path)


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    """A megabyte would unfold to a gigabyte."""

    def compress(metadata: Any) -> None:
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(1 << 20))
        (tmp_path / "__0_0.distcp").write_bytes(data.getvalue())
        all_extents(offset=0, length=len(data.getvalue()))(metadata)

    rewritten(tmp_path, compress)
    with pytest.raises(DamagedError, match="compressed"):
        read(tmp_path)


def nested_key(levels: int) -> bytes:
    """{((x, x), (x, x)): 1}, deeper: 2^levels steps for whoever hashes it."""
    build = b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(levels))
    return b"\x80\x04}(K\x01" + build + b"K\x01u."


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04",
        b"\x80\x04K\x01" * 9,
        b"\x80\x04X\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"(" * 100_000 + b".",
        b"\x80\x04t.",
        b"\x80\x04h\x05.",
        b"I" + b"9" * 100_000 + b"\n.",
        nested_key(60),
    ],
    ids=[
        "empty",
        "stop",
        "no stop",
        "numbers",
        "long text",
        "long bytes",
        "marks",
        "no mark",
        "no memo",
        "digits",
        "key",
    ],
)
def test_other_pickles_are_refused_at_once(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(DamagedError):  # the key would take years
        OldShards(tmp_path)


def test_a_memo_at_a_huge_index_takes_no_memory() -> None:
    assert parse(b"\x80\x02K\x07r\xff\xff\xff\xff.") == 7


@pytest.mark.parametrize("command", [b"e", b"a"])
def test_a_dictionary_is_not_appended_to(command: bytes) -> None:
    """One flipped bit makes that of setting its items."""
    assert parse(b"\x80\x02}(X\x01\x00\x00\x00kK\x07u.") == [("k", 7)]
    with pytest.raises(ValueError, match="Pairs in place of list"):
        parse(b"\x80\x02}" + (b"(K\x07e." if command == b"e" else b"K\x07a."))


@settings(deadline=None)
@given(st.data())
def test_damaged_metadata_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Old checkpoints have no checksums: a flipped bit is an error or another name, and never a crash."""
    folder = tmp_path_factory.mktemp("old")
    written(folder)
    content = bytearray((folder / METADATA).read_bytes())
    bit = data.draw(st.integers(0, 1 << 20)) % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    (folder / METADATA).write_bytes(content)
    try:
        found: Mapping[str, Tensor] = read(folder)
    except DamagedError:
        return
    assert all(isinstance(tensor, Tensor) for tensor in found.values())
