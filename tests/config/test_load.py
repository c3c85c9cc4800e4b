"""Configuration: what is accepted, what every refusal says, and that saving and loading are inverse."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config import UNSET, ConfigError, OtherNameWarning, from_dict, load, to_dict, to_toml
from penstock.topology import ParallelConfig
from penstock.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class MoE:
    num_experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = 1.25
    aux_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            why = f"must be between 1 and num_experts ({self.num_experts})"
            raise ConfigError("top_k", self.top_k, why, f"Use {self.num_experts} or fewer.")


@dataclass(frozen=True, kw_only=True)
class Model:
    hidden_size: int = 64
    moe: MoE = field(default_factory=MoE)


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int
    schedule: Literal["sequential", "flowmoe", "fsmoe"] = "flowmoe"
    degree: Literal[1, 2, 4] = 1
    resume: bool = False
    out: Path = Path("runs")
    name: str | None = None
    files: tuple[str, ...] = ()
    betas: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Config:
    train: Train
    seed: int = 0
    model: Model = field(default_factory=Model)
    big: MoE = field(default_factory=lambda: MoE(num_experts=64, capacity_factor=None))
    link: Link | None = None
    links: tuple[Link, ...] = ()


Load = Callable[..., Config]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Loads the given TOML text from a file, with overrides."""

    def from_text(text: str, *overrides: str) -> Config:
        path = tmp_path / "config.toml"
        path.write_text(text)
        return load(Config, path, overrides)

    return from_text


def refusal(*overrides: str, text: str | None = None, tmp_path: Path | None = None) -> ConfigError:
    """The error that loading raises."""
    path = None
    if text is not None and tmp_path is not None:
        path = tmp_path / "config.toml"
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(Config, path, overrides)
    return caught.value


# ---- accepted ----------------------------------------------------------------------------------------------


def test_a_file_fills_nested_sections_and_leaves_defaults(load_text: Load) -> None:
    config = load_text('seed = 3\n[train]\nsteps = 10\nout = "a/b"\n[model.moe]\ntop_k = 4\n')
    assert (config.seed, config.train.steps, config.train.out) == (3, 10, Path("a/b"))
    assert config.model == Model(moe=MoE(top_k=4))


def test_overrides_beat_the_file_and_the_last_one_counts(load_text: Load) -> None:
    config = load_text("[train]\nsteps = 10\n", "train.steps=20", " train.steps = 30 ", "model.moe.top_k=1")
    assert config.train.steps == 30
    assert config.model.moe.top_k == 1


def test_a_file_is_not_needed() -> None:
    assert load(Config, None, ["train.steps=1"]) == Config(train=Train(steps=1))


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.name=first", lambda c: c.train.name == "first"),
        ('train.name="two words"', lambda c: c.train.name == "two words"),
        ("train.name=7", lambda c: c.train.name == "7"),
        ('train.name="1e308"', lambda c: c.train.name == "1e308"),
        ("train.name=2026-01-31", lambda c: c.train.name == "2026-01-31"),
        ("train.name=a=b", lambda c: c.train.name == "a=b"),
        ("train.name=x\nother = 1", lambda c: c.train.name == "x\nother = 1"),
        ("train.out=runs/7", lambda c: c.train.out == Path("runs/7")),
        ("train.resume=true", lambda c: c.train.resume is True),
        ("train.schedule=fsmoe", lambda c: c.train.schedule == "fsmoe"),
        ("train.degree=4", lambda c: c.train.degree == 4),
        ('train.files=["a", "b"]', lambda c: c.train.files == ("a", "b")),
        ("train.betas=[0.9, 1]", lambda c: c.train.betas == (0.9, 1.0)),
        ("train.betas=None", lambda c: c.train.betas is None),
        ("model.moe.capacity_factor=none", lambda c: c.model.moe.capacity_factor is None),
        ("model.moe.aux_loss_coeff=1", lambda c: isinstance(c.model.moe.aux_loss_coeff, float)),
        ("model.moe.aux_loss_coeff=1e-3", lambda c: c.model.moe.aux_loss_coeff == 0.001),
        ("big.top_k=64", lambda c: c.big == MoE(num_experts=64, capacity_factor=None, top_k=64)),
        ("link.rate=2.5", lambda c: c.link == Link(rate=2.5)),
        ("links=[{rate = 2}, {}]", lambda c: c.links == (Link(rate=2.0), Link())),
    ],
)
def test_an_override_reads_as(override: str, read: Callable[[Config], bool]) -> None:
    assert read(load(Config, None, ["train.steps=1", override]))


@pytest.mark.parametrize("key", ["train.name", "train.out"])
@pytest.mark.parametrize("value", ["[[1]]", "[]", "{}", "{a = 1}", "true", "0.5", "1e308", "inf", "nan"])
def test_what_spells_another_kind_of_value_is_no_text(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, None, ["train.steps=1", f"{key}={value}"])
    assert caught.value.key == key and caught.value.value is not UNSET and caught.value.hint


def test_an_empty_path_is_refused(load_text: Load) -> None:
    """It would stand for the folder that one is in."""
    for refused in (
        lambda: load_text('[train]\nsteps = 1\nout = ""\n'),
        lambda: load(Config, None, ["train.steps=1", "train.out="]),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert caught.value.key == "train.out"


MIXTURE = "[data.mixture]\na = 3\nb = 1\n"


@pytest.mark.parametrize(
    ("overrides", "mixture", "path"),
    [
        (["data.mixture.c=1"], {"a": 3, "b": 1, "c": 1}, None),
        (["data.mixture={c=1}"], {"c": 1}, None),
        (["data.mixture={c=1}", "data.mixture={d=1}"], {"d": 1}, None),
        (["data.mixture={c=1}", "data.mixture.d=1"], {"c": 1, "d": 1}, None),
        (["data.mixture={}"], {}, None),
        (["data.path=x", "data.mixture={}"], {}, "x"),
    ],
)
def test_a_table_that_is_given_whole_replaces_that_of_the_file(
    overrides: list[str], mixture: dict[str, int], path: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "mixture.toml"
    file.write_text(MIXTURE)
    data = load(RunConfig, file, overrides).data
    assert (dict(data.mixture), data.path) == (mixture, path)


def test_a_section_said_to_be_none_may_be_set_again(load_text: Load) -> None:
    assert load_text('link = "none"\n[train]\nsteps = 1\n').link is None
    assert load_text('link = "none"\n[train]\nsteps = 1\n', "link.rate=3").link == Link(rate=3.0)
    assert load_text("[train]\nsteps = 1\n[link]\n", "link=none").link is None


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.moe.top_k=9",
            "model.moe.top_k = 9: must be between 1 and num_experts (8). Use 8 or fewer.",
        ),
        (
            "model.moe.topk=2",
            "model.moe.topk = 2: there is no such setting. Did you mean model.moe.top_k?",
        ),
        ("trian.steps=1", "trian.steps: there is no section trian. Did you mean train.steps?"),
        ("trian.at_all=1", "trian.at_all: there is no section trian. Did you mean train?"),
        ("nothing.steps=1", "nothing.steps: there is no section nothing. Did you mean train.steps?"),
        (
            "nothing.at_all=1",
            "nothing.at_all: there is no section nothing. There are train, model, big, link.",
        ),
        (
            "top_k=2",
            "top_k = 2: there is no such setting. Did you mean model.moe.top_k?",
        ),
        (
            "model.moe.xyz=2",
            "model.moe.xyz = 2: there is no such setting. "
            "[model.moe] has num_experts, top_k, capacity_factor, aux_loss_coeff.",
        ),
        (
            "zzz=2",
            "zzz = 2: there is no such setting. The top level has train, seed, model, big, link, links.",
        ),
        ("seed=abc", 'seed = "abc": must be a whole number. For example seed=8.'),
        ("seed=1.0", "seed = 1.0: must be a whole number. For example seed=8."),
        ("seed=true", "seed = true: must be a whole number. For example seed=8."),
        ("seed=none", 'seed = "none": must be a whole number. For example seed=8.'),
        ("train.resume=1", "train.resume = 1: must be true or false. For example train.resume=true."),
        (
            "model.moe.aux_loss_coeff=true",
            "model.moe.aux_loss_coeff = true: must be a number. For example model.moe.aux_loss_coeff=0.5.",
        ),
        (
            "model.moe.capacity_factor=much",
            'model.moe.capacity_factor = "much": must be a number, or none. '
            "For example model.moe.capacity_factor=0.5.",
        ),
        (
            "train.schedule=flomoe",
            'train.schedule = "flomoe": must be one of sequential, flowmoe, fsmoe. Did you mean flowmoe?',
        ),
        (
            "train.schedule=9",
            "train.schedule = 9: must be one of sequential, flowmoe, fsmoe. "
            'For example train.schedule="sequential".',
        ),
        ("train.degree=3", "train.degree = 3: must be one of 1, 2, 4. For example train.degree=1."),
        (
            "train.files=a",
            'train.files = "a": must be a list, each item of which must be text. '
            'For example train.files=["first"].',
        ),
        (
            'train.betas=[0.9, "x"]',
            'train.betas[1] = "x": must be a number. For example train.betas[1]=0.5.',
        ),
        (
            "train=5",
            "train = 5: is a section of settings and cannot be set as one. "
            "Set what is inside it, such as train.steps=8.",
        ),
        ("seed.x.y=1", "seed = {x = {y = 1}}: must be a whole number. For example seed=8."),
        ("seed", "seed: is not a setting with a value. Write section.key=value, such as seed=8."),
        (
            "train.name",
            'train.name: is not a setting with a value. Write section.key=value, such as train.name="first".',
        ),
        ("=4", "=4: is not a setting with a value. Write section.key=value, such as train.steps=8."),
        ("links=[{speed = 2}]", "links[0].speed = 2: there is no such setting. [links[0]] has rate."),
    ],
)
def test_a_refused_override_says(override: str, message: str) -> None:
    assert str(refusal("train.steps=1", override)) == message


def test_a_missing_setting_is_named() -> None:
    message = "train.steps: is missing; it must be a whole number. For example train.steps=8."
    assert str(refusal()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 5", "train = 5: is a section of settings and cannot be set as one."),
        ("[trains]\nsteps = 5", "trains.steps: there is no section trains. Did you mean train.steps?"),
        ("[train]\nsteps = 1\nnam = 2", "train.nam = 2: there is no such setting. Did you mean train.name?"),
        ("[train]\nsteps = 2026-01-31", 'train.steps = "2026-01-31": must be a whole number.'),
        ("[train]\nsteps = 1\n[train.name]\na = 1", "train.name = {a = 1}: must be text, or none."),
    ],
)
def test_a_refused_file_says(text: str, message: str, tmp_path: Path) -> None:
    assert str(refusal(text=text, tmp_path=tmp_path)).startswith(message)


def test_an_override_inside_a_section_replaces_what_the_file_gives_as_a_value(load_text: Load) -> None:
    assert load_text("train = 5", "train.steps=3").train.steps == 3


def test_an_override_of_a_section_is_laid_over_what_the_file_says_of_it(load_text: Load) -> None:
    train = load_text('train = {steps = 4, name = "a"}', "train={steps = 5}").train
    assert (train.steps, train.name) == (5, "a")


def test_everything_that_is_wrong_is_found_at_once() -> None:
    error = refusal("train.steps=x", "model.moe.top_k=9", "sed=1", "link.rate=true")
    assert [each.key for each in (error, *error.others)] == [
        "sed",
        "train.steps",
        "model.moe.top_k",
        "link.rate",
    ]


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(Config, None, ["train.steps=1", "train.out=~/runs/x"]).train.out == Path("/home/me/runs/x")
    found = refusal("train.steps=1", "train.out=~nobody-of-that-name/x")
    assert (found.key, found.why) == ("train.out", "starts with ~USER, but there is no such user")


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    error = refusal(text="seed = 1\n[train]\nsteps 5\n", tmp_path=tmp_path)
    assert "config.toml: is not valid TOML" in str(error)
    assert "line 3" in str(error)


def test_a_file_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b"seed = 1\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(line 2\)\. Save it as UTF-8"):
        load(Config, path)


def test_an_error_carries_its_parts_and_survives_pickling() -> None:
    error = ConfigError("top_k", 9, "must be at most 8", "Use 8.").under("moe").under("")
    assert (error.key, error.value, error.why, error.hint) == ("moe.top_k", 9, "must be at most 8", "Use 8.")
    assert str(pickle.loads(pickle.dumps(error))) == "moe.top_k = 9: must be at most 8. Use 8."
    assert str(ConfigError("a", UNSET, "is odd")) == "a: is odd."
    assert str(ConfigError("a", None, "is odd")) == "a = none: is odd."


# ---- saved -------------------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = TEXT.filter(lambda text: text.lower() != "none")


@st.composite
def moes(draw: st.DrawFn) -> MoE:
    num_experts = draw(st.integers(1, 1000))
    return MoE(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        capacity_factor=draw(st.none() | FLOATS),
        aux_loss_coeff=draw(FLOATS),
    )


LINKS = st.builds(Link, rate=FLOATS)
TRAINS = st.builds(
    Train,
    steps=st.integers(),
    schedule=st.sampled_from(["sequential", "flowmoe", "fsmoe"]),
    degree=st.sampled_from([1, 2, 4]),
    resume=st.booleans(),
    out=TEXT.map(Path),
    name=st.none() | NAMES,
    files=st.lists(TEXT, max_size=3).map(tuple),
    betas=st.none() | st.lists(FLOATS, max_size=2).map(tuple),
)
CONFIGS = st.builds(
    Config,
    train=TRAINS,
    seed=st.integers(),
    model=st.builds(Model, hidden_size=st.integers(), moe=moes()),
    big=moes(),
    link=st.none() | LINKS,
    links=st.lists(LINKS, max_size=2).map(tuple),
)


@given(config=CONFIGS)
@example(config=Config(train=Train(steps=1, out=Path("~0"))))
def test_what_is_saved_loads_as_the_same(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load(Config, path) == config


@given(config=CONFIGS)
def test_plain_data_is_json(config: Config) -> None:
    data = to_dict(config)
    assert json.loads(json.dumps(data)) == data
    assert data["train"]["name"] == config.train.name
    assert list(data) == ["train", "seed", "model", "big", "link", "links"]


def test_none_is_saved_as_such() -> None:
    text = to_toml(Config(train=Train(steps=1), model=Model(moe=MoE(capacity_factor=None))))
    assert text.count('capacity_factor = "none"') == 2
    assert 'link = "none"' in text


def test_a_text_that_reads_as_none_is_not_saved() -> None:
    with pytest.raises(ConfigError, match=r'train\.name = "None": cannot be saved'):
        to_toml(Config(train=Train(steps=1, name="None")))


# ---- configurations by name --------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def test_a_shipped_configuration_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(RunConfig, Path("tiny")) == load(RunConfig, ROOT / "configs" / "tiny.toml")


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text("[train]\nsteps = 7\n")
    assert load(RunConfig, Path("tiny")).train.steps == 7


def test_a_folder_of_that_name_is_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's, perhaps."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert load(RunConfig, Path("tiny")) == load(RunConfig, ROOT / "configs" / "tiny.toml")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("small", "Check the path"), ("configs/tiny.toml", "Write tiny,"), ("elsewhere/tiny", "Check the path")],
)
def test_nothing_else_is_guessed(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documentation's commands have the path that the file has in a copy of the repository."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=hint):
        load(RunConfig, Path(name))


# ---- other programs' names ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Section:
    ALSO_CALLED: ClassVar[Mapping[str, str]] = {"width": "hidden_size", "breadth": "hidden_size"}

    hidden_size: int = 8
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class Renamed:
    model: Section = field(default_factory=Section)


def loaded(tmp_path: Path, text: str, *overrides: str) -> tuple[Renamed, list[str]]:
    """The configuration, and the hints on the way to it."""
    path = tmp_path / "config.toml"
    path.write_text(text)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = load(Renamed, path, overrides)
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
