"""What one device computes: the oracle for replicas, whatever they are used by."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.local import replicate


def on(device, make, *args):
    """What `make` makes, on a device. (Not moved there, which would untie parameters on simulated devices.)"""
    with torch.device(device):
        return make(*args)


def device_of(module):
    return next(module.parameters()).device


def gradients(network):
    """Copies of those of parameters and buffers, by name, on the CPU."""
    named = [*network.named_parameters(), *((n, b) for n, b in network.named_buffers() if b.is_leaf)]
    return {name: None if t.grad is None else t.grad.detach().cpu().clone() for name, t in named}


def same(one, other, rtol=1.3e-6, atol=1e-5):
    """Two collections of tensors, or dicts of them, are close, wherever each of them is."""
    one, other = (list(c) if not isinstance(c, dict) else c for c in (one, other))
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol, check_device=False, equal_nan=True)


def same_gradients(one, other, rtol=1e-12, atol=1e-12):
    """The parameters of two modules have the same gradients; there are some."""
    assert any(p.grad is not None for p in other.parameters())
    same([p.grad for p in one.parameters()], [p.grad for p in other.parameters()], rtol, atol)


def loss_of(modules, chunks):
    """The sum over replicas of a loss of each one's chunk; `modules` may also be one module for all chunks."""
    modules = [modules] * len(chunks) if isinstance(modules, nn.Module) else modules
    losses = [m(c.to(device_of(m))).square().sum() for m, c in zip(modules, chunks, strict=True)]
    return sum(loss.to("cpu") for loss in losses)


def reference(network, chunks):
    """The gradients of that loss by the network alone, whose own are left as they are."""
    before = [(t, t.grad) for t in (*network.parameters(), *network.buffers()) if t.is_leaf]
    for tensor, _ in before:
        tensor.grad = None
    loss_of(network, chunks).backward()
    found = gradients(network)
    for tensor, grad in before:
        tensor.grad = grad
    return found


def by_replicate(network, devices):
    def loss(x, y):
        chunks = zip(replicate(network, devices), x.tensor_split(len(devices)), devices, strict=True)
        return F.mse_loss(torch.cat([replica(chunk.to(device)).to(y.device) for replica, chunk, device in chunks]), y)

    return loss


def by_forward(network, devices):
    parallel = lockstep.DataParallel(network, devices)
    return lambda x, y: F.mse_loss(parallel(x), y)


def by_step(network, devices):
    parallel = lockstep.DataParallel(network, devices)
    return lambda x, y: parallel.step(F.mse_loss, x, y)


def by_function(network, devices):
    return lambda x, y: F.mse_loss(lockstep.local.data_parallel(network, x, devices), y)


USES = {"replicate": by_replicate, "forward": by_forward, "step": by_step, "function": by_function}


def trains_as_alone(network, loss, devices, steps=3, rows=None):
    """Losses and gradients of a use are those of the network itself, called with one part of the rows after the other.

    After each step all parameters are others, so that replicas must follow; in the last, the network is in eval mode.
    """

    def alone(x, y):
        return F.mse_loss(torch.cat([network(chunk) for chunk in x.tensor_split(len(devices))]), y)

    for step in range(steps):
        x, y = (torch.randn(rows or 2 * len(devices) + 1, columns).to(devices[0]) for columns in (3, 2))
        network.train(network.training and step < steps - 1)
        found = []
        for compute in (loss, alone):
            for tensor in (*network.parameters(), *network.buffers()):
                if tensor.is_leaf:
                    tensor.grad = None
            value = compute(x, y)
            if value.requires_grad:
                value.backward()
            found.append({"loss": value.detach(), **gradients(network)})
        same(*found)
        torch.optim.SGD(network.parameters(), 0.1).step()
