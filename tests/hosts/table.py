"""Prints the tables in benchmarks/results/several-hosts-*, measured with the default limits of a session.

As root: ``.venv/bin/python tests/hosts/table.py``; a quarter of an hour.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hosts.network import missing
from hosts.trials import BETWEEN, PAUSE, Plan, Told, run

LINK, STALL = 20.0, 60.0  # seconds: what a session has by itself

ROWS = [
    ("a process is killed", [Plan((2, 2), "kill", 3), Plan((1, 1, 1), "kill", 1, "gloo")]),
    ("the process that hosts the store is killed", [Plan((2, 2), "kill", 0), Plan((1, 1, 1), "kill", 0, "gloo")]),
    ("all processes of a host are killed", [Plan((2, 2), "kill host", 1), Plan((2, 2, 1), "kill host", 0, "gloo")]),
    ("an exception", [Plan((2, 2), "raise", 3), Plan((1, 1, 1), "raise", 0, "gloo")]),
    ("one of three hosts is cut off", [Plan((1, 1, 1), "cable", 1), Plan((2, 2, 1), "cable", 1, "gloo")]),
    ("the host with the store is cut off", [Plan((1, 1, 1), "cable", 0, "gloo"), Plan((2, 2, 1), "cable", 0)]),
    ("the network between two hosts fails", [Plan((2, 2), "cable", 1), Plan((2, 2), "cable", 0, "gloo")]),
    (
        "the network between two of several hosts fails",
        [Plan((1, 1, 1), BETWEEN, 0, other=1), Plan((2, 2, 1, 1), BETWEEN, 1, "gloo", other=3)],
    ),
    (
        "a cable is pulled, under `torchrun`",
        [Plan((2, 2), "cable", 1, launcher="torchrun"), Plan((1, 1, 1), "cable", 0, "gloo", launcher="torchrun")],
    ),
    ("packets to a host are lost, not those from it", [Plan((1, 1, 1), "input", 1), Plan((2, 2), "input", 0, "gloo")]),
    (
        "packets from a host are lost, not those to it",
        [Plan((1, 1, 1), "output", 1, "gloo"), Plan((2, 2), "output", 0)],
    ),
    ("a process is stopped (SIGSTOP)", [Plan((2, 2), "stop", 3), Plan((1, 1, 1), "stop", 1, "gloo")]),
    ("the process that hosts the store is stopped", [Plan((2, 2), "stop", 0), Plan((1, 1, 1), "stop", 0, "gloo")]),
    (
        "the network pauses for 8 s",
        [Plan((2, 2), PAUSE, 1, seconds=8.0), Plan((1, 1, 1), PAUSE, 0, "gloo", seconds=8.0)],
    ),
    (
        "the network pauses for 15 s",
        [Plan((2, 2), PAUSE, 1, seconds=15.0), Plan((1, 1, 1), PAUSE, 0, "gloo", seconds=15.0)],
    ),
]


def measured(plan: Plan) -> list[Told]:
    with tempfile.TemporaryDirectory() as folder:
        return run(plan, Path(folder), patience=60.0)


def seconds(told: list[Told]) -> str:
    ended = [each.seconds for each in told if each.seconds is not None and each.type]
    if not told:
        return "-"
    if all(each.type == "" and each.seconds is not None for each in told):
        return "train on"
    if len(ended) < len(told):
        return "NOT ALL"
    return f"{min(ended):.1f}" if max(ended) - min(ended) < 0.1 else f"{min(ended):.1f} to {max(ended):.1f}"


def names(plan: Plan, told: list[Told]) -> str:
    if any("is cut off" in each.message for each in told):
        return "their own host, as cut off"
    if not any(each.type for each in told):
        return "-"
    hosts = {plan.host_of(each.named) for each in told if each.named is not None}
    between = any("or the network between them" in each.message for each in told)
    if between:
        return "both hosts and the network between them"
    if all("so that the network between" in each.message for each in told):
        return "the network between the two"
    if all(each.named == plan.victim for each in told) and plan.failure in ("kill", "stop", "raise"):
        return "the rank"
    return "the host and its ranks" if hosts == {plan.victim} else f"HOSTS {sorted(hosts)}"


def row(what: str, plan: Plan) -> str:
    told = [each for each in measured(plan) if each.rank not in plan.removed]
    own = [each for each in told if each.rank in plan.victims and plan.failure != "raise"]
    others = [each for each in told if each.rank not in plan.victims]
    hosts = "+".join(map(str, plan.ranks))
    return (
        f"| {what} | {plan.backend}, {hosts} | {seconds(others)} | {names(plan, others)} | {seconds(own)} | "
        f"{names(plan, own) if own else '-'} |"
    )


if __name__ == "__main__":
    if reason := missing(("ip", "nft", "unshare")):
        sys.exit(reason)
    heads = ["what happens", "backend, ranks of the hosts", "the others raise after (s)", "and name"]
    print(f"| {' | '.join([*heads, 'that host raises after (s)', 'and names'])} |")
    print("|---|---|---|---|---|---|")
    for what, plans in ROWS:
        for plan in plans:
            print(
                row(what, dataclasses.replace(plan, link_timeout=LINK, stall_minimum=STALL, timeout=600.0)), flush=True
            )
