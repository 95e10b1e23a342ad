"""Runs trials, measures how long it takes until every other rank has raised, and says what was wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch.distributed as dist

import processes
from chaos.training import ACTIONS, LIMIT, PLACES, STEPS, Plan, main

ENDED_AFTER = 10.0  # seconds that what a killed rank has started may live on: a loader's worker looks every 5 s
START = 1.5  # seconds in which the ranks start, more or less


@dataclasses.dataclass(frozen=True)
class Trial:
    """How a trial went."""

    plan: Plan
    seconds: float | None
    """From the failure until every other rank had raised; None where nothing has to be raised."""
    problems: list[str]


def run_trial(plan: Plan) -> Trial:
    """All ranks of one plan, to their end."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    before = _shared_memory()
    try:
        codes = _run(plan, folder)
        problems, seconds = _judge(plan, folder, codes)
        problems += _left_behind(folder, before)
        if problems:
            logs = [f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log"))]
            problems.append("\n".join(logs)[-6000:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Trial(plan, seconds, problems)


def _run(plan: Plan, folder: Path) -> list[int | None]:
    with processes.held_port() as port:
        return _run_at(port, plan, folder)


def _run_at(port: int, plan: Plan, folder: Path) -> list[int | None]:
    store = None
    if plan.launcher_has_store:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    os.environ["CHAOS"] = str(folder)
    started = [processes.start(main, plan, rank, folder, port) for rank in range(plan.world)]
    try:
        if not plan.place:
            time.sleep(plan.delay)
            (folder / "died").write_text(repr(time.monotonic()))
            os.kill(started[plan.victim].pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT + 10
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()
        del store


def _judge(plan: Plan, folder: Path, codes: list[int | None]) -> tuple[list[str], float | None]:
    died = folder / "died"
    if not died.exists():
        return [f"the victim never came to the place; exit codes {codes}"], None
    problems, seconds = [], []
    for rank in range(plan.world):
        result, raised = folder / f"result of {rank}", folder / f"raised by {rank}"
        if rank == plan.victim:
            if plan.action == "raise" and result.exists():
                problems += _judge_victim(plan, json.loads(result.read_text()))
            continue
        if not result.exists():
            problems.append(f"rank {rank} ended with exit code {codes[rank]}")
            continue
        told = json.loads(result.read_text())
        problems += _judge_other(plan, rank, told)
        if told["type"] == "PeerFailure" and raised.exists():
            seconds.append(float(raised.read_text()) - float(died.read_text()))
    return problems, max(seconds) if seconds else None


def _judge_victim(plan: Plan, told: dict) -> list[str]:
    right = "KeyError" if plan.place in ("backward", "handling", *_ROUND) else "ValueError"
    if plan.place in ("worker", "hook", "optimizer"):
        return [] if told["type"] != "PeerFailure" else [f"the victim raised {told['type']}: {told['message']}"]
    return [] if told["type"] == right else [f"the victim raised {told['type']}: {told['message']}, expected {right}"]


_DONE = ("after the last batch", "leave")
_ROUND = ("collect", "collective", "wait", "finish", "hook", "optimizer")


def _judge_other(plan: Plan, rank: int, told: dict) -> list[str]:
    problems = []
    # Gloo connects in C++, where nothing ends that before the time-out: docs/reliability_reference.md says so.
    connects = plan.backend == "gloo" and not plan.place and told["threads"] == ["lockstep makes the group"]
    if told["threads"] and not connects:
        problems.append(f"rank {rank} still has threads: {told['threads']}")
    if told["sockets"] and not connects:
        problems.append(f"rank {rank} still has the sockets {told['sockets']}")
    if told["type"] is None and (plan.place == "tear-down" or (plan.place, plan.action) == _DONE):
        return problems  # it was done
    if told["type"] == "CommunicationError" and plan.place in ("", "meeting", "group"):  # before it had come
        late = not plan.launcher_has_store and told["message"]  # it has left since
        late = late and ("rank 0 of" in late or "hosts the store has ended" in late)
        return problems if late or f"rank {plan.victim} of" in told["message"] else [*problems, told["message"]]
    if told["type"] != "PeerFailure":
        return [*problems, f"rank {rank} raised {told['type']}: {told['message']}"]
    if told["rank"] != plan.victim:
        return [*problems, f"rank {rank} names rank {told['rank']}: {told['message']}"]
    if plan.action == "raise" and plan.place not in ("meeting",) and "ValueError" not in (told["traceback"] or ""):
        problems.append(f"rank {rank} does not have the victim's traceback: {told['message']}")
    return problems


def _left_behind(folder: Path, before: set[str]) -> list[str]:
    until = time.monotonic() + ENDED_AFTER
    while (alive := _processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    problems = [f"processes are left: {alive}"] if alive else []
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    if more := _shared_memory() - before:
        problems.append(f"shared memory is left: {more}")
    return problems


def _processes_of(folder: Path) -> list[int]:
    """Processes that the trial has started, other than this one: they hold the log of a rank open."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                links = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in ("1", "2")]
            except OSError:
                continue
            if any(link.startswith(str(folder)) for link in links):
                found.append(int(entry))
    return found


def _shared_memory() -> set[str]:
    """Names of shared memory, but for semaphores of `multiprocessing` and the folder of snapshots: other programs that
    run here, tests among them, make these."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith(("sem.mp-", "lockstep-"))}


# ------------------------------------------------------------------------------------------- plans


def random_plan(numbers: random.Random, worlds: Sequence[int] = (2, 3, 4)) -> Plan:
    """Any place, any action, any rank."""
    world = numbers.choice(worlds)
    victim, backend = numbers.randrange(world), numbers.choice(["gloo", "shm"])
    has_store = numbers.random() < 0.5
    if numbers.random() < 0.25:
        return Plan(world, backend, "", "kill", victim, 0, has_store, numbers.uniform(0.0, 3.0))
    place = numbers.choice(PLACES)
    actions = ["raise"] if place == "handling" else ACTIONS[:3] if place in ("worker", "tear-down") else ACTIONS
    return Plan(world, backend, place, numbers.choice(actions), victim, _step_of(place, numbers), has_store)


def _step_of(place: str, numbers: random.Random) -> int:
    if place in ("meeting", "group", "replicate", "after the last batch", "tear-down"):
        return 0
    if place in ("evaluation", "own collective"):
        return numbers.choice(range(2, STEPS + 1, 2))
    return numbers.randint(1, STEPS)


def table(trials: list[Trial]) -> str:
    """Median and maximum of the seconds, by backend, action and where the victim was."""
    lines = [f"{'backend':8}{'what happens':18}{'where':14}{'trials':>7}{'median s':>10}{'maximum s':>11}"]
    for backend in ("shm", "gloo"):
        for action in ACTIONS:
            for where in ("in training", "start-up", "at the end"):
                plans = [
                    t for t in trials if (t.plan.backend, t.plan.action, _where(t.plan)) == (backend, action, where)
                ]
                measured = [t.seconds for t in plans if t.seconds is not None]
                if measured:
                    row = f"{len(measured):7}{median(measured):10.3f}{max(measured):11.3f}"
                    lines.append(f"{backend:8}{_WORDS[action]:18}{where:14}{row}")
    return "\n".join(lines)


def _where(plan: Plan) -> str:
    if plan.place in ("meeting", "group") or (not plan.place and plan.delay < START):
        return "start-up"
    return "at the end" if plan.place in ("after the last batch", "tear-down") else "in training"


_WORDS = {"kill": "SIGKILL", "exit": "os._exit()", "raise": "an exception", "leave": "sys.exit(0)"}
