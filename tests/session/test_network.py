"""Under which address others reach this host. Several hosts: tests/hosts."""

from __future__ import annotations

import socket

import pytest

from lockstep._base import network
from lockstep.errors import OptionError

OF_NOBODY = "192.0.2.1"  # for documentation: RFC 5737


def test_the_way_to_this_host_is_loopback():
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_towards("localhost") in ("127.0.0.1", "::1")
    assert network.address_towards("no such host") is None


def test_an_interface_and_its_addresses():
    assert network.addresses_of("lo")[0] == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.addresses_of("nosuch0") == []
    assert network.interface_of(OF_NOBODY) is None


def test_the_addresses_of_this_host():
    assert network.is_own("127.0.0.1")
    assert not network.is_own(OF_NOBODY)
    assert network.is_loopback("127.0.1.1")
    assert network.is_loopback("::1")
    assert not network.is_loopback(OF_NOBODY)


def test_the_interface_that_the_user_has_chosen(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.chosen_address() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    assert network.chosen_address() == "127.0.0.1"
    assert network.reachable_address([OF_NOBODY]) == "127.0.0.1"
    assert network.address_for_gloo([OF_NOBODY]) is None  # Gloo finds it itself
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(OptionError, match=r"GLOO_SOCKET_IFNAME is 'nosuch0', but this host has no such .* it has lo"):
        network.chosen_address()


@pytest.mark.parametrize("name", ["localhost", "no such host"])
def test_a_host_whose_own_name_is_of_no_use_to_others(monkeypatch, name):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert not network.own_name_is_reachable()
    assert network.reachable_address(["127.0.0.1"]) is None
    assert network.address_for_gloo(["127.0.0.1"]) is None  # nothing better is known
