"""What the tests of client libraries share: each trains with PyTorch's wrapper and with ours, in the same processes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import subprocess
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
    """Clients warn of many things, and look for files on the network."""
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    let_torchvision_load()


def let_torchvision_load() -> None:
    """Beside a PyTorch for the CPU, a torchvision that is built for CUDA lacks operators of its own, and raises."""
    if not _kept and torch.version.cuda is None:
        torchvision = library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there
                torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(torchvision)


PACKAGES = {
    "gpt2": "transformers",
    "gpt2_checkpointed": "transformers",
    "gpt2_with_adapters": "peft",
    "llama": "transformers",
    "mixtral": "transformers",
    "t5": "transformers",
    "bert": "transformers",
    "timm_vit": "timm",
    "timm_convnext": "timm",
    "torchvision_swin": "torchvision",
    "diffusion": "diffusers",
    "sentences": "sentence_transformers",
    "graphs": "torch_geometric",
    "equivariant": "e3nn",
    "private": "opacus",
    "gaussian_process": "gpytorch",
    "lightning_module": "lightning",
    "tensors_with_names": "tensordict",
    "schedule_free": "schedulefree",
    "lion": "lion_pytorch",
    "adamp": "adamp",
    "lamb": "pytorch_optimizer",
    "riemannian": "geoopt",
}
"""The programs of clients/checked_programs.py, and the package that each needs."""


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


@dataclasses.dataclass(frozen=True)
class Step:
    """What a rank has after one step."""

    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


Loss = Callable[[nn.Module, Any], torch.Tensor]


def in_one_process(copies: list[nn.Module], loss_of: Loss, batches: list[list[Any]]) -> list[list[Step]]:
    """Return what DDP's definition gives for ``batches[step][rank]``: ``steps[step][rank]``. There is a copy for each
    rank.

    Every forward begins with rank 0's buffers. Gradients are means: over two ranks, bitwise those of any order.
    """
    optimizers = [torch.optim.SGD(trained(copy), 0.1, momentum=0.9) for copy in copies]
    steps = []
    for batch in batches:
        buffers, losses = [buffer.clone() for buffer in copies[0].buffers()], []
        for copy, mine in zip(copies, batch, strict=True):
            for buffer, value in zip(copy.buffers(), buffers, strict=True):
                buffer.detach().copy_(value)
            copy.zero_grad()
            loss = loss_of(copy, mine)
            loss.backward()
            losses.append(loss.item())
        for parameters in zip(*map(trained, copies), strict=True):
            given = [parameter.grad / len(copies) for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(given).clone() if given else None
        for optimizer in optimizers:
            optimizer.step()
        steps.append([_after(*rank) for rank in zip(losses, copies, strict=True)])
    return steps


def trains_like(
    steps: list[list[Step]],
    rank: Any,
    module: nn.Module,
    loss_of: Loss,
    batches: list[list[Any]],
    tolerance: float = 0.0,
) -> None:
    """Trains a replicated module with the rank's batches: the same losses, gradients and weights, mostly bitwise."""
    optimizer = torch.optim.SGD(trained(module), 0.1, momentum=0.9)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(module, batch[rank.rank])
        loss.backward()
        optimizer.step()
        got, wanted = _after(loss.item(), module), steps[number][rank.rank]
        for what in ("loss", "gradients", "weights"):
            equal(getattr(got, what), getattr(wanted, what), f"{what} of step {number}", tolerance)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _after(loss: float, module: nn.Module) -> Step:
    inner = module.module if isinstance(module, TORCHS) else module
    named = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return Step(loss, gradients, {name: p.detach().clone() for name, p in named.items()})


def equal(got: Any, wanted: Any, what: str, tolerance: float = 0.0) -> None:
    """Of numbers, tensors, or dicts of them."""
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def without_lockstep(program: str, *args: str) -> None:
    """Runs a program in a process of its own, in which lockstep cannot be imported. It reads ``sys.argv``."""
    parts = [_HEAD, *map(inspect.getsource, (let_torchvision_load, quiet)), "quiet()", program]
    done = subprocess.run([sys.executable, "-c", "\n".join(parts), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_HEAD = """
import contextlib, os, sys, warnings
sys.modules["lockstep"] = None
import torch
from torch import library
_kept = []
"""


def batches(rank: Any, shape: tuple[int, ...], steps: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of that shape and labels of two classes, other ones on each rank."""
    for step in range(steps):
        generator = rank.generator(step + 1)
        yield torch.randn(shape, generator=generator), torch.randint(0, 2, shape[:1], generator=generator)


def network() -> nn.Module:
    """Small, with a buffer."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
