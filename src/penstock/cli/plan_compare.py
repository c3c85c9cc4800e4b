"""`penstock plan --against` and `--sweep`: plans beside each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from penstock.cli.plan_search import Searching, find_best, searching
from penstock.cli.plan_subject import (
    OF_CONFIGURATIONS,
    SIZES,
    WORDS,
    budget_of,
    cluster_of,
    memory_of,
    refuse_set,
    replaced,
    subject_of,
)
from penstock.cli.run import INTERRUPTED
from penstock.config import ConfigError, asked, expanded, read_json
from penstock.config.files import found_or_shipped
from penstock.cost.clusters.line import EXAMPLE, in_line
from penstock.plan import PlanFile
from penstock.plan.candidate import NothingFitsError
from penstock.plan.explain import reasons
from penstock.plan.models import model_name
from penstock.report.plans_compared import Side, Sweep, TwoPlans
from penstock.words import whole_number

T = TypeVar("T")

OF_LINES: Final = ("net", "inside")
"""Parts of a cluster in a line that a sweep may change."""

ALONE: Final = ("out", "show", "routing", "price")
"""Options of one plan, which have no meaning for several."""


def compared(options: argparse.Namespace, width: int) -> int:
    """Print two plans beside each other; return the exit code."""
    _check_alone("--against", options)
    one = _own(options)
    with _named(options.against):
        other = _other(options, options.against)
    with searching() as search:
        found_one = one(search)
        with _named(options.against):
            found = TwoPlans(one=found_one, other=other(search))
    return _printed(found, search, options, width)


def swept(options: argparse.Namespace, width: int) -> int:
    """Print a plan for every value of a setting; return the exit code."""
    _check_alone("--sweep", options)
    name, equals, listed = options.sweep.partition("=")
    name, values = name.strip(), [each.strip() for each in listed.split(",") if each.strip()]
    if not equals or not values:
        why = "is no setting with values"
        raise ConfigError("--sweep", options.sweep, why, "Write it like net=25,100,400 or ep_size=8,16,32.")
    sought = [(value, _fitting(_with(options, "--sweep", name, value))) for value in values]
    with searching() as search:
        sides = [(value, side(search)) for value, side in sought]
    return _printed(Sweep(name=name, sides=sides), search, options, width)


def _fitting(options: argparse.Namespace) -> Callable[[Searching], Side | str]:
    """Return a search as `_searched`; where nothing fits, it returns the reason."""

    def tried(work: Callable[[], T]) -> T | str:
        try:
            return work()
        except NothingFitsError as error:
            return f"nothing fits: {error.why}"

    side = tried(lambda: _searched(options))
    return lambda search: side if isinstance(side, str) else tried(lambda: side(search))


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of which plan it is that nothing fits: the other one."""
    try:
        yield
    except NothingFitsError as error:
        why = f"{error.key} is {error.value}, and {error.why}"
        raise NothingFitsError("--against", what, why, error.hint) from error


def _printed(found: TwoPlans | Sweep, search: Searching, options: argparse.Namespace, width: int) -> int:
    print(json.dumps(found.to_dict()) if options.json else found.to_text(width), end="")
    return INTERRUPTED if search.stopped() else 0


def _check_alone(key: str, options: argparse.Namespace) -> None:
    why = f"is an option for one plan, and {key} makes several"
    refuse_set(options, ALONE, why, "Remove one of the two options.")


def _own(options: argparse.Namespace) -> Callable[[Searching], Side]:
    """Return what finds the plan that the command's own options ask for, or that a file has."""
    if options.config is not None and (file := _saved(options.config)) is not None:
        return lambda _: Side.of_file(file)
    return _searched(options)


def _searched(options: argparse.Namespace) -> Callable[[Searching], Side]:
    """Return the search with these options; what is wrong with them is said before any search begins."""
    subject = subject_of(options, cluster_of(options))
    memory, budget = memory_of(options.memory_gib, subject.memory_bytes), budget_of(options, subject)

    def found(search: Searching) -> Side:
        own = search.with_budget(memory, budget)
        best, plan, _ = find_best(subject, own.find, own.quick)
        return Side.of(best, plan, reasons(best.problem, plan, memory))

    return found


def _other(options: argparse.Namespace, what: str) -> Callable[[Searching], Side]:
    """Return what finds the other plan: of a file, changed options, or another model or configuration."""
    if not what.strip():
        hint = "Give a plan file, a model, or what is to change, such as ep_size=8."
        raise ConfigError("--against", what, "is empty", hint)
    path = expanded(what, "--against")
    if (file := _saved(path)) is not None:
        return lambda _: Side.of_file(file)
    if "=" in what and not asked(path.exists):
        return _searched(_changed(options, what))
    has_settings = False
    if path.suffix == ".json" and asked(path.is_file):
        from penstock.autotune.choose import layouts  # loads torch

        has_settings = layouts.has_settings(path)
    alone = replaced(options, config=None, model=None, overrides=[])
    if found_or_shipped(path).suffix in (".toml", ".yaml", ".yml") or has_settings:
        return _searched(replaced(alone, config=path))
    if path.suffix == ".json" and not asked(path.is_dir) and not asked(path.is_file):
        raise ConfigError("--against", what, "there is no such file", "Give a plan file or a config.json.")
    try:
        return _searched(replaced(alone, model=model_name(what)))
    except ConfigError as error:
        if error.key != "--model":
            raise
        raise ConfigError("--against", what, error.why, error.hint) from error


def _saved(path: Path) -> PlanFile | None:
    """Return the plan in a file; None for a file that is something else, or that is not there."""
    if path.suffix != ".json" or not asked(path.is_file):
        return None
    table = read_json(path, "Give a plan file or the config.json of a model.")
    if not (isinstance(table, dict) and {"choice", "sizes"} <= table.keys()):
        return None
    file = PlanFile.read(path)
    file.check_alone(str(path))
    return file


def _changed(options: argparse.Namespace, what: str) -> argparse.Namespace:
    """Return the options with changes such as `ep_size=8,tp_size=2`, or with another `cluster=`."""
    if what.startswith("cluster="):
        if not (cluster := what.removeprefix("cluster=").strip()):
            raise ConfigError("--against cluster", "", "is empty", f"Such as cluster={EXAMPLE}.")
        return replaced(options, cluster=cluster)
    for assignment in what.split(","):
        name, _, value = (part.strip() for part in assignment.partition("="))
        options = _with(options, "--against", name, value)
    return options


def _with(options: argparse.Namespace, key: str, name: str, value: str) -> argparse.Namespace:
    """Return the options with one changed. Raises ConfigError about `key` for what cannot be."""
    own = name.replace("-", "_")
    if own in OF_LINES:
        return replaced(options, cluster=_with_part(options.cluster, key, own, value))
    if "." in name or (options.model is None and own in OF_CONFIGURATIONS):
        setting = name if "." in name else OF_CONFIGURATIONS[own]
        return replaced(options, overrides=[*options.overrides, f"{setting}={value}"])
    if own in SIZES:
        if not (number := whole_number(value)):
            raise ConfigError(f"{key} {name}", value, "must be a whole number from 1 up", "Such as 8.")
        return replaced(options, **{own: number})
    if own in WORDS:
        if value not in WORDS[own]:
            raise ConfigError(
                f"{key} {name}", value, "is none of its values", f"Use {', '.join(WORDS[own])}."
            )
        return replaced(options, **{own: value})
    if own == "model":
        return replaced(options, config=None, overrides=[], model=model_name(value))
    names = ", ".join((*OF_LINES, *SIZES, *WORDS))
    hint = f"Use one of {names}, or a setting section.key."
    raise ConfigError(key, name, "is nothing that a plan can change", hint)


def _with_part(cluster: str | None, key: str, name: str, value: str) -> str:
    """Return a cluster's line with another rate; a plain number is in Gbit/s."""
    rate = f"{value}gbit" if value.replace(".", "", 1).isdecimal() else value
    others = [part for part in (cluster or "").split(",") if not part.strip().startswith(f"{name}=")]
    line = ",".join([*others, f"{name}={rate}"])
    try:
        file = in_line(line)  # the line alone may lack the rate that is added here
    except ConfigError as error:
        raise ConfigError(
            f"{key} {name}", value, error.why, "Write a rate such as 100 or 8x400gbit."
        ) from error
    if file is None:
        why = "is a part of a cluster in a line, and --cluster names a file or one that comes with Penstock"
        hint = "Describe the cluster in a line, such as 4x8xA100-80GB,net=100gbit."
        raise ConfigError(f"{key} {name}", value, why, hint)
    return line
