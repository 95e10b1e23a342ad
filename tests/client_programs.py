"""What the tests of client libraries share: each trains with PyTorch's wrapper and with ours, in the same processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import library, nn

import lockstep
from processes import _find, _source, run_processes

TORCHS = nn.parallel.DistributedDataParallel
WRAPPERS = {"torch": TORCHS, "lockstep": lockstep.DistributedDataParallel}
backends = pytest.mark.parametrize("backend", ["gloo", "shm"])

_kept: list[Any] = []


def quiet() -> None:
    """Clients warn of many things; and torchvision, built for CUDA, lacks operators of its own beside a CPU torch."""
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not _kept:
        torchvision = library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there
                torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(torchvision)


def need(name: str) -> Any:
    """Skips the test, or the file, where a client is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed; make test-clients has it", allow_module_level=True)


@contextlib.contextmanager
def wrapper_in_use(implementation: str, *modules: str) -> Iterator[Any]:
    """Programs that wrap by themselves get this class; ``modules`` are those that have imported the name."""
    kind = WRAPPERS[implementation]
    with contextlib.ExitStack() as stack:
        for name in ("torch.nn.parallel", "torch.nn.parallel.distributed", *modules):
            importlib.import_module(name)
            stack.enter_context(mock.patch.object(sys.modules[name], "DistributedDataParallel", kind))
        yield kind


def _compare(rank: Any, source: tuple[str, str, str], args: Any) -> None:
    quiet()
    program = _find(source)
    numbers = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.world, "LOCAL_WORLD_SIZE": rank.world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # read by some, though the group is there
    weights = {}
    for implementation in WRAPPERS:
        torch.manual_seed(0)
        weights[implementation] = {name: v.detach().clone() for name, v in program(rank, implementation, *args).items()}
    assert weights["lockstep"].keys() == weights["torch"].keys()
    assert weights["torch"]
    for name, wanted in weights["torch"].items():
        torch.testing.assert_close(weights["lockstep"][name], wanted, rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}")
        assert rank.all_equal(wanted), name


def same_weights(program: Callable[..., dict[str, torch.Tensor]], backend: str, *args: Any) -> None:
    """Runs ``program(rank, implementation, *args)`` in two processes: what it returns is bitwise the same with both."""
    run_processes(2, _compare, _source(program), args, backend=backend, timeout=100, group_timeout=60)


def batches(rank: Any, shape: tuple[int, ...], steps: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of that shape and labels of two classes, other ones on each rank."""
    for step in range(steps):
        generator = rank.generator(step + 1)
        yield torch.randn(shape, generator=generator), torch.randint(0, 2, shape[:1], generator=generator)


def network() -> nn.Module:
    """Small, with a buffer."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
