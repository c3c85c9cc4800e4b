"""`penstock list`: the names that other commands take."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.out import add
from penstock.cost.clusters import find_cluster
from penstock.cost.clusters import names as cluster_names
from penstock.cost.devices import DEVICES, Device
from penstock.plan.models import MODELS, open_models
from penstock.schedule import SCHEDULES
from penstock.words import terminal_width
from penstock.workloads.catalogue import ABOUT, READ_BY

Rows = Sequence[Mapping[str, Any]]

SIDES, GAP = 2, 3
"""Columns that a table takes on both sides together, and between two cells."""

TAKEN_BY: Final[Mapping[str, str]] = {
    "open": "penstock plan --model NAME",
    "devices": "penstock plan --cluster NODESxDEVICESxNAME,net=RATE",
    "models": "penstock plan --model NAME",
    "clusters": "penstock plan --cluster NAME",
    "schedules": "penstock schedule NAME, schedule.name=NAME, penstock bench --schedules NAME,NAME",
    "workloads": "penstock plan --routing NAME, virtual.routing=NAME",
}
TITLES: Final = {"open": "Open models", "models": "Models of the papers"}
CELLS: Final[Mapping[str, Mapping[str, str]]] = {
    "open": {
        "name": "{name}",
        "family": "{family}",
        "layers": "{layers}",
        "hidden": "{hidden}",
        "experts": "{experts}, top-{top_k}",
    },
    "devices": {
        "name": "{name}",
        "TFLOP/s": "{tflops:g} {precision}",
        "memory GB, GB/s": "{memory_gb}, {memory_gb_per_s:g}",
        "GB/s inside a node": "{link_gb_per_s:g} {link}",
    },
    "models": {
        "name": "{name}",
        "layers": "{layers}",
        "batch": "{batch}x{seq_len}",
        "hidden / expert hidden": "{hidden} / {expert_hidden}",
        "experts": "{experts}/{experts_per}, top-{top_k}",
    },
    "clusters": {"name": "{name}", "ranks": "{nodes} x {ranks_per_node}", "what it is": "{about}"},
    "schedules": {"name": "{name}", "what it does": "{about}"},
    "workloads": {"name": "{name}", "what it does": "{about}", "settings": "{settings}"},
}
"""The columns of every table: what a cell makes of the values that `--json` prints."""

COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""


def add_list(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    listing = commands.add_parser(
        "list",
        help="list models, devices, clusters, schedules and workloads",
        description="Lists the names that other commands take.",
        epilog="Example: penstock list clusters",
    )
    add(listing, "what", "one of them only", nargs="?", choices=TAKEN_BY)
    add(listing, "--json", "print one JSON object")
    listing.set_defaults(run=lambda options, given: print_list(options.what, json_wanted=options.json))


def print_list(what: str | None, *, json_wanted: bool) -> int:
    """Print tables for the terminal's width, or one JSON object; return exit code 0."""
    tables = {name: rows for name, rows in _listed().items() if what in (None, name)}
    if json_wanted:
        print(json.dumps(tables))
        return 0
    console = Console(width=terminal_width(), highlight=False)
    with console.capture() as captured:  # it would end the command where a pipe has no reader
        for name, rows in tables.items():
            console.print(f"{TITLES.get(name, name.capitalize())}: {TAKEN_BY[name]}", style="bold")
            cells = [
                {head: text.format(**_joined(row)) for head, text in CELLS[name].items()} for row in rows
            ]
            console.print(_table(cells, console.width))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0


def _joined(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its lists, of sizes or names, as text."""
    return {
        key: (", " if all(isinstance(each, str) for each in value) else " or ").join(map(str, value))
        if isinstance(value, list)
        else value
        for key, value in row.items()
    }


def _listed() -> dict[str, Rows]:
    # The first line of the file that defines a schedule says what it is and where it comes from.
    texts = {name: inspect.getdoc(inspect.getmodule(type(system))) for name, system in SCHEDULES.items()}
    return {
        "open": [_open_model(name, path) for name, path in open_models().items()],
        "devices": [_device(device) for device in DEVICES],
        "models": [_model(name) for name in MODELS],
        "clusters": [_cluster(name) for name in cluster_names()],
        "schedules": [
            {"name": name, "about": (text or "").partition("\n")[0]} for name, text in texts.items()
        ],
        "workloads": [
            {"name": name, "about": ABOUT[name], "settings": list(read)} for name, read in READ_BY.items()
        ],
    }


def _open_model(name: str, path: Path) -> dict[str, Any]:
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        "name": name,
        "family": table["model_type"],
        "layers": table["num_hidden_layers"],
        "hidden": table["hidden_size"],
        "experts": next(each for key, each in table.items() if key in COUNTS),
        "top_k": table.get("num_experts_per_tok", table.get("moe_k")),
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "tflops": device.peak_tflops(device.usual),
        "precision": device.usual,
        "memory_gb": list(device.memory_gb),
        "memory_gb_per_s": device.memory_gb_per_s,
        "link_gb_per_s": device.link_gb_per_s,
        "link": device.link,
    }


def _model(name: str) -> dict[str, Any]:
    model = MODELS[name]
    return {
        "name": name,
        "layers": model.num_layers,
        "batch": model.batch,
        "seq_len": model.seq_len,
        "hidden": model.hidden_size,
        "expert_hidden": model.ffn_hidden_size,
        "experts": model.experts_per_device or model.experts_per_node,
        "experts_per": "rank" if model.experts_per_device else "node",
        "top_k": model.top_k,
    }


def _cluster(name: str) -> dict[str, Any]:
    cluster = find_cluster(name)
    return {
        "name": name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "about": (cluster.source or "").split(". ")[0],
    }


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Make a table of at most `width` columns, wrapped between words; what does not fit so is left out."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = {head: [row[head] for row in rows] for head in rows[0]}
    # Columns have room for their longest word at least. What is left goes first where a row lacks most, then
    # where a head does: rows had better not take two lines.
    longest = {head: max(map(len, column)) for head, column in columns.items()}
    wanted = [longest, {head: max(len(head), most) for head, most in longest.items()}]
    words = {head: " ".join([head, *column]).split() for head, column in columns.items()}
    widths = {head: longest[head] if head == "name" else max(map(len, words[head])) for head in columns}
    room = width - SIDES + GAP
    while sum(widths.values()) + GAP * len(widths) > room and len(widths) > 1:
        del widths[max((head for head in widths if head != "name"), key=lambda head: widths[head])]
    for want in wanted:
        for _ in range(room - sum(widths.values()) - GAP * len(widths)):
            neediest = max(widths, key=lambda head: want[head] / widths[head])
            widths[neediest] += want[neediest] > widths[neediest]
    for head, most in widths.items():
        counts = all(map(str.isdecimal, columns[head]))
        table.add_column(head, no_wrap=head == "name", width=most, justify="right" if counts else "left")
    for row in rows:
        table.add_row(*(row[head] for head in widths))
    return table
