"""Trains a small network, as README's program does, on the ranks that a launcher has started.

Each rank writes what became of it to ``FOLDER/RANK.json``. With ``--kill RANK`` that rank ends by SIGKILL in its fourth
step, with ``--fail RANK`` by an exception, and all others write what they are told, and when.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import PeerFailure
from lockstep.shares import GlobalBatches, fingerprint

STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--fail", type=int)
    options = parser.parse_args()
    told: dict[str, object] = {}
    rank = "unknown"
    try:
        with lockstep.session(seed=5) as run:
            rank = str(run.rank)
            told["world"] = run.world_size
            try:
                train(run, options, told)
            except PeerFailure as failure:
                told |= {"failure": str(failure), "time": time.time()}
                raise
    except PeerFailure:
        pass
    partial = options.folder / f"{rank}.part"
    partial.write_text(json.dumps(told))
    partial.rename(options.folder / f"{rank}.json")


def train(run: lockstep.Session, options: argparse.Namespace, told: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(run.device)
    lockstep.replicate(model, shares=6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randn(12 * STEPS, 4, generator=numbers)
    data = [(row, int(row.sum() > 0)) for row in rows]
    for step, batch in enumerate(GlobalBatches(data, batch_size=12, shares=6)):
        if step == 3 and run.rank in (options.kill, options.fail):
            (options.folder / "ended").write_text(str(time.time()))
            if run.rank == options.fail:
                raise ValueError("a bad batch")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        for x, y in batch:
            F.cross_entropy(model(x.to(run.device)), y.to(run.device), reduction="sum").backward()
        optimizer.step()
    told["fingerprint"] = fingerprint(model, optimizer)


if __name__ == "__main__":
    main()
