"""Runs a program in the workers of Ray Train, as `mpirun` would: ``ray_launcher.py WORKERS PROGRAM ARGUMENTS``."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lockstep.ray import SessionConfig


def run(command: dict[str, Any]) -> None:
    sys.argv[:] = command["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    folder, workers, *program = sys.argv[1:]
    TorchTrainer(
        run,
        train_loop_config={"argv": program},
        torch_config=SessionConfig(),
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(storage_path=folder),
    ).fit()
