"""Hostile files in all four formats: TOML configuration, cluster file, plan file, recorded routing.

Whatever is in them or instead of them, the answer is an object or one sentence, and it comes at once.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import ConfigError, load, parse_json
from penstock.config.files import parse_toml
from penstock.cost import ClusterFile
from penstock.cost.clusters import FOLDER
from penstock.plan import PlanFile
from penstock.plan.plan_file import PlanSizes
from penstock.train.config import RunConfig
from penstock.workloads import read_recording
from tests.support.draws import draws
from tests.workloads.test_recorded import HEADER, STEP

Read = Callable[[Path], object]
READERS: dict[str, Read] = {
    "config.toml": lambda path: load(RunConfig, path),
    "cluster.json": ClusterFile.read,
    "plan.json": PlanFile.read,
    "routing.jsonl": read_recording,
}
DIGITS, DEPTH = "9" * 5000, 5000
CLUSTER = (FOLDER / "fsmoe-testbed-b.json").read_text()
SIZES = [field.name for field in fields(PlanSizes)]
PLAN = {
    "model": "m",
    "cluster": "c",
    "predicted_s": 0.1,
    "lower_bound_s": 0.1,
    "memory_bytes": 1,
    "why": ["because"],
    "sizes": {
        **dict.fromkeys(SIZES, 1),
        "tokens": "split",
        "zero_stage": 0,
    },
    "choice": {
        "schedule": "flowmoe",
        "microbatches": 2,
        "all_reduce_chunk_bytes": 4096,
        "dispatch": "flat",
        "more": [],
        "partition": {"portions": [[]]},
    },
    "schedule": None,
}
VALID = {
    "config.toml": "[model]\nnum_layers = 2\n",
    "cluster.json": CLUSTER,
    "plan.json": json.dumps(PLAN),
    "routing.jsonl": f"{HEADER}\n{STEP}\n",
}


def refusal(read: Read, path: Path) -> ConfigError:
    """What is said of the file, which must be one sentence that fits on a screen."""
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert caught.value.key and caught.value.why and caught.value.hint
    assert path.name.strip("\0") in message
    return caught.value


@pytest.mark.parametrize("name", READERS)
def test_the_valid_file_that_is_broken_below_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(VALID[name])
    assert READERS[name](tmp_path / name)


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe", "zeros", "dangling", "socket", "nul in path"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe has no writer here, and /dev/zero no end: reading either would not come back."""
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "nul in path":
        path = tmp_path / f"\0{name}"
    refusal(READERS[name], path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf",
        b"\xc3\x28",
        b"\x00" * 4096,
        b"[" * DEPTH,
        b"{" * DEPTH,
        b'{"a":' * DEPTH,
        b'{"a":[' * DEPTH,
        b"a = " + b"[" * DEPTH,
        b"a = " + b"{b = " * DEPTH,
        b"a." * 100_000 + b"a = 1",
        f"a = {DIGITS}".encode(),
        DIGITS.encode(),
        b'"text"',
        b"null",
        b"[]",
        b"7",
        b"true",
        b"NaN",
        b'{"a": 1, "a": 2}',
        b"\r\n" * 100,
    ],
    ids=range(22),
)
def test_rubbish_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content + b"\n")
    if name == "config.toml" and not content.strip(b"\xef\xbb\xbf\r\n"):
        assert READERS[name](path) == RunConfig(), "an empty configuration is the default one"
        return
    refusal(READERS[name], path)


@pytest.mark.parametrize(("name", "most"), [("config.toml", "256 KiB"), ("cluster.json", "64 MiB")])
def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path, name: str, most: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse terabyte
    assert f"is larger than {most}" in str(refusal(READERS[name], path))


@pytest.mark.slow
def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "line 1 has over" in str(refusal(read_recording, path))


# ---- numbers -----------------------------------------------------------------------------------------------


def paths_toleaves(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every number, text, truth and null below."""
    if isinstance(tree, dict):
        return [path for key, inner in tree.items() for path in paths_toleaves(inner, (*here, key))]
    if isinstance(tree, list):
        return [path for key, inner in enumerate(tree) for path in paths_toleaves(inner, (*here, key))]
    return [here]


def spoilt(tree: Any, path: tuple[Any, ...], text: str) -> str:
    """The JSON of `tree` with `text` at `path`, which need not be what Python would write."""
    tree = json.loads(json.dumps(tree))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "<here>"
    return json.dumps(tree).replace('"<here>"', text)


HOSTILE = st.sampled_from(
    [
        DIGITS,
        f"-{DIGITS}",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "1" + "0" * 300,
        "-1",
        "0",
        "1e-320",
        "1.5",
        "2147483648",
        "9223372036854775808",
        '"\\ud800"',
        '"\\u0000"',
        '"' + "x" * 100_000 + '"',
        "[" * 900 + "]" * 900,
        "[" * DEPTH + "]" * DEPTH,
        '{"a":' * 300 + "1" + "}" * 300,
        "[" + "1," * 200_000 + "1]",
        "true",
        "null",
        "{}",
        "[]",
        '""',
    ]
)


@pytest.mark.parametrize("name", ["cluster.json", "plan.json"])
@given(data=st.data())
@draws(120)
def test_any_value_anywhere_is_taken_or_refused_by_name(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    """A valid object or one sentence. What is taken can be saved and is read as the same."""
    tree = json.loads(VALID[name])
    way = data.draw(st.sampled_from(paths_toleaves(tree)))
    text, path = spoilt(tree, way, data.draw(HOSTILE)), tmp_path / name
    path.write_text(text)
    try:
        found = READERS[name](path)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000 and error.why and error.hint
        assert name in error.key
    else:
        assert isinstance(found, ClusterFile | PlanFile)
        found.save(path)
        assert READERS[name](path) == found


@given(data=st.data())
@draws(120)
def test_any_value_in_a_recording_is_taken_or_refused_by_line(tmp_path: Path, data: st.DataObject) -> None:
    path, records = tmp_path / "routing.jsonl", [json.loads(line) for line in (HEADER, STEP, STEP)]
    way = data.draw(st.sampled_from(paths_toleaves(records)))
    lines = [json.dumps(record) for record in records]
    lines[way[0]] = spoilt(records[way[0]], way[1:], data.draw(HOSTILE))
    path.write_text("\n".join(lines) + "\n")
    try:
        found = read_recording(path)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000
        counted_up = "steps count up" in message  # named by the later of two
        assert f"line {way[0] + 1}" in message or way[0] == 0 or counted_up
    else:
        assert found.loads_SYE.shape == (2, 2, 3) and (found.loads_SYE >= 0).all()


def settings_of(cls: Any) -> list[str]:
    from penstock.config.bounds import leaves

    return [key for key, _ in leaves(cls)]


TOML_HOSTILE = st.sampled_from(
    [
        DIGITS,
        "0x" + "f" * 5000,
        "1e999",
        "nan",
        "-inf",
        "-1",
        "0",
        "1000000007",
        "9223372036854775808",
        "1e-320",
        '"\\u0000"',
        '"' + "x" * 10_000 + '"',
        "[" * 900 + "]" * 900,
        "[" * DEPTH + "]" * DEPTH,
        "{a = " * 200 + "1" + "}" * 200,
        "a." * 5000 + "a = 1",
        "[" + "1, " * 5000 + "1]",
        "2026-01-31",
        "1979-05-27T07:32:00Z",
        "[]",
        "",
        "=",
    ]
)


@given(key=st.sampled_from(settings_of(RunConfig)), text=TOML_HOSTILE, in_file=st.booleans())
@draws(300)
def test_any_value_of_any_setting_is_taken_or_refused_by_name(
    tmp_path: Path, key: str, text: str, in_file: bool
) -> None:
    """In a file as in an override, and one override more never makes a traceback."""
    path = tmp_path / "config.toml"
    section, _, name = key.rpartition(".")
    path.write_text(f"[{section}]\n{name} = {text}\n" if in_file else "")
    try:
        load(RunConfig, path, () if in_file else [f"{key}={text}"])
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000 and error.why and error.hint
        assert path.name.strip("\0") in message or error.key.startswith((section, "moe", "model", "schedule"))


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json", "run.JSON"])
def test_settings_in_yaml_and_json(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = '{"$schema": "penstock.json", "optimizer": {"lr": 0.0003}, "moe": {"capacity_factor": null}}'
    path.write_text(
        text if name.lower().endswith("json") else "optimizer:\n  lr: 3e-4\nmoe:\n  capacity_factor: null\n"
    )
    config = load(RunConfig, path)
    assert (config.optimizer.lr, config.moe.capacity_factor) == (3e-4, None)


@pytest.mark.parametrize(
    "text",
    [
        *("a: &a [1]\nb: *a\n", "a: 1\na: 2\n", "a: [", "- 1", "[" * DEPTH, "model: !!python/name:os.system"),
        *("? [a, b]\n: 1\n", "2020-01-01: 1\n", "model: {.nan: 1}", "output: {dir: !!binary aGVsbG8=}"),
        *("false", "0", '""', "model: {? {a: b} : 1}", "[" * 100_000),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    refusal(lambda path: load(RunConfig, path), tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"\\ud800": 1', "not valid Unicode"),
        ('{"model": {"\\ud800": 1}}', "not valid Unicode"),
        ("model.num_layers: 2", "Set it inside of its section"),
    ],
)
def test_names_in_yaml_that_no_section_has(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(RunConfig, tmp_path / "run.yaml")


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_is_a_table_or_wrong(text: str) -> None:
    for parse in (parse_json, parse_toml):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    "override", ["a" * 100_000, "=" * 1000, ".=1", "model.=1", "." * 10_000 + "=1", "x\ny=1"]
)
def test_an_override_that_is_none_is_one_line(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [override])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
