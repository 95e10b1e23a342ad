"""Trainings whose ranks, hosts, launchers and links fail at random places, and are started again until they end.

As root: ``.venv/bin/python tests/chaos/restarts.py FAILURES SEED [SECONDS]`` tries so many, and prints the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.launcher import Host
from chaos.restarted import BATCH, REGIONS, ROWS, STEPS, Failure, Job
from hosts.network import Hosts

LIMIT = 75.0
"""Seconds after which ranks that have been started, and have not ended, hang."""
KILLED_AFTER = 0.3
"""Seconds after the first rank has ended in which an engine that does not wait kills the others."""
PROGRAM = Path(__file__).with_name("launcher.py")


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the ranks."""

    ranks: tuple[int, ...]
    """How many each host has; 0 if the host does not take part."""
    failures: tuple[Failure, ...]
    waits: bool = True
    """True if ranks that are left end by themselves; else they are killed when one has ended, as by an engine."""

    def host_of(self, rank: int) -> int:
        return next(host for host in range(len(self.ranks)) if rank < sum(self.ranks[: host + 1]))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run: the starts that fail, the last ranks then end it."""

    backend: str
    own_disks: bool
    launcher_has_store: bool
    starts: tuple[Start, ...]

    def __str__(self) -> str:
        what = [
            " and ".join(f"{each.kind} of {each.victim} in {each.region}" for each in start.failures)
            + f" of {'+'.join(map(str, start.ranks))}"
            for start in self.starts
        ]
        return f"{self.backend}, {'own disks' if self.own_disks else 'one disk'}: {'; '.join(what)}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A failure that has happened, and what followed."""

    backend: str
    kind: str
    region: str
    redone: int
    """Steps that were computed again."""
    hosts_left: int
    """0 if a host of the next start has no snapshot, since its memory was lost or it was not there."""
    seconds: float | None
    """From the failure to the end of the first step after it; None if another failure came before."""


@dataclasses.dataclass(frozen=True)
class Told:
    """How a run went."""

    outcomes: list[Outcome]
    problems: list[str]


class Run:
    """One run of a plan, on hosts of its own."""

    def __init__(self, plan: Plan, calls: dict[str, int], folder: Path) -> None:
        self._plan, self._calls, self._folder = plan, calls, folder
        self._path = folder / "run"
        self._path.mkdir()
        self.problems: list[str] = []

    def run(self) -> list[dict]:
        """Start the ranks until all have ended well; return what they have noted."""
        starts = self._plan.starts
        with Hosts(len(starts[0].ranks)) as network:
            hosts = [self._host(network, number) for number in range(network.count)]
            for attempt in range(len(starts) + 3):
                last = Start(starts[-1].ranks, ())
                if self._attempt(attempt, starts[attempt] if attempt < len(starts) else last, network, hosts):
                    break
                if self.problems:
                    break
            else:
                self.problems.append("does not end")
            for number, host in enumerate(hosts):
                lost = attempt < len(starts)
                if (left := host.left()) and not self.problems and not lost and last.ranks[number]:
                    self.problems.append(f"host {number} has left in its memory: {left}")
        return self.events()

    def _host(self, network: Hosts, number: int) -> Host:
        socket = self._folder / f"host{number}"
        command = [sys.executable, str(PROGRAM), str(socket), str(self._path), "x" if self._plan.own_disks else ""]
        network.start(number, command, {}, self._folder / f"host{number}.log")
        return Host(socket)

    def _attempt(self, attempt: int, start: Start, network: Hosts, hosts: list[Host]) -> bool:
        """Start the ranks once, and return True if all have ended well."""
        port = 29500 + attempt
        first = next(host for host, count in enumerate(start.ranks) if count)
        launcher = 0
        if self._plan.launcher_has_store:
            launcher = hosts[first].start_store(port, self._folder / "store.log")
        fields = [str(self._folder), str(self._path), attempt, self._plan.backend, self._calls, list(start.failures)]
        job = Job(*fields, launcher)  # type: ignore[arg-type]
        variables = {
            "MASTER_ADDR": network.address(first),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(sum(start.ranks)),
        }
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(bool(launcher))
        ranks: dict[int, tuple[Host, int]] = {}
        for rank in range(sum(start.ranks)):
            host = start.host_of(rank)
            local = rank - sum(start.ranks[:host])
            more = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(start.ranks[host])}
            log = self._folder / f"{attempt}-{rank}.log"
            ranks[rank] = hosts[host], hosts[host].start(job, variables | more, log)
        codes = self._wait(attempt, start, network, ranks)
        hanging = [rank for rank, code in codes.items() if code is None and (start.waits or not any(codes.values()))]
        if hanging:
            self.problems.append(f"start {attempt}: ranks {hanging} have not ended after {LIMIT:g} s")
        for number, host in enumerate(hosts):
            struck = {event["victim"] for event in self.events() if _is(event, "fails", attempt, "host")}
            if number in {start.host_of(rank) for rank in struck}:
                host.lose()
            else:
                host.kill()
        failed = any(_is(event, "fails", attempt) for event in self.events())
        if any(codes.values()) and not failed and not hanging:
            self.problems.append(f"start {attempt}: nothing has happened, and it ends with {codes}")
        return set(codes.values()) == {0}

    def _wait(
        self, attempt: int, start: Start, network: Hosts, ranks: dict[int, tuple[Host, int]]
    ) -> dict[int, int | None]:
        """Return the exit code of each rank, None where it hangs; pull cables where ranks ask for that."""
        until, pulled = time.monotonic() + LIMIT, set[int]()
        while True:
            for rank in ranks:
                if Path(self._folder, f"pull the cable of {rank} in {attempt}").exists():
                    host = start.host_of(rank)
                    if host not in pulled:
                        network.pull_cable(host)
                    pulled.add(host)
            codes = {rank: host.codes().get(pid) for rank, (host, pid) in ranks.items()}
            if None not in codes.values() or time.monotonic() > until:
                break
            if not start.waits and any(codes.values()):
                until = min(until, time.monotonic() + KILLED_AFTER)
            time.sleep(0.01)
        for host in pulled:
            network.plug_cable(host)
        return codes

    def events(self) -> list[dict]:
        """Return what the ranks have noted."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self._folder / "events.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []

    def logs(self) -> str:
        """Return what the ranks have printed."""
        files = sorted(self._folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
        return "\n".join(f"--- {each.name}\n{each.read_text()[-2500:]}" for each in files if each.stat().st_size)


def _is(event: dict, what: str, attempt: int, kind: str = "") -> bool:
    return (event["what"], event["attempt"]) == (what, attempt) and kind in ("", event.get("kind"))


# ------------------------------------------------------------------------------------------ judging


def judge(plan: Plan, events: list[dict], fingerprint: str) -> Told:
    """Return what is wrong with a run that has ended, and what followed each failure."""
    problems = [f"{each['fingerprint']} at the end" for each in events if _wrong_end(each, fingerprint)]
    if not any(each["what"] == "end" for each in events):
        problems.append("no rank has come to the end")
    problems += _samples(events)
    outcomes = []
    base, base_attempt, holders, lost_all = 0, 0, set[int](), False
    for attempt, start in enumerate(plan.starts):
        events_here = [each for each in events if each["attempt"] == attempt]
        failed = [each for each in events_here if each["what"] == "fails"]
        if not failed:
            continue
        if _has_memory(events_here):
            holders = {host for host, count in enumerate(start.ranks) if count}
        holders -= {start.host_of(each["victim"]) for each in failed if each["kind"] == "host"}
        then = plan.starts[min(attempt + 1, len(plan.starts) - 1)]
        # A snapshot counts if every host of the next start has it: nothing is sent to a new one.
        lost_all = lost_all or not {host for host, count in enumerate(then.ranks) if count} <= holders
        begun = {each["step"] for each in events if _is(each, "from", attempt + 1)}
        steps = [
            each["step"] for each in events if each["what"] == "step" and base_attempt <= each["attempt"] <= attempt
        ]
        done = max([base, *steps])
        redone = 0
        if begun:
            redone = done - min(begun)
            allowed = done - 1
            if lost_all:
                allowed = _on_disk(plan, [each for each in events if each["attempt"] <= attempt])
            if min(begun) < allowed:
                problems.append(f"start {attempt + 1} goes on after {sorted(begun)}, {done} done, {allowed} were kept")
            if len(begun) > 1:
                problems.append(f"start {attempt + 1}: ranks go on after steps {sorted(begun)}")
        for each in failed:
            seconds = _recovery(each, events, attempt)
            outcomes.append(Outcome(plan.backend, each["kind"], each["region"], redone, int(not lost_all), seconds))
        if begun:
            base, base_attempt, lost_all = min(begun), attempt + 1, False
    return Told(outcomes, problems)


def _has_memory(events: list[dict]) -> bool:
    """True if each host that takes part holds a snapshot: the ranks go on from one, or have come past a first step."""
    begun = max((each["step"] for each in events if each["what"] == "from"), default=0)
    return begun > 0 or len({each["step"] for each in events if each["what"] == "step"}) > 1


def _wrong_end(event: dict, fingerprint: str) -> bool:
    return event["what"] == "end" and (event["fingerprint"], event["step"]) != (fingerprint, STEPS)


def _on_disk(plan: Plan, before: list[dict]) -> int:
    """The step that is on the disk for certain: a save in flight may be lost, the one before it was waited for."""
    if plan.own_disks:
        return 0
    saved = sorted({each["step"] for each in before if each["what"] == "save"})
    return saved[-2] if len(saved) > 1 else 0


def _recovery(failure: dict, events: list[dict], attempt: int) -> float | None:
    steps = [each["at"] for each in events if _is(each, "step", attempt + 1)]
    return min(steps) - failure["at"] if steps else None


def _samples(events: list[dict]) -> list[str]:
    """Each sample counts once in an epoch: in the last start that has computed its step, on one rank."""
    last: dict[int, int] = {}
    for each in events:
        if each["what"] == "step":
            last[each["step"]] = max(last.get(each["step"], 0), each["attempt"])
    seen: dict[int, Counter[int]] = {}
    for each in events:
        if each["what"] == "step" and last[each["step"]] == each["attempt"]:
            epoch = (each["step"] - 1) * BATCH // ROWS
            seen.setdefault(epoch, Counter()).update(each["rows"])
    return [
        f"epoch {epoch}: {len(rows)} samples, of which {max(rows.values())} times one"
        for epoch, rows in seen.items()
        if len(rows) != ROWS or max(rows.values()) != 1
    ]


# ------------------------------------------------------------------------------------------- plans

MEASURED = Plan("gloo", False, False, (Start((2,), (Failure("rank", "training", 1, 1.0, 2),)),))
"""A run in which a rank is killed once, so that the ranks go on from a snapshot."""
HOSTS = [(2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (1, 2, 1)]


def random_plan(numbers: random.Random) -> Plan:
    """Some failures, one or two in each start, of ranks on one to three hosts."""
    ranks = numbers.choice(HOSTS)
    launcher_has_store, own_disks = numbers.random() < 0.5, numbers.random() < 0.4
    starts, now = [], ranks
    for _ in range(numbers.randint(4, 6)):
        # A host that has lost its own disk cannot resume.
        kinds = ["rank", "rank", *["host"] * (not own_disks), *["launcher"] * launcher_has_store]
        kinds += ["link"] * (sum(map(bool, now)) > 1)
        failures = [_failure(numbers, kinds, sum(now))]
        if numbers.random() < 0.25:  # another one, in the same region and step
            other = _failure(numbers, kinds, sum(now))
            failures.append(dataclasses.replace(other, region=failures[0].region, step=failures[0].step))
        by_link = any(each.kind == "link" for each in failures)
        waits = by_link or numbers.random() < (0.1 if failures[0].region == "start-up" else 0.7)
        starts.append(Start(now, tuple(failures), waits))
        now = ranks
        lost = {starts[-1].host_of(each.victim) for each in failures if each.kind == "host"}
        if len(ranks) > 1 and lost and numbers.random() < 0.5:  # nobody comes in its place, for now
            now = tuple(0 if host in lost else count for host, count in enumerate(ranks))
            now = now if any(now) else ranks
    return Plan(numbers.choice(["shm", "gloo"]), own_disks, launcher_has_store, tuple(starts))


def _failure(numbers: random.Random, kinds: list[str], world: int) -> Failure:
    region = numbers.choice(REGIONS)
    share, step = numbers.uniform(0.0, 0.95), numbers.randint(0, 3)
    step = 0 if region in ("start-up", "resume") else step
    return Failure(numbers.choice(kinds), region, numbers.randrange(world), share, step)


def run_plan(plan: Plan, calls: dict[str, int], fingerprint: str) -> Told:
    """Run a plan to its end, and judge it."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    keep = False
    try:
        run = Run(plan, calls, folder)
        events = run.run()
        told = judge(plan, events, fingerprint)
        problems = run.problems + told.problems
        if problems:
            keep = bool(os.environ.get("KEEP"))
            problems.append(f"{folder if keep else ''}\n{run.logs()[-12000:]}")
        return Told(told.outcomes, problems)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def measure() -> tuple[dict[str, int], str]:
    """Return how many calls each region takes at most, and the fingerprint of a run on other ranks."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        run = Run(MEASURED, {}, folder)
        events = run.run()
        assert not run.problems, (run.problems, run.logs())
        counts: dict[str, list[int]] = {}
        for each in events:
            if each["what"] == "calls":
                counts.setdefault(each["region"], []).append(each["count"])
        end = next(each for each in events if each["what"] == "end")
        return {region: max(each) for region, each in counts.items()}, end["fingerprint"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(outcomes: list[Outcome]) -> str:
    """How many failures there were of each kind in each region, steps done twice, and seconds to the next step."""
    lines = [
        "| what fails | where | failures | most steps redone | seconds, median | maximum |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        kind = each.kind if each.hosts_left else f"{each.kind}, and a host is new"
        groups.setdefault((kind, each.region), []).append(each)
    for (kind, region), found in sorted(groups.items()):
        seconds = [each.seconds for each in found if each.seconds is not None] or [float("nan")]
        redone = max(each.redone for each in found)
        lines.append(f"| {kind} | {region} | {len(found)} | {redone} | {median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(lines)


def main(count: int, seed: int, limit: float) -> int:
    """Run random plans until there were so many failures, or until so many seconds are over."""
    calls, fingerprint = measure()
    print(f"undisturbed: {fingerprint}, calls {calls}", file=sys.stderr)
    outcomes: list[Outcome] = []
    bad, number, begin = 0, 0, time.monotonic()
    while len(outcomes) < count and time.monotonic() - begin < limit:
        plan = random_plan(random.Random(seed + number))
        told = run_plan(plan, calls, fingerprint)
        outcomes += told.outcomes
        print(f"{seed + number} {len(told.outcomes)} {time.monotonic() - begin:.0f} s: {plan}", file=sys.stderr)
        for each in told.outcomes:
            print(json.dumps(dataclasses.asdict(each) | {"seed": seed + number}), flush=True)
        if told.problems:
            bad += 1
            print("PROBLEM", *told.problems, sep="\n", file=sys.stderr, flush=True)
        number += 1
    print(f"{len(outcomes)} failures in {number} runs, {bad} bad\n{table(outcomes)}", file=sys.stderr)
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1e9)))
