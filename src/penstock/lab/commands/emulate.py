"""`penstock emulate`: clusters of network namespaces, and the options that run a command in one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from penstock.cli.out import add
from penstock.config import UNSET, ConfigError
from penstock.lab.emulate import (
    Cluster,
    EmulateConfig,
    EmulationError,
    Uplink,
    check_available,
    clusters,
    format_rate,
    open_cluster,
    parse_rate,
    parse_shape,
    remove_stale,
)

Commands = argparse._SubParsersAction  # argparse has no public name for it
Run = Callable[[argparse.Namespace], int]

DEFAULT_INTER, DEFAULT_INTRA, DEFAULT_MTU_BYTES = "1gbit", "8gbit", 9000

MEETING_PORT: Final = "29500"
"""torchrun's default. Nothing else listens in a new namespace, so programs can use it to meet."""


@dataclass(frozen=True, kw_only=True)
class Emulation(EmulateConfig):
    """A cluster that is emulated for the ranks of one command."""

    def cluster(self) -> Cluster:
        """Return the cluster, which is up while it is entered."""
        return Cluster(self)


def add_emulate(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `emulate`."""
    emulate = commands.add_parser(
        "emulate",
        help="make a cluster with slow links on this machine",
        description="Makes, changes and removes clusters of Linux network namespaces with rate-limited "
        "links. Needs root, and the commands ip and tc.",
        epilog="Example: penstock emulate up 2x4 --inter-rate 700mbit, then penstock emulate list",
    )
    actions = emulate.add_subparsers(required=True, metavar="ACTION")
    up = _action(actions, "up", _up, "make a cluster that stays until `down`")
    add(up, "shape SHAPE", "NODESxDEVICES, such as 2x4")
    _add_rates(up)
    _add_mtu(up)
    down = _action(actions, "down", _down, "remove a cluster and end what runs in it")
    add(down, "id ID", "as `up` and `list` print it", nargs="?")
    add(down, "--all", "all clusters made by `up`; clusters of running commands stay")
    _action(actions, "list", _list, "list clusters, their uplinks and the bytes sent over them")
    what = "run a command as one of the ranks; its environment is what torchrun would give it"
    execute = _action(actions, "exec", _exec, what, prints=False)
    _add_id(execute)
    add(execute, "rank RANK", "counted from 0", type=int)
    add(execute, "argv -- CMD", "the command and its arguments", nargs=argparse.REMAINDER)
    rate = _action(actions, "rate", _rate, "change rates, also while something runs")
    _add_id(rate)
    _add_rates(rate, defaults=False)
    add(rate, "--node N", "change only this node", type=int)
    for name, run, what in (
        ("cut", partial(_switch, Cluster.cut), "take the uplink of a node down"),
        ("restore", partial(_switch, Cluster.restore), "take the uplink of a node up again"),
    ):
        parser = _action(actions, name, run, what)
        _add_id(parser)
        add(parser, "node NODE", "counted from 0", type=int)


def add_emulation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a command runs its ranks in a cluster of its own; see `emulation`."""
    group = parser.add_argument_group(
        "emulated cluster", "Linux, root, and the commands ip and tc are needed."
    )
    add(group, "--emulate SHAPE", "run on NODESxDEVICES emulated by network namespaces, e.g. 2x4")
    _add_rates(group)
    _add_mtu(group)


def emulation(options: argparse.Namespace) -> Emulation | None:
    """Return the cluster that these options ask for; None if they ask for none."""
    if options.emulate is not None:
        return _cluster_config(options, options.emulate, "--emulate")
    given = {"--inter-rate": options.inter_rate, "--intra-rate": options.intra_rate, "--mtu": options.mtu}
    for name, value in given.items():
        if value is not None:
            hint = "Add --emulate NODESxDEVICES, such as --emulate 2x1."
            raise ConfigError(name, value, "is for emulated links, and none are asked for", hint)
    return None


# ---- arguments ---------------------------------------------------------------------------------------------


def _action(
    actions: Commands[argparse.ArgumentParser], name: str, run: Run, what: str, *, prints: bool = True
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    if prints:
        add(parser, "--json", "print one JSON object")
    parser.set_defaults(run=lambda options, given: run(options))
    return parser


def _add_id(parser: argparse.ArgumentParser) -> None:
    add(parser, "id ID", "as `up` and `list` print it")


def _add_rates(parser: argparse._ActionsContainer, *, defaults: bool = True) -> None:
    for name, what, default in (
        ("--inter-rate", "rate of each node's uplink, per direction", DEFAULT_INTER),
        ("--intra-rate", "rate of each device's link inside its node", DEFAULT_INTRA),
    ):
        note = f" (default: {default})" if defaults else ""
        add(parser, f"{name} RATE", f"{what}{note}")


def _add_mtu(parser: argparse._ActionsContainer) -> None:
    what = "largest packet: 9000, as in cluster networks, or 1500 (default: 9000)"
    add(parser, "--mtu BYTES", what, type=int)


def _cluster_config(options: argparse.Namespace, shape: str, key: str) -> Emulation:
    try:
        parsed = parse_shape(shape, key)
    except ConfigError as error:
        if error.key == key:
            raise
        own = error.why if error.key == "shape" else f"{error.key} {error.why}"
        raise ConfigError(key, shape, own, error.hint) from error
    return Emulation(
        nodes=parsed.nodes,
        devices=parsed.devices,
        inter_rate_bit_per_s=parse_rate(options.inter_rate or DEFAULT_INTER, "--inter-rate"),
        intra_rate_bit_per_s=parse_rate(options.intra_rate or DEFAULT_INTRA, "--intra-rate"),
        mtu_bytes=DEFAULT_MTU_BYTES if options.mtu is None else options.mtu,
    )


# ---- actions -----------------------------------------------------------------------------------------------


def _up(options: argparse.Namespace) -> int:
    config = _cluster_config(options, options.shape, "SHAPE")
    check_available()
    cluster = Cluster(config, persistent=True)
    cluster.up()
    ranks = [
        {"rank": rank, "namespace": namespace, "address": cluster.address(rank)}
        for rank, namespace in enumerate(cluster.namespaces)
    ]
    lines = [
        f"{cluster.name}: {_describe(config)}",
        *("  rank {rank:<3} {address:<15} {namespace}".format(**rank) for rank in ranks),
        f"run something in it: penstock emulate exec {cluster.name} 0 -- CMD",
        f"remove it:           penstock emulate down {cluster.name}",
    ]
    return _print(options, {"id": cluster.name, **asdict(cluster.config), "ranks": ranks}, lines)


def _down(options: argparse.Namespace) -> int:
    if bool(options.id) == options.all:
        raise ConfigError(
            "ID", UNSET, "say which cluster", "Give an ID of `penstock emulate list`, or --all."
        )
    check_available()
    removed = list(remove_stale()) if options.all else []
    names = [state.name for state in clusters() if state.owner is None] if options.all else [options.id]
    for name in names:
        open_cluster(name).down()
        removed.append(name)
    return _print(
        options, {"removed": removed}, [f"removed {name}" for name in removed] or ["nothing to remove"]
    )


def _list(options: argparse.Namespace) -> int:
    check_available()
    entries, lines = [], []
    for state in clusters():
        cluster = Cluster(state.config, persistent=state.owner is None, name=state.name)
        whole = state.is_whole and not state.is_stale  # else links may be missing: the kernel knows nothing
        try:
            uplinks = cluster.uplinks() if whole else ()
        except (EmulationError, KeyError):  # it is being made, or removed
            whole, uplinks = False, ()
        entries.append(
            {
                "id": cluster.name,
                **asdict(cluster.config),
                "owner_pid": state.owner and state.owner.pid,
                "stale": state.is_stale,
            }
        )
        entries[-1]["uplinks"] = list(map(asdict, uplinks))
        belongs = "until `down`" if whole else f"incomplete: `penstock emulate down {state.name}` removes it"
        if state.owner is not None:
            belongs = f"of process {state.owner.pid}{', which is gone' if state.is_stale else ''}"
        lines += [f"{state.name}: {_describe(state.config)}, {belongs}", *_uplink_lines(uplinks)]
    return _print(options, {"clusters": entries}, lines or ["no emulated clusters"])


def _exec(options: argparse.Namespace) -> int:
    """Replace this process by the command, so that its exit code and signals are the command's own."""
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise ConfigError("CMD", UNSET, "there is no command to run", "For example `-- ip address`.")
    check_available()
    cluster = open_cluster(options.id)
    command = cluster.command(_below(options.rank, cluster.config.shape.ranks, "RANK"), argv)
    environ = {"MASTER_PORT": MEETING_PORT, **os.environ, **cluster.environ(options.rank)}
    sys.stdout.flush()
    os.execvpe(command[0], command, environ)


def _rate(options: argparse.Namespace) -> int:
    if options.inter_rate is None and options.intra_rate is None:
        hint = "Give one or both, such as --inter-rate 300mbit."
        raise ConfigError("--inter-rate, --intra-rate", UNSET, "there is no rate to set", hint)
    inter, intra = (
        None if rate is None else parse_rate(rate, key)
        for rate, key in ((options.inter_rate, "--inter-rate"), (options.intra_rate, "--intra-rate"))
    )
    check_available()
    cluster = open_cluster(options.id)
    if options.node is not None:
        _below(options.node, cluster.config.nodes, "--node")
    cluster.set_rate(inter=inter, intra=intra, node=options.node)
    return _print_uplinks(options, cluster)


def _switch(change: Callable[[Cluster, int], None], options: argparse.Namespace) -> int:
    check_available()
    cluster = open_cluster(options.id)
    change(cluster, _below(options.node, cluster.config.nodes, "NODE"))
    return _print_uplinks(options, cluster)


def _below(number: int, count: int, key: str) -> int:
    if not 0 <= number < count:
        raise ConfigError(
            key, number, f"must be from 0 to {count - 1}", "`penstock emulate list` shows shapes."
        )
    return number


# ---- output ------------------------------------------------------------------------------------------------


def _print(options: argparse.Namespace, found: dict[str, Any], lines: Iterable[str]) -> int:
    print(json.dumps(found) if options.json else "\n".join(lines))
    return 0


def _print_uplinks(options: argparse.Namespace, cluster: Cluster) -> int:
    uplinks = cluster.uplinks()
    entry = {"id": cluster.name, "uplinks": list(map(asdict, uplinks))}
    return _print(options, entry, [f"{cluster.name}: {cluster.config.shape}", *_uplink_lines(uplinks)])


def _uplink_lines(uplinks: Iterable[Uplink]) -> list[str]:
    lines = []
    for uplink in uplinks:
        rate, up = format_rate(uplink.rate_bit_per_s), "up" if uplink.is_up else "CUT"
        sent_mb, received_mb = (each / 1e6 for each in (uplink.sent_bytes, uplink.received_bytes))
        crossed = f"sent {sent_mb:.1f} MB, received {received_mb:.1f} MB"
        lines.append(f"  node {uplink.node:<3} uplink {rate:<8} {up:<3}  {crossed}")
    return lines


def _describe(config: EmulateConfig) -> str:
    inter, intra = format_rate(config.inter_rate_bit_per_s), format_rate(config.intra_rate_bit_per_s)
    shape = f"{config.shape} ({config.nodes} nodes of {config.devices})"
    return f"{shape}, made with uplinks {inter}, inside {intra}"
