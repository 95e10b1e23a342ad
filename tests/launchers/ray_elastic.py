"""Trains with shares in Ray's workers, of which there are 1, then 3, then 2: ``ray_elastic.py FOLDER MOST HOLD``.

With HOLD it goes on at a step only when there are as many workers as ``HOLDS`` says. Rank 0 writes each step and the
number of workers to ``FOLDER/steps``; what is printed last is the fingerprint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

import lockstep
from lockstep.ray import SessionConfig
from lockstep.shares import GlobalBatches, fingerprint

HOLDS = {0: 1, 8: 3, 16: 2}
"""At which step there have to be how many workers."""


def train(settings: dict[str, Any]) -> str:
    torch.set_num_threads(1)
    folder, holds = Path(settings["folder"]), settings["holds"]
    with lockstep.session(device=get_device(), seed=5) as run:
        network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
        model = lockstep.replicate(network, shares=6)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        rows = torch.randn(24 * 12, 4, generator=torch.Generator().manual_seed(1))
        batches = GlobalBatches([(row, int(row.sum() > 0)) for row in rows], batch_size=12, shares=6)
        state = {"model": model, "optimizer": optimizer, "batches": batches}
        run.resume(folder / "checkpoints", **state)
        for batch in run.batches(batches):
            while holds.get(run.step - 1, run.world_size) != run.world_size:
                run.check()
                time.sleep(0.05)
            optimizer.zero_grad()
            for x, y in batch:
                torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            run.save(folder / "checkpoints", **state)
            if run.is_main:
                with (folder / "steps").open("a") as steps:
                    steps.write(f"{run.step} {run.world_size}\n")
        return fingerprint(model, optimizer)


if __name__ == "__main__":
    folder, most, hold = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    ray.init(logging_level="ERROR")
    elastic = {"num_workers": (1, most), "elastic_resize_monitor_interval_s": 1.0}
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "holds": HOLDS if hold else {}},
        torch_config=SessionConfig(),
        scaling_config=ScalingConfig(**(elastic if hold else {"num_workers": most}), resources_per_worker={"slot": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(result.return_value)
