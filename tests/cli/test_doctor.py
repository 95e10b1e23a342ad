"""`lockstep doctor`: what it looks at, what it advises, and how it says so."""

from __future__ import annotations

import json
import socket

import pytest
import torch

import lockstep
from lockstep.cli import doctor
from lockstep.cli.main import main


def by_name():
    return {each.name: each for each in doctor.look()}


def test_it_measures_every_backend_and_size_between_two_ranks(capsys):
    assert main(["doctor", "--json", "--rounds", "1", "--timeout", "250"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["value"] for each in told["findings"]}["PyTorch"] == torch.__version__
    measured = {(row["backend"], row["bytes"]) for row in told["all_reduce"]}
    assert measured == {(name, size) for name in doctor.usable_backends() for size in (4 << 10, 1 << 20, 64 << 20)}
    assert all(row["seconds"] > 0 and row["copies"] > 0 for row in told["all_reduce"])
    assert len(told["work_seconds"]) == 2
    assert min(told["work_seconds"]) > 0


@pytest.mark.parametrize(
    ("work", "status", "words"),
    [
        ([1.0, 1.02], "ok", "rank 1 takes 1.02 times"),
        ([2.0, 1.0], "note", 'balance="speed") would deal 16 shares as 5 + 11, and save 31% of a step'),
        ([1.0], "ok", "one rank"),
    ],
)
def test_a_slow_rank_is_named_with_the_deal_that_would_help(work, status, words):
    found = doctor._speeds(work)
    assert found.status == status
    assert words in f"{found.value} {found.advice}"


def test_a_finding_is_a_line_and_advice_another(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert main(["doctor", "--no-timing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  lockstep") and lockstep.__version__ in line for line in lines)
    number = next(i for i, line in enumerate(lines) if line.startswith("? intra-op threads"))
    assert "-> each of several ranks would use all cores" in lines[number + 1]


def test_what_will_not_work_makes_the_exit_code_1(capsys, monkeypatch):
    def no_address(*_, **__):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    assert main(["doctor", "--no-timing"]) == 1
    assert "! host name" in capsys.readouterr().out


def test_a_host_name_under_which_other_hosts_do_not_reach_this_one_is_marked(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    found = by_name()["host name"]
    assert found.status == "note"
    assert found.value in ("localhost is 127.0.0.1, a loopback address", "localhost is ::1, a loopback address")
    assert "set GLOO_SOCKET_IFNAME on each host to the interface that leads to the others" in found.advice


@pytest.mark.parametrize(("name", "status"), [("lo", "ok"), ("nosuch0", "problem")])
def test_the_interface_that_is_set_for_gloo_is_looked_at(monkeypatch, name, status):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    found = by_name()["interface"]
    assert found.status == status
    assert found.value == ("lo, 127.0.0.1" if name == "lo" else "nosuch0 has no address")


def test_a_measurement_that_fails_is_a_finding(capsys):
    assert main(["doctor", "--json", "--timeout", "0"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][-1]["status"] == "problem"
    assert "have not ended in time" in told["findings"][-1]["advice"]


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "note"), ("2.11.0", "ok"), ("2.15.9+cpu", "ok"), ("3.0", "note")]
)
def test_versions_of_torch_that_are_not_tested_are_told(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert by_name()["PyTorch"].status == status


def test_without_memory_that_can_be_shared_shm_is_not_offered(monkeypatch):
    def refused(name):
        raise OSError("refused")

    monkeypatch.setattr("os.memfd_create", refused)
    assert "shm" not in doctor.usable_backends()
    assert by_name()["backends"].status == "note"
