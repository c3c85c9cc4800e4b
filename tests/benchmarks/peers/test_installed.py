"""What is said when a peer cannot be used. No peer is imported here."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import pytest

from benchmarks.peers import require
from benchmarks.peers.build import leave_out_renamings
from benchmarks.peers.installed import PACKAGES
from penstock.config import ConfigError
from penstock.lab.bench.config import PEERS

PROJECT = Path(__file__).parents[3]


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "deepspeed", ("penstock-has-no-such-package", "1.0"))
    with pytest.raises(ConfigError) as caught:
        require("deepspeed")
    said = "package penstock-has-no-such-package is not installed. Run pip install --editable '.[peers]'."
    assert str(caught.value) == f'peer = "deepspeed": {said}'


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "megatron", ("numpy", "0.0.1"))
    with pytest.raises(ConfigError, match=r"its adapter fits numpy 0\.0\.1, and \S+ is installed\. Run pip"):
        require("megatron")


def test_an_unknown_peer_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="Use some of deepspeed, megatron"):
        require("tutel")


def test_the_extra_and_the_adapters_name_the_same_versions() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    pins = [f"{package}=={version}" for package, version in PACKAGES.values()]
    assert sorted(project["optional-dependencies"]["peers"]) == sorted(pins)
    assert set(pins) <= set((PROJECT / "constraints.txt").read_text().split())
    assert set(PEERS) == set(PACKAGES)


def test_what_torch_has_renamed_is_no_news_to_who_compares() -> None:
    """The table stands below what packages of peers make torch warn of; everything else is still said."""
    renamed = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another one instead."
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        leave_out_renamings()
        warnings.warn(renamed, FutureWarning, stacklevel=1)
        warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in told] == ["something else is deprecated"]
