"""What a whole checkpoint costs: lockstep.save() against torch.save() of the same state, in one process.

A save computes a SHA-256 of what it writes, waits for the disk (fsync) for every file and folder, and renames.
torch.save() does none of that: the third case adds the one fsync without which its file may be empty after a crash.
resume() reads the digests and the state, against torch.load() and the same load_state_dict().

In a session: how long run.save(wait=False) keeps the training, against run.save() and DCP's async_save(); and what a
snapshot in memory costs, each time, and as a share of the time at the default pace.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import Case, arguments, interleaved, mib, ms, ratio, table
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import lockstep

PACE_SECONDS = 10.0


def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def compare(width: int, rounds: int, folder: Path) -> None:
    model, optimizer = make(width)
    file = folder / "plain.pt"

    def plain() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def plain_on_disk() -> None:
        with open(file, "wb") as opened:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, opened)
            opened.flush()
            os.fsync(opened.fileno())

    def load() -> None:
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    names = {"model": model, "optimizer": optimizer}
    cases = {
        "torch.save": Case(plain),
        "torch.save, fsync": Case(plain_on_disk),
        "lockstep.save": Case(lambda: lockstep.save(folder / "run", keep=1, **names)),
        "torch.load": Case(load),
        "lockstep.resume": Case(lambda: lockstep.resume(folder / "run", **names)),
    }
    plain()
    lockstep.save(folder / "run", keep=1, **names)
    took = interleaved(cases, rounds)
    size = file.stat().st_size
    rows = [(name, ms(seconds), f"{size / seconds / 2**20:,.0f}") for name, seconds in took.items()]
    table(f"state of {mib(size)} MiB, medians of {rounds} rounds", ["", "ms", "MiB/s"], rows)
    ratio("lockstep.save / torch.save, fsync", took["lockstep.save"], took["torch.save, fsync"])
    ratio("lockstep.save / torch.save", took["lockstep.save"], took["torch.save"])
    ratio("lockstep.resume / torch.load", took["lockstep.resume"], took["torch.load"])


def stall(width: int, rounds: int, folder: Path) -> None:
    """How long each way to save keeps the training; what goes on behind it is waited for between the rounds."""
    model, optimizer = make(width)
    names = {"model": model, "optimizer": optimizer}
    dcp_folders = (folder / f"dcp {number}" for number in itertools.count())

    with lockstep.session("gloo", "cpu") as run:

        def dcp() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            waiting.append(async_save(state, checkpoint_id=next(dcp_folders), process_group=run.group))

        def settle() -> None:
            for each in waiting:
                each.result()
            waiting.clear()
            run.resume(folder / "none")  # waits for a save in flight

        waiting: list[Any] = []
        cases = {
            "run.save": Case(lambda: run.save(folder / "saved", keep=1, **names), after=settle),
            "run.save, wait=False": Case(
                lambda: run.save(folder / "behind", keep=1, wait=False, **names), after=settle
            ),
            "DCP's async_save": Case(dcp, after=settle),
            "run.snapshot": Case(lambda: run.snapshot(folder / "memory", every=1, **names), after=settle),
        }
        begin = time.perf_counter()
        cases["run.save, wait=False"].run()
        first = ms(time.perf_counter() - begin)
        print(f"\nthe first run.save(wait=False), whose memory is new, keeps the training for {first} ms")
        settle()
        took = interleaved(cases, rounds)
    table(f"how long the training waits, medians of {rounds} rounds", ["", "ms"], [(n, ms(s)) for n, s in took.items()])
    ratio("run.save / run.save, wait=False", took["run.save"], took["run.save, wait=False"])
    ratio("DCP's async_save / run.save, wait=False", took["DCP's async_save"], took["run.save, wait=False"])
    ratio("run.save / run.snapshot", took["run.save"], took["run.snapshot"])


def pace(width: int, folder: Path) -> None:
    """The share of the time that snapshots at the default pace take."""
    model, optimizer = make(width)
    spent, begin, x = 0.0, time.perf_counter(), torch.randn(256, width)
    with lockstep.session() as run:
        while time.perf_counter() - begin < PACE_SECONDS:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            before = time.perf_counter()
            run.snapshot(folder, model=model, optimizer=optimizer)
            spent += time.perf_counter() - before
    print(f"snapshots at the default pace took {spent / (time.perf_counter() - begin):.1%} of {PACE_SECONDS:g} s")


def main() -> None:
    args = arguments(__doc__, 7, ("--folder", {"help": "on the disk to be measured (default: the temporary folder)"}))
    for width in (32,) if args.quick else (32, 512, 1536):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            compare(width, args.rounds, Path(folder))
            stall(width, args.rounds, Path(folder))
            pace(width, Path(folder) / "pace")


if __name__ == "__main__":
    main()
