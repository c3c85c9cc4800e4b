"""The text of BENCHMARKS.md, and what it tells of the machine."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.document import ANSWERED, INTRODUCTION, LIMITS, READING, Section, write_document
from benchmarks.machine import Machine, commit_of
from benchmarks.restore import restore
from penstock.lab.bench.result import render
from tests.benchmarks.results import NINE, THREE, result

MACHINE = Machine(
    cores=2,
    cpu="Some Processor 9000",
    memory_bytes=8 << 30,
    kernel="Linux 6.1.90",
    python="3.11.7",
    torch="2.13.0+cpu",
    date="2026-01-31",
    commit="0123456789",
)

TABLE = "2 ranks on 2 nodes\nphysical limit 500 ms\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"

GOOD = Section(
    title="A slow link",
    command="penstock bench --emulate 2x1 --inter-rate 300mbit",
    note="The bytes take longer than the computation.",
    table=TABLE,
    picture="docs/bench/slow.png",
)

BAD = Section(title="Peers", command="penstock bench --peers x", note="Others.", failure="exit code 2. No x.")

GOLDEN = f"""\
{INTRODUCTION}

**1 of 2 runs failed: Peers.** The others are complete.

## Machine

| | |
|---|---|
| processor | Some Processor 9000, 2 cores |
| memory | 8.0 GiB |
| system | Linux 6.1.90 |
| Python | 3.11.7 |
| PyTorch | 2.13.0+cpu |
| date | 2026-01-31 |
| commit | 0123456789 |

## At a glance

![Rates](docs/bench/rates.png)

The command also writes `docs/bench/index.html`: the same figures with all numbers, as a page for a browser.
It holds its plotting library, works without a network, and is too large for the repository.

{READING}

## A slow link

The bytes take longer than the computation.

```
penstock bench --emulate 2x1 --inter-rate 300mbit
```

- 2 ranks on 2 nodes
- physical limit 500 ms

| a | b |
|---|---|
| 1 | 2 |

![A slow link](docs/bench/slow.png)

## Peers

Others.

```
penstock bench --peers x
```

**This run failed:** exit code 2. No x.

{ANSWERED}

{LIMITS}
"""


def test_the_whole_document() -> None:
    overview = [("Rates", "docs/bench/rates.png")]
    assert write_document(MACHINE, [GOOD, BAD], overview, "docs/bench/index.html") == GOLDEN


def test_what_is_not_there_leaves_no_trace() -> None:
    text = write_document(replace(MACHINE, commit=None), [GOOD]).replace(f"{ANSWERED}\n\n", "")
    for word in ("failed", "commit", "At a glance", "\n\n\n"):
        assert word not in text


def test_a_section_has_a_table_or_a_failure() -> None:
    with pytest.raises(AssertionError, match="a table or a failure"):
        Section(title="Both", command="", note="", table="x", failure="y")


def test_lines_are_short_enough_to_read_as_they_are() -> None:
    text = "\n".join((INTRODUCTION, READING, LIMITS))
    assert max(len(line) for line in text.splitlines()) <= 110


# ---- results from JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [4e8, None])
@pytest.mark.parametrize("cases", [THREE, NINE])
def test_a_result_from_json_is_the_result(rate: float | None, cases: tuple[object, ...]) -> None:
    plain = result(rate, NINE if len(cases) == len(NINE) else THREE)
    again = restore(plain)
    assert again.to_dict() == plain and again.cases == cases
    assert restore(result(virtual="asleep")).virtual == "asleep"
    assert render(again).count("\n|") == 2 + len(cases)


# ---- the machine -------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    here = Machine.here()
    assert here.cores >= 1 and here.memory_bytes > 1 << 28
    assert here.cpu and here.torch and here.python == platform.python_version()
    assert re.fullmatch(r"Linux \d+(\.\d+)*", here.kernel)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", here.date)
    assert here.commit is None or re.fullmatch(r"[0-9a-f]{10,}\+?", here.commit)


def test_facts_hold_neither_paths_nor_the_name_of_the_host() -> None:
    values = [str(value) for value in Machine.here().to_dict().values()]
    assert not any(re.search(r"(^|\s)/\w", value) for value in values)
    assert not any(re.search(rf"\b{re.escape(platform.node())}\b", value) for value in values)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_commit_says_whether_files_differ(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = commit_of(tmp_path)
    assert clean is not None and re.fullmatch(r"[0-9a-f]{10,}", clean)
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{clean}+"
