"""`penstock list`: the names that other commands take."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

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

Rows = Sequence[Mapping[str, str]]

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
            console.print(f"{name.capitalize()}: {TAKEN_BY[name]}", style="bold")
            console.print(_table(rows, console.width))
    print(captured.get(), end="")
    return 0


def _listed() -> dict[str, Rows]:
    # The first line of the file that defines a schedule says what it is and where it comes from.
    texts = {name: inspect.getdoc(inspect.getmodule(type(system))) for name, system in SCHEDULES.items()}
    return {
        "open": [_open_model(name, path) for name, path in open_models().items()],
        "devices": [_device(device) for device in DEVICES],
        "models": [_model(name) for name in MODELS],
        "clusters": [_cluster(name) for name in cluster_names()],
        "schedules": [
            {"name": name, "what it does": (text or "").partition("\n")[0]} for name, text in texts.items()
        ],
        "workloads": [
            {"name": name, "what it does": ABOUT[name], "settings": ", ".join(read)}
            for name, read in READ_BY.items()
        ],
    }


def _open_model(name: str, path: Path) -> dict[str, str]:
    table = json.loads(path.read_text(encoding="utf-8"))
    experts = next(each for key, each in table.items() if key in COUNTS)
    top_k = table.get("num_experts_per_tok", table.get("moe_k"))
    return {
        "name": name,
        "family": table["model_type"],
        "layers": str(table["num_hidden_layers"]),
        "hidden": str(table["hidden_size"]),
        "experts": f"{experts}, top-{top_k}",
    }


def _device(device: Device) -> dict[str, str]:
    peak = device.peak_tflops(device.usual)
    return {
        "name": device.name,
        "TFLOP/s": f"{peak:g} {device.usual}",
        "memory GB, GB/s": f"{' or '.join(map(str, device.memory_gb))}, {device.memory_gb_per_s:g}",
        "GB/s inside a node": f"{device.link_gb_per_s:g} {device.link}",
    }


def _model(name: str) -> dict[str, str]:
    model = MODELS[name]
    experts = (
        f"{model.experts_per_device}/rank" if model.experts_per_device else f"{model.experts_per_node}/node"
    )
    return {
        "name": name,
        "layers": str(model.num_layers),
        "tokens per rank": f"{model.batch}x{model.seq_len}",
        "hidden / expert hidden": f"{model.hidden_size} / {model.ffn_hidden_size}",
        "experts": f"{experts}, top-{model.top_k}",
    }


def _cluster(name: str) -> dict[str, str]:
    cluster = find_cluster(name)
    about = (cluster.source or "").split(". ")[0]
    return {"name": name, "ranks": f"{cluster.nodes} x {cluster.ranks_per_node}", "what it is": about}


def _table(rows: Rows, width: int) -> Table:
    """Make a table of at most `width` columns, wrapped between words; what does not fit so is left out."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # A head may take two lines, rows had better not.
    cells = {head: [*head.split(), *(row[head] for row in rows)] for head in rows[0]}
    # Every head that fits has columns for its longest word at least; the rest goes where most lacks.
    width -= SIDES
    wanted = {head: max(map(len, column)) for head, column in cells.items()}
    widths = {
        head: wanted[head] if head == "name" else max(len(word) for cell in column for word in cell.split())
        for head, column in cells.items()
    }
    while sum(widths.values()) + GAP * (len(widths) - 1) > width and len(widths) > 1:
        del widths[max((head for head in widths if head != "name"), key=lambda head: widths[head])]
    for _ in range(width - sum(widths.values()) - GAP * (len(widths) - 1)):
        neediest = max(widths, key=lambda head: wanted[head] / widths[head])
        widths[neediest] += wanted[neediest] > widths[neediest]
    for head, columns in widths.items():
        table.add_column(head, no_wrap=head == "name", width=columns)
    for row in rows:
        table.add_row(*(row[column.header] for column in table.columns if isinstance(column.header, str)))
    return table
