"""Names and addresses of the parts of a cluster."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from penstock.lab.emulate import Shape
from penstock.lab.emulate.links import NETWORK, Wiring

WIRING = Wiring(name="pen4711-0", shape=Shape(nodes=2, devices=2))


def test_namespaces_by_rank() -> None:
    assert WIRING.ranks == ("pen4711-0-n0d0", "pen4711-0-n0d1", "pen4711-0-n1d0", "pen4711-0-n1d1")
    assert WIRING.namespaces[4:] == ("pen4711-0-n0", "pen4711-0-n1", "pen4711-0-core")


def test_addresses_differ_and_are_for_benchmarks() -> None:
    largest = Wiring(name="pen1-0", shape=Shape(nodes=16, devices=16))
    addresses = {IPv4Address(largest.address(rank)) for rank in range(256)}
    assert len(addresses) == 256 and all(address in NETWORK for address in addresses)
    assert WIRING.address(0) == "198.18.0.1"


def test_every_end_of_a_link_is_another_interface_with_a_valid_name() -> None:
    links = [*WIRING.device_links(), *WIRING.uplinks()]
    ends = [end for link in links for end in link]
    assert len(set(ends)) == len(ends) == 2 * (4 + 2)
    assert all(len(end.interface) <= 15 for end in ends)
    assert WIRING.device_link(3)[1].namespace == WIRING.uplink(1)[0].namespace == "pen4711-0-n1"


@pytest.mark.parametrize("number", [-1, 4])
def test_what_there_is_not(number: int) -> None:
    with pytest.raises(ValueError, match="2x2 has ranks 0 to 3"):
        WIRING.address(number)
    with pytest.raises(ValueError, match="2x2 has nodes 0 to 1"):
        WIRING.uplink(number)
