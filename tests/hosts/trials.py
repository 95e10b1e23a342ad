"""Failures of ranks, hosts and links while several hosts train: what each rank is told, after how long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from hosts.network import Hosts

START_LIMIT = 90.0  # seconds for all ranks to come to their first steps, on a machine that does other things, too
PORT = 29511
PROGRAM = str(Path(__file__).with_name("rank.py"))
LAUNCH = str(Path(__file__).parents[2] / "examples" / "launch.py")

ON_A_RANK = ("kill", "stop", "raise", "exit 0")
"""SIGKILL, SIGSTOP, an exception, `sys.exit(0)`."""
ON_A_HOST = ("kill host", "stop host")
"""The same to all ranks of a host."""
ON_A_LINK = ("cable", "input", "output")
"""A host's cable is pulled; what comes to it is dropped; what it sends is dropped."""
BETWEEN = "between"
"""What two hosts send to each other is dropped; both still reach all others."""
PAUSE = "pause"
"""A host's cable is pulled, and plugged in again after a while."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One trial."""

    ranks: tuple[int, ...]
    """How many each host has."""
    failure: str
    victim: int
    """The rank or the host, counted from 0."""
    backend: str = "shm"
    how: str = "session"
    launcher: str = "variables"
    """Those of torchrun; "bare": no more of them than in a Kubernetes job; "slurm", "open mpi": those of these.

    Or "torchrun" itself, which hosts the store in a process of its own on the first host; or "launch.py", which starts
    that.
    """
    step: int = 8
    """When it happens; -1 for some time in the start."""
    link_timeout: float = 5.0
    stall_minimum: float = 10.0
    """More than ``link_timeout``, which counts from the last message that was sent: a rank that waits tells the others
    after a second, and the system looks at the limit when it sends again."""
    timeout: float = 60.0
    seconds: float = 0.0
    """How long a pause lasts, or how long after all ranks have met it happens."""
    other: int = -1
    """The second host of a failure between two."""
    late: int = -1
    """The rank that pauses in the start, after it has told where it listens and before it connects to the next."""

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step >= 0 else f"{self.seconds:.1f} s after all have met"
        hosts = "+".join(map(str, self.ranks))
        victim = f"{self.victim} and {self.other}" if self.failure == BETWEEN else f"{self.victim}"
        return f"{self.failure} {victim} at {when}, {hosts} ranks, {self.backend}, {self.how}, {self.launcher}"

    @property
    def world(self) -> int:
        return sum(self.ranks)

    def host_of(self, rank: int) -> int:
        return next(host for host in range(len(self.ranks)) if rank < sum(self.ranks[: host + 1]))

    def on_host(self, host: int) -> list[int]:
        return [rank for rank in range(self.world) if self.host_of(rank) == host]

    @property
    def victims(self) -> list[int]:
        """The ranks to which something happens."""
        if self.failure in ON_A_RANK:
            return [self.victim]
        return self.on_host(self.victim) + (self.on_host(self.other) if self.failure == BETWEEN else [])

    @property
    def removed(self) -> list[int]:
        """Those that cannot say anything."""
        silent = ("kill", "stop", *ON_A_HOST)
        return self.victims if self.failure in silent else []

    @property
    def promise(self) -> float:
        """Seconds from the failure until every rank has raised."""
        if self.how != "session":
            return self.timeout + 5
        if self.step < 0:
            return self.timeout + self.link_timeout + 5
        if self.failure in ("stop", "stop host"):
            return 2 * self.stall_minimum + 10  # the limit is looked at once a second, and ranks have time to answer
        return self.link_timeout + 10 if self.failure in (*ON_A_LINK, BETWEEN) else 8


@dataclasses.dataclass(frozen=True)
class Told:
    """How one rank ended."""

    rank: int
    seconds: float | None
    """After the failure; None if it has not ended."""
    type: str = ""
    message: str = ""
    named: int | None = None
    last_step: int | None = None
    digest: str = ""


def run(
    plan: Plan,
    folder: Path,
    names: str = "good",
    master: str = "",
    environment: dict[str, str] | None = None,
    patience: float = 15.0,
) -> list[Told]:
    """Return what each rank is told, by rank; those that are still there after the promise and ``patience`` are
    ended."""
    with Hosts(len(plan.ranks), names) as hosts:
        _start(plan, hosts, folder, master or hosts.address(0), environment or {})
        if plan.failure != "none":
            wait_until(lambda: _is_time(plan, folder), START_LIMIT)
        pids = {rank: events[0]["pid"] for rank in range(plan.world) if (events := events_of(folder, rank))}
        begin = time.monotonic()
        _happen(plan, hosts, pids)
        wait_until(
            lambda: all(_end_of(folder, rank) for rank in _others(plan)),
            plan.promise + patience + (START_LIMIT if plan.failure == "none" else 0),
        )
        if plan.failure.startswith("stop") and plan.launcher == "variables":  # what they say when they go on
            for rank in plan.victims:
                os.kill(pids[rank], signal.SIGCONT)
            wait_until(lambda: all(_end_of(folder, rank) for rank in plan.victims), patience)
        return [_told(folder, rank, begin) for rank in range(plan.world)]


def judge(plan: Plan, told: list[Told]) -> list[str]:
    """Return what is wrong with what the ranks were told."""
    problems = []
    for each in told:
        if each.rank in plan.removed:
            if plan.failure.startswith("stop") and plan.launcher == "variables":
                problems += _judge_who_goes_on(plan, each)
            continue
        problems += [f"rank {each.rank}: {problem}" for problem in _judge(plan, each)]
    return problems


def _judge(plan: Plan, told: Told) -> list[str]:
    if told.seconds is None:
        return [f"has not ended; last step {told.last_step}"]
    problems = []
    if told.seconds > plan.promise:
        problems.append(f"ended after {told.seconds:.1f} s, promised are {plan.promise:g}")
    if told.type == "" and not (plan.failure == "exit 0" and told.rank == plan.victim):
        problems.append("ended without an error")
    elif told.rank not in plan.victims or plan.failure in (*ON_A_LINK, BETWEEN):
        problems += _judge_names(plan, told)
    return [f"{problem}: {told.type}: {told.message}" for problem in problems]


def _judge_who_goes_on(plan: Plan, told: Told) -> list[str]:
    """A rank that was stopped says that it was given up; another one of its host may say it of that one."""
    if told.type == "StalledError" or (told.type == "PeerFailure" and told.named in plan.victims):
        return []
    return [f"rank {told.rank} was stopped, and raised {told.type or 'nothing'}: {told.message}"]


def _judge_names(plan: Plan, told: Told) -> list[str]:
    """An error says which rank, or which host, has failed."""
    if (
        plan.failure == "kill host"
        and len(plan.victims) > 1
        and f"like all of its host, node{plan.victim}" not in told.message
    ):
        return ["does not name all ranks of the host"]
    if told.named in plan.victims and told.rank not in plan.victims and plan.failure != BETWEEN:
        return []
    if told.type not in ("PeerFailure", "CommunicationError", "StalledError"):
        return ["raised neither PeerFailure nor CommunicationError"]
    if plan.failure == BETWEEN:
        words = f"so that the network between node{plan.victim} and node{plan.other} is down"
        return [] if words in told.message else ["names another network"]
    if plan.failure in ON_A_LINK:
        # Between two hosts nobody can tell on which side the network has failed.
        between = len(plan.ranks) == 2 and "node0" in told.message and "node1" in told.message
        right = (f"node{plan.victim} is cut off", f"so that node{plan.victim} or its network is down")
        return [] if between or any(words in told.message for words in right) else ["names the wrong host"]
    return ["names the wrong rank"]


def _start(plan: Plan, hosts: Hosts, folder: Path, master: str, more: dict[str, str]) -> None:
    options = {"link_timeout": plan.link_timeout, "stall_minimum": plan.stall_minimum, "stall_factor": 5.0}
    job = {
        "folder": str(folder),
        "how": plan.how,
        "backend": plan.backend or None,
        "options": options,
        "timeout": plan.timeout,
        "steps": 40 if plan.failure in (PAUSE, "none") else 100_000,
        "forward_seconds": 0.02,
        "exchanges": plan.failure == BETWEEN,
        "late": plan.late,
    }
    if plan.failure in ("raise", "exit 0"):
        job |= {"leaver": plan.victim, "leaves_at": max(plan.step, 0), "leaves": plan.failure}
    for host, count in enumerate(plan.ranks):
        if plan.launcher == "launch.py":
            command = [sys.executable, LAUNCH, "--processes", str(count), "--hosts", str(len(plan.ranks))]
            hosts.start(host, [*command, "--meet", master, PROGRAM, json.dumps(job)], more, folder / f"host{host}.log")
            continue
        if plan.launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(plan.ranks))]
            command += ["--nproc-per-node", str(count), "--rdzv-backend", "c10d", "--rdzv-id", "job"]
            command += ["--rdzv-endpoint", f"{master}:{PORT}", PROGRAM, json.dumps(job)]
            hosts.start(host, command, more, folder / f"host{host}.log")
            continue
        for rank in plan.on_host(host):
            environment = {name: str(value) for name, value in _variables(plan, rank, master).items()}
            hosts.start(host, [sys.executable, PROGRAM, json.dumps(job)], more | environment, folder / f"{rank}.log")


def _variables(plan: Plan, rank: int, master: str) -> dict[str, str | int]:
    """Return what a launcher sets for a rank."""
    host = plan.host_of(rank)
    local_rank, count = rank - plan.on_host(host)[0], plan.ranks[host]
    bare = {"RANK": rank, "WORLD_SIZE": plan.world, "MASTER_ADDR": master, "MASTER_PORT": PORT}
    return {
        "bare": bare,
        "variables": bare | {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": count},
        "slurm": {
            "SLURM_JOB_ID": 17,
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": local_rank,
            "SLURM_NODEID": host,
            "SLURM_STEP_NUM_TASKS": plan.world,
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, plan.ranks)),
            "SLURM_STEP_NODELIST": f"node[0-{len(plan.ranks) - 1}]",
        },
        "open mpi": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": plan.world,
            "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": count,
            "MASTER_ADDR": master,
        },
    }[plan.launcher]


def _is_time(plan: Plan, folder: Path) -> bool:
    if plan.failure in ("raise", "exit 0"):
        return any(event["what"] == "leaves" for event in events_of(folder, plan.victim))
    if plan.step < 0:
        # Not from the start of the processes, which takes as long as the machine lets it.
        met = [
            next((event["at"] for event in events_of(folder, rank) if event["what"] == "has met"), None)
            for rank in range(plan.world)
        ]
        return None not in met and time.monotonic() > max(met) + plan.seconds
    return all(_last_step(folder, rank) >= plan.step for rank in range(plan.world))


def _happen(plan: Plan, hosts: Hosts, pids: dict[int, int]) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(plan.failure.partition(" ")[0])
    if number is not None:
        for rank in plan.victims:
            os.kill(pids[rank], number)
    elif plan.failure in ("cable", PAUSE):
        hosts.pull_cable(plan.victim)
        if plan.failure == PAUSE:
            time.sleep(plan.seconds)
            hosts.plug_cable(plan.victim)
    elif plan.failure in ("input", "output"):
        hosts.drop(plan.victim, plan.failure)
    elif plan.failure == BETWEEN:
        hosts.part(plan.victim, plan.other)


def _others(plan: Plan) -> list[int]:
    return [rank for rank in range(plan.world) if rank not in plan.removed]


def _told(folder: Path, rank: int, begin: float) -> Told:
    step, end = _last_step(folder, rank), _end_of(folder, rank)
    if end is None:
        return Told(rank, None, last_step=step)
    seconds = end["at"] - begin
    if end["what"] == "done":
        return Told(rank, seconds, last_step=step, digest=end["digest"])
    return Told(rank, seconds, end["type"], end["message"], end["rank"], step)


def _end_of(folder: Path, rank: int) -> dict | None:
    return next((event for event in events_of(folder, rank) if event["what"] in ("raised", "done")), None)


def _last_step(folder: Path, rank: int) -> int:
    return max((event["step"] for event in events_of(folder, rank) if event["what"] == "step"), default=-1)


def events_of(folder: Path, rank: int) -> list[dict]:
    """Return what a rank has noted so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"{rank}.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def wait_until(condition, limit: float) -> bool:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------- plans


def random_plan(numbers: random.Random) -> Plan:
    """Any failure of any rank, host or link, at any step or in the start."""
    ranks = numbers.choice([(1, 1), (2, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)])
    failure = numbers.choice([*ON_A_RANK, *ON_A_HOST, *ON_A_LINK, *ON_A_LINK])
    victim = numbers.randrange(sum(ranks) if failure in ON_A_RANK else len(ranks))
    in_start = failure in ON_A_LINK and numbers.random() < 0.15
    return Plan(
        ranks,
        failure,
        victim,
        backend=numbers.choice(["shm", "gloo"]),
        launcher=numbers.choice(["variables", "variables", "torchrun"]),
        step=-1 if in_start else numbers.randrange(8, 20),  # stalls have the patience of the start in the first steps
        timeout=20.0 if in_start else 60.0,
        seconds=numbers.uniform(0.0, 3.0) if in_start else 0.0,
    )
