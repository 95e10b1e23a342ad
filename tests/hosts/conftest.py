"""Several hosts on one machine: skipped by name where they cannot be made."""

from __future__ import annotations

import pytest

from hosts.network import missing


@pytest.fixture(scope="session", autouse=True)
def hosts_can_be_made():
    if reason := missing(("ip", "nft", "unshare")):
        pytest.skip(reason)
