"""`mixed_precision` beside PyTorch's own, which is written for accelerators: here it gets streams that do nothing."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks
from torch.nn.parallel import distributed
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_reference import ddp_class
from processes import run_processes

LOW = torch.bfloat16


class Stream(contextlib.nullcontext):
    """Stands for a stream and for an event: on the CPU everything is in order."""

    def __init__(self, *args):
        super().__init__()

    def wait(self, stream=None):
        pass

    wait_stream = record = wait


@contextlib.contextmanager
def on_the_cpu():
    with contextlib.ExitStack() as stack:
        for name in ("Stream", "Event"):
            stack.enter_context(mock.patch.object(torch, name, Stream))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", Stream))
        for module in (distributed, mixed_precision_hooks):  # the graph still needs what is freed there
            stack.enter_context(mock.patch.object(module, "_free_storage"))
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((8,), 1 + 2.0**-12))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu() * self.scale)


def compare(rank, config):
    plain, losses, models = rank.make(Net), {}, {}
    for name in ("torch", "lockstep"):
        models[name] = copy.deepcopy(plain)
        with on_the_cpu() if name == "torch" else contextlib.nullcontext():
            model = ddp_class(name)(models[name], mixed_precision=config)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            losses[name] = []
            for step in range(4):
                out = model(torch.randn(4, 6, generator=rank.generator(step + 1)))
                loss = out.float().square().mean()
                loss.backward()
                losses[name].append((out.dtype, loss.item(), [p.grad.clone() for p in model.parameters()]))
                if step:  # PyTorch's first backward, before its buckets are rebuilt, gives noise on the CPU
                    optimizer.step()
                optimizer.zero_grad()
    for step, (theirs, ours) in enumerate(zip(losses["torch"][1:], losses["lockstep"][1:], strict=True)):
        assert theirs[:2] == ours[:2], step
        for p, q in zip(theirs[2], ours[2], strict=True):
            assert p.dtype == q.dtype == torch.float32
            torch.testing.assert_close(q, p, rtol=0, atol=0, msg=lambda text, step=step: f"step {step}: {text}")
    for (name, p), q in zip(models["torch"].named_parameters(), models["lockstep"].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "config",
    [
        _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32, buffer_dtype=LOW),
        _MixedPrecision(param_dtype=LOW, reduce_dtype=LOW, buffer_dtype=LOW),
        _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
    ],
    ids=["float32 on the way", "bfloat16", "float16"],
)
def test_gradients_and_weights_are_bitwise_those_of_pytorchs(config):
    run_processes(2, compare, config)
