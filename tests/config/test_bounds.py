"""No number of a setting or of a file is without bounds, and every bound is kept."""

from __future__ import annotations

import importlib
import math
import pkgutil
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.config import ConfigError, Items, Within, check_bounds, from_dict, to_toml
from penstock.config.bounds import Text, section_of, types_of
from penstock.cost import ClusterFile
from penstock.lab.bench.config import BenchConfig
from penstock.lab.emulate.config import EmulateConfig
from penstock.lab.emulate.state import ClusterState
from penstock.plan import PlanFile
from penstock.plan.subject import Overrides
from penstock.train.config import RunConfig
from penstock.workloads import RoutingConfig

ROOTS = (
    RunConfig,
    BenchConfig,
    ClusterFile,
    PlanFile,
    ClusterState,
    EmulateConfig,
    Overrides,
    RoutingConfig,
)
"""What is read from files and command lines; their sections are found from here."""

CHECKED_OTHERWISE = {"Portion", "Slot"}
"""Sums of portions must be the bytes of a layer's gradients, and a slot one of the layers below it."""

CHECKED_BY_READERS = {"Decision"}
"""Searches make thousands; section [schedule] is one that checks itself, and a plan file checks its own."""


def bare(tp: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and what is annotated to it."""
    return (get_args(tp)[0], get_args(tp)[1:]) if get_origin(tp) is Annotated else (tp, ())


def sections(*roots: type) -> Iterator[type]:
    """The dataclasses that can be reached from fields of these, themselves among them."""
    seen: set[type] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        tp, _ = bare(waiting.pop())
        if isinstance(tp, type) and is_dataclass(tp):
            if tp not in seen:
                seen.add(tp)
                yield tp
                hints = get_type_hints(tp, include_extras=True)
                waiting += [hints[field.name] for field in fields(tp) if field.init]
        else:
            waiting += get_args(tp)


def unbounded(tp: Any) -> Iterator[str]:
    """What a value of this type may hold without bounds."""
    inner, marks = bare(tp)
    if inner in (int, float) and not any(isinstance(mark, Within) for mark in marks):
        yield inner.__name__
    if get_origin(inner) is tuple and not any(isinstance(mark, Items) for mark in marks):
        yield "list"
    if get_origin(inner) in (Union, UnionType, tuple):
        for each in get_args(inner):
            yield from unbounded(each)


SECTIONS = sorted(sections(*ROOTS), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_number_and_list_has_bounds(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    found = {field.name: list(unbounded(hints[field.name])) for field in fields(cls) if field.init}
    without = {name: what for name, what in found.items() if what}
    if cls.__name__ in CHECKED_OTHERWISE | {"Partition"}:
        return
    assert not without, f"give {cls.__name__} bounds for {without}, such as Annotated[int, Within(...)]"


def test_every_section_of_every_configuration_is_looked_at() -> None:
    """A class whose name ends in Config belongs to a root above, or nobody would check it."""
    found = set()
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if ".peers" not in module.name and not module.name.endswith("__main__"):
            members = vars(importlib.import_module(module.name)).values()
            found |= {each for each in members if isinstance(each, type) and is_dataclass(each)}
    named = {
        cls for cls in found if cls.__name__.endswith("Config") and cls.__module__.startswith("penstock")
    }
    assert named and named <= set(SECTIONS)


def bounded_numbers() -> Iterator[tuple[type, str, Within]]:
    for cls in SECTIONS:
        required = any(f.init and f.default is MISSING and f.default_factory is MISSING for f in fields(cls))
        if required or cls.__name__ in CHECKED_BY_READERS:
            continue  # tests of its file break its numbers
        for name, tp in get_type_hints(cls, include_extras=True).items():
            options = get_args(tp) if get_origin(tp) in (Union, UnionType) else (tp,)
            yield from (
                (cls, name, mark) for each in options for mark in bare(each)[1] if isinstance(mark, Within)
            )


@pytest.mark.parametrize(("cls", "name", "bound"), list(bounded_numbers()))
def test_what_is_beyond_is_refused_by_name(cls: type, name: str, bound: Within) -> None:
    beyond: list[float] = [bound.high * 10 + 1, bound.low - 1, 10**400, math.inf, -math.inf, math.nan]
    for value in beyond:
        with pytest.raises(ConfigError) as caught:
            replace(cls(), **{name: value})
        assert caught.value.key.strip("-").replace("-", "_") in (name, "mtu", "shape")
        message = str(caught.value)
        assert caught.value.why and caught.value.hint and "\n" not in message and len(message) < 600


# ---- values that nobody means ------------------------------------------------------------------------------

ABSURD: tuple[object, ...] = (
    *(True, 0, -1, 10**400, 0.5, 1e308, math.inf, -math.inf, math.nan),
    *("", "x" * 10_000, [], [[1]], [1, [2]], [""], {}, {"a": [1]}),
)
NAMED_BY_A_LIST = {"preset", "dispatch", "name", "schedules", "peers"}
"""Texts of which only some are known."""


def leaves(cls: type, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every single setting of a configuration: its place and its type."""
    for name, tp in types_of(cls).items():
        section = section_of(tp)
        yield from leaves(section, (*before, name)) if section else [((*before, name), tp)]


SETTINGS = [(root, place, tp) for root in (RunConfig, BenchConfig) for place, tp in leaves(root)]


@pytest.mark.parametrize(("root", "place"), [(root, place) for root, place, _ in SETTINGS], ids=str)
def test_every_value_is_usable_or_refused_by_the_name_of_its_setting(
    root: type, place: tuple[str, ...]
) -> None:
    """Usable: it is saved and read again as it is, and a run of it is accepted or refused in a sentence."""
    for value in ABSURD:
        table: Any = value
        for name in reversed(place):
            table = {name: table}
        try:
            config: Any = from_dict(root, table, "")
            again = tomllib.loads(to_toml(config))
            assert from_dict(root, again, "") == config, value
            if isinstance(config, RunConfig):
                config.resolved(2)
        except ConfigError as error:
            message = str(error)
            assert place[-1] in message or error.key.partition(".")[0] == place[0], (value, message)
            assert error.why and error.hint and "\n" not in message and len(message) < 1000, message


def test_every_text_and_path_has_a_longest_one() -> None:
    without = {
        ".".join(place)
        for _, place, tp in SETTINGS
        if place[-1] not in NAMED_BY_A_LIST and list(unbounded_texts(tp))
    }
    assert not without, "annotate them with Text(...), such as bounds.Name or bounds.FilePath"


def unbounded_texts(tp: Any) -> Iterator[str]:
    """What a value of this type may hold that is of any length."""
    inner, marks = bare(tp)
    if inner in (str, Path) and not any(isinstance(mark, Text) for mark in marks):
        yield inner.__name__
    if get_origin(inner) in (Union, UnionType, tuple):
        for each in get_args(inner):
            yield from unbounded_texts(each)


# ---- the check itself --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One of everything that can be bounded."""

    whole: Annotated[int, Within(1, 8, "of a reason")] = 1
    part: Annotated[float, Within(0, 1, "it is a share", above=True, below=True)] | None = None
    numbers: Annotated[tuple[Annotated[int, Within(0, 9, "digits")], ...], Items(3, "few", least=1)] = (1,)

    def __post_init__(self) -> None:
        check_bounds(self)


@given(whole=st.integers(-3, 12), part=st.none() | st.floats(), numbers=st.lists(st.integers(-2, 11)))
def test_a_section_is_valid_or_refused(whole: int, part: float | None, numbers: list[int]) -> None:
    valid = 1 <= whole <= 8 and (part is None or 0 < part < 1)
    valid = valid and 1 <= len(numbers) <= 3 and all(0 <= number <= 9 for number in numbers)
    try:
        Sample(whole=whole, part=part, numbers=tuple(numbers))
    except ConfigError as error:
        assert not valid and error.hint
    else:
        assert valid


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whole": 9}, "whole = 9: must be from 1 to 8 (of a reason). Nearest valid: 8."),
        ({"whole": 0}, "whole = 0: must be from 1 to 8 (of a reason). Nearest valid: 1."),
        (
            {"part": 1.0},
            "part = 1.0: must be above 0 and below 1 (it is a share). Use a number abo",
        ),
        (
            {"part": math.nan},
            "part = nan: must be above 0 and below 1 (it is a share). Use a number abo",
        ),
        ({"numbers": (1, 10)}, "numbers[1] = 10: must be from 0 to 9 (digits). Nearest valid: 9."),
        (
            {"numbers": (1, 2, 3, 4)},
            "numbers = [1, 2, 3, 4]: has 4 items and may have 1 to 3 (few).",
        ),
        ({"numbers": ()}, "numbers = []: has 0 items and may have 1 to 3 (few). Give some."),
        ({"whole": -(10**5000)}, "whole = -(a number of about 5001 digits): must be from 1 to 8"),
    ],
)
def test_a_refusal_says_what_holds_and_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sample(**settings)
    assert str(caught.value).startswith(message)


def test_the_defaults_are_within_their_bounds() -> None:
    for cls in (RunConfig, BenchConfig):
        check_bounds(cls())
    assert Path("runs/default") == RunConfig().output.dir
