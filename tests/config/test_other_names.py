"""Settings under other programs' names: taken with a hint, and refused where they contradict."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from penstock.config import ConfigError, OtherNameWarning, from_dict, load, to_dict, to_toml
from penstock.topology import ParallelConfig
from penstock.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Section:
    ALSO_CALLED: ClassVar[Mapping[str, str]] = {"width": "hidden_size", "breadth": "hidden_size"}

    hidden_size: int = 8
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Section = field(default_factory=Section)


def loaded(tmp_path: Path, text: str, *overrides: str) -> tuple[Config, list[str]]:
    """The configuration, and the hints on the way to it."""
    path = tmp_path / "config.toml"
    path.write_text(text)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = load(Config, path, overrides)
    assert all(each.category is OtherNameWarning for each in told)
    return config, [str(each.message) for each in told]


@pytest.mark.parametrize(
    ("text", "overrides", "hints"),
    [
        ("[model]\nwidth = 16", (), ["model.width"]),
        ("", ("model.width=16",), ["model.width"]),
        ("[model]\nwidth = 4", ("model.hidden_size=16",), ["model.width"]),
        ("[model]\nhidden_size = 4", ("model.breadth=16",), ["model.breadth"]),
        ("[model]\nwidth = 4", ("model.breadth=16",), ["model.width", "model.breadth"]),
        ("[model]\nhidden_size = 16", ("model.depth=3",), []),
    ],
)
def test_the_later_counts_under_whatever_name(
    tmp_path: Path, text: str, overrides: tuple[str, ...], hints: list[str]
) -> None:
    config, told = loaded(tmp_path, text, *overrides)
    assert config.model.hidden_size == 16
    assert told == [f"{hint}: taken as model.hidden_size" for hint in hints]
    assert to_dict(config)["model"].keys() == {"hidden_size", "depth"}
    assert "width" not in to_toml(config)


@pytest.mark.parametrize("names", [("width", "hidden_size"), ("width", "breadth")])
def test_two_names_for_one_setting_in_one_place_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    text = "[model]\n" + "\n".join(f"{name} = 16" for name in names)
    with pytest.raises(ConfigError, match=r"the same as model\.hidden_size, which is set as well"):
        loaded(tmp_path, text)


def test_a_wrong_value_is_refused_under_the_own_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model\.hidden_size = "wide": must be a whole number'):
        loaded(tmp_path, "", "model.width=wide")


def test_given_tables_stay_as_they_are() -> None:
    table = {"width": 16}
    with pytest.warns(OtherNameWarning):
        assert from_dict(Section, table, "file").hidden_size == 16
    assert table == {"width": 16}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.pp_size=2", "parallel.pp_size = 2: Penstock has no pipeline parallelism. Leave it out."),
        ("parallel.pipeline_model_parallel_size=2", "no pipeline parallelism"),
        ("parallel.context_parallel_size=2", "no context parallelism"),
        ("megatron.cp_size=2", "megatron.cp_size: Penstock has no context parallelism"),
    ],
)
def test_what_others_have_and_penstock_has_not(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [override])
    assert said in str(caught.value) and "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("theirs", "ours"), list(ParallelConfig.ALSO_CALLED.items()))
def test_megatrons_names(theirs: str, ours: str) -> None:
    with pytest.warns(OtherNameWarning, match=rf"parallel\.{theirs}: taken as parallel\.{ours}"):
        config = load(RunConfig, None, [f"parallel.{theirs}=2"])
    assert getattr(config.parallel, ours) == 2
