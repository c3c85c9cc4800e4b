"""The text of a run: the same on every rank or refused on all of them."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config import ConfigError, Table
from penstock.data import DataConfig
from penstock.mesh import Group
from penstock.models import ModelConfig
from penstock.topology import Control, Layout
from penstock.train.batches import HELD_OUT_BLOCKS, check_source, open_source
from penstock.train.config import RunConfig, TrainConfig
from penstock.train.logs import telling
from tests.support.ranks import Pools

LONELY = Layout(world_size=1, ep_size=1, rank=0)


def config_of(path: Path, batch: int = 4, seq_len: int = 16) -> RunConfig:
    data = DataConfig(path=str(path), batch_per_device=batch, held_out_fraction=0.1)
    return RunConfig(model=ModelConfig(seq_len=seq_len), data=data)


def write_text(path: Path, word: str, lines: int = 900) -> Path:
    path.write_text("".join(f"{word} {i} and {i * i}.\n" for i in range(lines)))
    return path


def error_on(rank: int, configs: list[RunConfig]) -> str:
    """What opening the text raises on this rank; the ranks' configurations differ in their path."""
    layout = Layout(world_size=len(configs), ep_size=1, rank=rank)
    try:
        open_source(configs[rank], layout, Control(rank, len(configs)))
    except ConfigError as error:
        return str(error)
    return ""


def opened_on(rank: int, config: RunConfig) -> tuple[dict[str, object], list[list[list[int]]]]:
    """The identity, and this rank's samples of the first three steps."""
    layout = Layout(world_size=2, ep_size=1, rank=rank)
    source = open_source(config, layout, Control(rank, 2))
    return dict(source.identity), [source.stream.batch(step).tokens_BL.tolist() for step in range(3)]


def test_different_texts_are_refused_on_both_ranks(ranks: Pools, tmp_path: Path) -> None:
    configs = [config_of(write_text(tmp_path / f"{word}.txt", word)) for word in ("left", "much")]
    first, second = ranks(2).run(error_on, configs)
    # The value is this rank's own path; all else is the same on both.
    assert "rank 1 reads another text than rank 0" in first
    assert first.startswith("data.path")
    assert first.replace("left.txt", "") == second.replace("much.txt", "")


def test_the_same_text_in_two_places_is_the_same(ranks: Pools, tmp_path: Path) -> None:
    configs = [config_of(write_text(tmp_path / f"{name}.txt", "line")) for name in ("a", "b")]
    assert ranks(2).run(error_on, configs) == ["", ""]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_problem_of_one_rank_is_raised_on_both(ranks: Pools, tmp_path: Path, missing: int) -> None:
    configs = [config_of(write_text(tmp_path / f"{rank}.txt", "line")) for rank in range(2)]
    configs[missing] = config_of(tmp_path / "nowhere")
    first, second = ranks(2).run(error_on, configs)
    assert first == second
    assert first.startswith("data.path")
    assert str(tmp_path / "nowhere") in first


def test_one_rank_and_two_see_the_same_samples(ranks: Pools, tmp_path: Path) -> None:
    path = write_text(tmp_path / "text.txt", "line")
    alone = open_source(config_of(path), Layout(world_size=1, ep_size=1, rank=0), Control(0, 1))
    (first, top), (second, bottom) = ranks(2).run(opened_on, config_of(path, batch=2))
    assert first == second == dict(alone.identity)
    for step in range(3):
        assert alone.stream.batch(step).tokens_BL.tolist() == top[step] + bottom[step]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_that_share_attention_read_the_same(tmp_path: Path, tp_size: int) -> None:
    """All groups together read what one process reads, in training and in evaluation."""
    config = config_of(write_text(tmp_path / "text.txt", "line"), batch=2 * tp_size)
    everyone = [Layout(world_size=4, ep_size=2, rank=rank, tp_size=tp_size) for rank in range(4)]
    sources = [open_source(config, layout, Control(0, 1)) for layout in everyone]
    whole = open_source(config_of(tmp_path / "text.txt", batch=8), LONELY, Control(0, 1))
    assert all(source.identity == whole.identity for source in sources)
    for batches in (
        [[source.stream.batch(1)] for source in sources],
        [list(source.stream.held_out_batches(9)) for source in sources],
    ):
        for layout, mine in zip(everyone, batches, strict=True):
            first = batches[layout.mesh.members(layout.rank, Group.TENSOR)[0]]
            for one, other in zip(mine, first, strict=True):
                assert torch.equal(one.tokens_BL, other.tokens_BL)
                assert torch.equal(one.sample_ids_B, other.sample_ids_B)
    wanted = whole.stream.batch(1)
    leaders = [s for s, layout in zip(sources, everyone, strict=True) if layout.tp_rank == 0]
    found = [source.stream.batch(1) for source in leaders]
    assert torch.equal(torch.cat([batch.tokens_BL for batch in found]), wanted.tokens_BL)
    assert torch.equal(torch.cat([batch.sample_ids_B for batch in found]), wanted.sample_ids_B)


def test_what_moves_the_samples_changes_the_identity(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text.txt", "line")
    config = config_of(path)
    data = config.data
    others = {
        "train.seed": replace(config, train=TrainConfig(seed=1)),
        "model.seq_len": config_of(path, seq_len=8),
        "data.held_out_fraction": replace(config, data=replace(data, held_out_fraction=0.2)),
        "data.batch_per_device x (processes / tp_size)": config_of(path, batch=3),
        "data.path (sha256 of the text)": config_of(write_text(tmp_path / "other.txt", "else")),
    }
    layout, control = LONELY, Control(0, 1)
    identity = open_source(config, layout, control).identity
    assert others.keys() == identity.keys()
    for key, other in others.items():
        found = open_source(other, layout, control).identity
        assert {k for k in identity if identity[k] != found[k]} == {key}


def test_runs_of_earlier_versions_that_held_out_something_else_are_others(tmp_path: Path) -> None:
    config = config_of(write_text(tmp_path / "text.txt", "line"))
    config = replace(config, data=replace(config.data, held_out_fraction=0.4))
    assert open_source(config, LONELY, Control(0, 1)).identity[HELD_OUT_BLOCKS] == [2, 5]


@pytest.mark.parametrize(("lines", "seq_len", "key"), [(900, 5000, "data."), (1, 16, "data.path")])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, lines: int, seq_len: int, key: str) -> None:
    path = write_text(tmp_path / "text.txt", "line", lines)
    with pytest.raises(ConfigError) as caught:
        open_source(config_of(path, seq_len=seq_len), LONELY, Control(0, 1))
    assert caught.value.key.startswith(key)


# ---- tokens ------------------------------------------------------------------------------------------------


def lines_config(folder: Path, vocab_size: int = 256) -> RunConfig:
    """Documents in a field, which a run prepares itself."""
    documents = [{"body": f"line {i} and {i * i}"} for i in range(300)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, documents)))
    data = DataConfig(
        path=str(folder / "text.jsonl"),
        field="body",
        cache=folder / "cache",
        batch_per_device=4,
        held_out_fraction=0.1,
        separate_documents=True,
    )
    return RunConfig(model=ModelConfig(seq_len=16, vocab_size=vocab_size), data=data)


def opened_lines(rank: int, config: RunConfig) -> tuple[object, list[str]]:
    """The identity of the text, and what was told meanwhile; the last rank neither prepares nor scans."""
    told: list[str] = []
    layout = Layout(world_size=2, ep_size=1, rank=rank)
    with telling(told.append):
        source = open_source(config, layout, Control(rank, 2), scans=rank == 0)
    documents_BL = source.stream.batch(0).documents_BL
    assert documents_BL is not None and documents_BL.any()
    return dict(source.identity), told


def test_tokens_are_prepared_once_and_found_again(ranks: Pools, tmp_path: Path) -> None:
    config = lines_config(tmp_path)
    check_source(config)
    (first, told), (second, quiet) = ranks(2).run(opened_lines, config)
    assert first == second and "preparing" in told[0] and not quiet
    check_source(config)
    (again, told), _ = ranks(2).run(opened_lines, config)
    assert again == first and not told
    shard = next((tmp_path / "cache").rglob("*.npy"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    errors = ranks(2).run(error_on, [config, config])
    assert errors[0] == errors[1] and f"{shard} is damaged" in errors[0] and ".." not in errors[0]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    config = lines_config(tmp_path)
    (tmp_path / "cache").touch()
    with pytest.raises(
        ConfigError, match=r"data\.cache = .*tokens cannot be written there \(Not a directory"
    ):
        open_source(config, LONELY, Control(0, 1))


def test_tokens_for_which_there_is_no_room_are_told_with_their_file(tmp_path: Path) -> None:
    config = lines_config(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(ConfigError) as caught:
            open_source(config, LONELY, Control(0, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.key == "data.cache" and "tokens-00000.npy" in caught.value.why


def test_a_line_that_is_no_document_ends_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    config = lines_config(tmp_path)
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write('\n{"text": ""}')
    first, second = ranks(2).run(error_on, [config, config])
    assert first == second and "has no field 'body'; name the one with the text" in first
    (tmp_path / "text.jsonl").write_text("\n")
    with pytest.raises(ConfigError) as caught:
        open_source(config, LONELY, Control(0, 1))
    assert (caught.value.key, caught.value.value) == ("data.path", config.data.path)


def test_a_model_must_know_every_token(tmp_path: Path) -> None:
    text = config_of(write_text(tmp_path / "text.txt", "line"))
    for config in (replace(text, model=ModelConfig(vocab_size=255)), lines_config(tmp_path, vocab_size=255)):
        for is_prepared in (False, True):
            with pytest.raises(
                ConfigError, match=r"model\.vocab_size = 255: .* has 256 different tokens\. Use 256"
            ):
                check_source(config)
            with pytest.raises(ConfigError, match=r"model\.vocab_size = 255"):
                open_source(config, LONELY, Control(0, 1))
            assert (tmp_path / "cache").exists() <= is_prepared
            open_source(replace(config, model=ModelConfig(seq_len=16)), LONELY, Control(0, 1))


def test_a_mixture_is_told_with_its_shares_and_is_another_text(tmp_path: Path) -> None:
    paths = [str(write_text(tmp_path / f"{word}.txt", word)) for word in ("left", "right")]
    found = []
    for weights in ((1, 3), (3, 1)):
        data = DataConfig(
            mixture=Table(zip(paths, weights, strict=True)), batch_per_device=4, held_out_fraction=0.1
        )
        config = RunConfig(model=ModelConfig(seq_len=16), data=data)
        check_source(config)
        found.append(open_source(config, LONELY, Control(0, 1)))
    assert found[0].identity != found[1].identity
    assert found[0].words.startswith(f"25 % {paths[0]}: 1 file") and "; 75 % " in found[0].words
    assert found[0].unigram_entropy_nats != found[1].unigram_entropy_nats
