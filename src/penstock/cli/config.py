"""`penstock config`: settings as a run reads them, and what is wrong with a file of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.cli.out import add, add_overrides, config_and_settings, user_path
from penstock.cli.run import BAD_USAGE, exit_code, say
from penstock.config import ConfigError, load, to_dict
from penstock.config.bounds import by_key, leaves
from penstock.config.described import help_text, json_schema, page
from penstock.config.error import shorten, toml_value
from penstock.stops import STOPS
from penstock.words import terminal_width

if TYPE_CHECKING:  # loads torch
    from penstock.train.config import RunConfig

DEFAULT: Final = "default"


def add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    config = commands.add_parser(
        "config",
        help="show, check and describe settings",
        description="Shows settings as a run reads them, checks files of them, and says what each means.",
        epilog="Example: penstock config show tiny train.steps=5. What settings mean: "
        "penstock train --help-settings",
    )
    actions = config.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print every setting, its value, and where that comes from",
        description="Prints every setting as a run would read it: its value, and whether FILE, the command "
        "line, the model's own file or preset, or the default says so.",
    )
    add(show, "config FILE", "TOML, YAML or JSON (default: defaults alone)", nargs="?")
    add_overrides(show, "FILE")
    add(show, "--format", "(default: toml)", choices=("toml", "yaml", "json"), default="toml")
    show.set_defaults(run=_show)
    validate = actions.add_parser(
        "validate",
        help="print everything that is wrong with files; code 2 if so",
        description="Prints everything that is wrong with files of settings; the exit code is 2 if "
        "anything is.",
    )
    validate.add_argument("files", nargs="+", type=user_path, metavar="FILE")
    validate.set_defaults(run=_validate)
    texts: dict[str, tuple[str, Callable[[type], str]]] = {
        "schema": ("print a JSON schema, for editors", lambda cls: json.dumps(json_schema(cls), indent=2)),
        "docs": ("print docs/settings.md", lambda cls: page(cls).rstrip("\n")),
    }
    for name, (what, make) in texts.items():
        action = actions.add_parser(name, help=what, description=f"Prints{what.removeprefix('print')}.")
        action.set_defaults(run=lambda options, given, make=make: _print(make))


class HelpSettings(argparse.Action):
    """Prints what settings mean, as --help prints what options do."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        """Print those of the section that was named, and end the command."""
        parser.exit(exit_code(lambda: print_settings(str(values[1]))))


def print_settings(section: str) -> int:
    """Print what every setting of a section means, and of all with ""; return the exit code."""
    text = help_text(_run_config(), section, terminal_width())
    if not text:
        sections = dict.fromkeys(key.partition(".")[0] for key, _ in leaves(_run_config()))
        raise ConfigError(
            section, ..., "there is no such section or setting", f"There are {', '.join(sections)}."
        )
    print(text)
    return 0


def _run_config() -> type[RunConfig]:
    with STOPS.loading():
        from penstock.train.config import RunConfig

    return RunConfig


def _print(make: Callable[[type], str]) -> int:
    print(make(_run_config()))
    return 0


def _show(options: argparse.Namespace, given: Sequence[str]) -> int:
    del given
    path, overrides = config_and_settings(options)
    cls = _run_config()
    from penstock.cli.ranks import ranks_of
    from penstock.plan.plan_config import given_schedule

    config = load(cls, path, given_schedule(overrides))
    try:
        ranks = config.parallel.processes or ranks_of(config, None, None)
    except ConfigError:  # staging without a GPU, which only a run that starts refuses
        ranks = ranks_of(replace(config, parallel=replace(config.parallel, transport="direct")), None, None)
    table = to_dict(config.with_sizes(ranks))
    asked, values = by_key(cls, to_dict(config)), by_key(cls, table)
    origin = {key: config.sources.get(key, (DEFAULT,))[0] for key in values}
    sized = "model.preset" if config.model.config is None else "model.config"
    origin |= {key: sized for key in values if values[key] != asked[key]}
    if options.format == "json":
        print(json.dumps({**table, "$from": {key: origin[key] for key in values}}, indent=2))
        return 0
    yaml, before = options.format == "yaml", ""
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section != before:
            print(("\n" if before else "") + (f"{section}:" if yaml else f"[{section}]"))
            before = section
        text = toml_value(value)
        if yaml:  # JSON on one line, but its escapes of two halves of a character are none of YAML's
            plain = json.dumps("none" if value is None else value, ensure_ascii=False)
            text = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in plain)
        print(f"{f'  {name}: ' if yaml else f'{name} = '}{text}  # {shorten(origin[key])}")
    return 0


def _validate(options: argparse.Namespace, given: Sequence[str]) -> int:
    del given
    wrong = 0
    for path in options.files:
        try:
            load(_run_config(), path)
        except ConfigError as error:
            errors = (error, *error.others)
            wrong += len(errors)
            for problem in errors:
                say(str(problem) if problem.key == str(path) else f"{path}: {problem}")
        else:
            print(f"{path}: valid")
    return BAD_USAGE if wrong else 0
