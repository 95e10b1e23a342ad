"""A training in a job of SLURM, which gets a notice before its time is over, saves, and is queued again: FOLDER HOLD.

With HOLD its first start waits for the notice after some steps.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

import lockstep

FOLDER, HOLDS = Path(sys.argv[1]), bool(sys.argv[2:])

torch.set_num_threads(1)
with lockstep.session(device="cpu", stop_signals=(signal.SIGTERM, signal.SIGUSR1)) as run:
    torch.manual_seed(0)
    model = lockstep.replicate(torch.nn.Linear(4, 3), shares=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    rows = torch.utils.data.TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(1)))
    batches = lockstep.shares.GlobalBatches(rows, batch_size=8, shares=2)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    found = run.resume(FOLDER / "run", **state)
    if run.is_main:
        print(f"from step {run.step}", flush=True)
    stopped = run.should_stop
    for batch in run.batches(batches):
        optimizer.zero_grad()
        for (x,) in batch:
            model(x).square().sum().backward()
        optimizer.step()
        run.snapshot(FOLDER / "run", every=1, **state)
        while HOLDS and found is None and run.step == 6 and not run.should_stop:
            run.agree(signal.sigtimedwait([], 0.1))  # the handler of the notice runs meanwhile
        if run.should_stop:
            run.save(FOLDER / "run", **state)
            stopped = True
            break
    told = f"fingerprint {lockstep.shares.fingerprint(model, optimizer)} after step {run.step}"
if run.is_main and not stopped:
    print(told, flush=True)
sys.exit(3 if stopped else 0)
