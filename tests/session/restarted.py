"""A training whose processes kill themselves, each time after another step; arguments: folder, steps, more.

With "marker" rank 0 is killed while the snapshot of that step gets its marker.
With "host" the last rank ends its launcher, too, and that happens once.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.checkpoints.files import OpenFile
from lockstep.checkpoints.folders import NewFolder
from lockstep.checkpoints.layout import MARKER

FOLDER, KILLS, MORE = Path(sys.argv[1]), [int(step) for step in sys.argv[2].split(",") if step], sys.argv[3:]
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def mark_as_killed() -> bool:
    """Return True if this is the first time."""
    try:
        FOLDER.with_name("killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    """Kill this process; with "marker" when it is about to write the marker of a snapshot."""
    if "marker" not in MORE:
        os.kill(os.getpid(), signal.SIGKILL)
    create = NewFolder.create

    def create_or_die(self: NewFolder, name: str) -> OpenFile:
        if name == MARKER:
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, name)

    NewFolder.create = create_or_die


torch.set_num_threads(1)
atexit.register(lambda: print(f"ends {'soon' if gc.get_freeze_count() else 'as always'}", flush=True))
with lockstep.session() as run:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    model = lockstep.replicate(network, shares=4)
    optimizer = torch.optim.Adam(model.parameters())
    numbers = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(
        torch.randn(160, 16, generator=numbers), torch.randint(4, (160,), generator=numbers)
    )
    batches = lockstep.shares.GlobalBatches(rows, batch_size=16, shares=4)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    victim = 0 if "marker" in MORE else RESTARTS % run.world_size
    run.resume(FOLDER, **state)
    if run.is_main:
        print(f"from step {run.step}", flush=True)
    for _ in range(batches.epoch, 2):
        for batch in run.batches(batches):
            optimizer.zero_grad()
            for x, y in batch:
                nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            if "host" in MORE and [run.step] == KILLS and run.rank == run.world_size - 1 and mark_as_killed():
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            if "host" not in MORE and KILLS[RESTARTS : RESTARTS + 1] == [run.step] and run.rank == victim:
                die()
            run.snapshot(FOLDER, every=1, **state)
            if run.step % 5 == 0 and "host" not in MORE:
                run.save(FOLDER, wait=False, **state)
    if run.is_main:
        print(f"fingerprint {lockstep.shares.fingerprint(model, optimizer)} after step {run.step}", flush=True)
