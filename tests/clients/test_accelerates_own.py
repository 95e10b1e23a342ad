"""The tests that accelerate ships for many processes, with our wrapper where they have PyTorch's."""

from __future__ import annotations

import contextlib
import importlib
import os
from unittest import mock

import pytest
import torch

import lockstep
from client_programs import backends, need, quiet
from processes import run_processes

SCRIPTS = ["test_script", "test_sync", "test_ops", "test_distributed_data_loop", "test_ddp_comm_hook"]


class OnTheCPU(lockstep.DistributedDataParallel):
    """The scripts give the index of a GPU, whatever there is."""

    def __init__(self, module, device_ids=None, output_device=None, **options):
        super().__init__(module, **options)


@contextlib.contextmanager
def said_to_have_gpus():
    """accelerate joins uneven inputs for GPUs alone; without it the script waits for ever, with any wrapper."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU
    yield
    PartialState._reset_state()


def run_script(rank, script, folder):
    quiet()
    os.chdir(folder)  # where it writes a file
    numbers = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.world, "LOCAL_WORLD_SIZE": rank.world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", OnTheCPU))
        program = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
        if script == "test_distributed_data_loop":
            stack.enter_context(said_to_have_gpus())
            program.NUM_WORKERS = 0
        program.main()


@backends
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_accelerate(script, backend, tmp_path):
    need("accelerate")
    run_processes(2, run_script, script, str(tmp_path), backend=backend, timeout=100, group_timeout=60)
