"""Shapes and rates as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.lab.emulate import EmulateConfig, Shape, format_rate, parse_rate, parse_shape


@pytest.mark.parametrize(
    ("text", "rate_bit_per_s"),
    [
        ("700mbit", 7e8),
        ("2.5gbit", 2.5e9),
        ("100000bit", 1e5),
        (" 400 Kbit ", 4e5),
        ("100gbit", 1e11),
    ],
)
def test_rates(text: str, rate_bit_per_s: float) -> None:
    assert parse_rate(text) == rate_bit_per_s


@pytest.mark.parametrize("text", ["", "700", "mbit", "700mb", "-1mbit", "1e3mbit", "7 0mbit", "\u0667mbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text, "--inter-rate")
    assert str(caught.value).startswith("--inter-rate = ") and "700mbit" in str(caught.value)


@pytest.mark.parametrize("text", ["0mbit", "99kbit", "101gbit"])
def test_rates_that_no_link_has(text: str) -> None:
    with pytest.raises(ConfigError, match=f'rate = "{text}": must be from 100kbit to 100gbit'):
        parse_rate(text)


@given(st.integers(100, 100_000_000))
def test_a_formatted_rate_is_read_back(rate_kbit_per_s: int) -> None:
    rate_bit_per_s = rate_kbit_per_s * 1000.0
    assert parse_rate(format_rate(rate_bit_per_s)) == pytest.approx(rate_bit_per_s, rel=1e-5)


def test_shapes() -> None:
    assert parse_shape("2x4") == Shape(nodes=2, devices=4) == parse_shape(" 2 X 4")
    assert (parse_shape("2x4").ranks, str(parse_shape("2x4"))) == (8, "2x4")


@pytest.mark.parametrize("text", ["", "2", "2x", "x4", "2by4", "2x4x1", "-2x4", "0x4", "2x0", "1000x1000"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(ConfigError, match="2x4"):
        parse_shape(text)


def test_a_configuration_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"inter_rate_bit_per_s = 5\.0"):
        EmulateConfig(nodes=1, devices=1, inter_rate_bit_per_s=5.0)
    with pytest.raises(ConfigError, match="devices = 0"):
        EmulateConfig(nodes=1, devices=0)
