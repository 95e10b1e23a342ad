"""What a whole checkpoint costs: lockstep.save() against torch.save() of the same state, in one process.

A save computes a SHA-256 of what it writes, waits for the disk (fsync) for every file and folder, and renames.
torch.save() does none of that: the third case adds the one fsync without which its file may be empty after a crash.
resume() reads the digests and the state, against torch.load() and the same load_state_dict().
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from harness import Case, arguments, interleaved, mib, ms, ratio, table
from torch import nn

import lockstep


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


def main() -> None:
    args = arguments(__doc__, 7, ("--folder", {"help": "on the disk to be measured (default: the temporary folder)"}))
    for width in (32,) if args.quick else (32, 512, 1536):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            compare(width, args.rounds, Path(folder))


if __name__ == "__main__":
    main()
