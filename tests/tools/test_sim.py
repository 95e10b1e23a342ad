"""The simulated accelerators themselves, and the watch that conftest.py keeps over every test."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import sim as simulator

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("sim")


def tensors(nested):
    return [t for t in torch.utils._pytree.tree_leaves(nested) if isinstance(t, torch.Tensor)]


def assert_same(on_sim, on_cpu, device="sim:1"):
    on_sim, on_cpu = tensors(on_sim), tensors(on_cpu)
    assert len(on_sim) == len(on_cpu) > 0
    for a, b in zip(on_sim, on_cpu, strict=True):
        assert a.device == torch.device(device)
        torch.testing.assert_close(a.cpu(), b, rtol=1e-10, atol=1e-10, equal_nan=True)


# ------------------------------------------------------------------------------ devices and threads


def test_the_accelerator_interface(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 8
    assert torch.accelerator.current_device_index() == 0
    assert sim.devices(2) == [torch.device("sim:0"), torch.device("sim:1")]
    with torch.accelerator.device_index(3):
        assert torch.empty(1, device="sim").device == torch.device("sim:3")
        with torch.sim.device("sim:5"):
            assert torch.sim.current_device() == 5
        assert torch.sim.current_device() == 3
    torch.accelerator.set_device_index("sim:2")
    assert torch.accelerator.current_device_index() == 2
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    assert torch.get_device_module("sim") is torch.sim
    with torch.device("sim:4"):
        assert nn.Linear(2, 2).weight.device == torch.device("sim:4")
    assert torch.ones(1).sim().is_sim


@pytest.mark.parametrize("index", [8, 100])
def test_no_such_device(index):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"sim:{index}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(index)


def test_current_device_and_stream_are_per_thread():
    seen = []

    def other():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(2).stream_id))
        torch.accelerator.set_device_index(5)

    with torch.Stream(device="sim:2") as stream:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.accelerator.current_device_index() == 2
        assert torch.accelerator.current_stream(2) == stream
    assert seen == [(0, 0)]


def test_backward_runs_in_one_thread_per_device():
    ran = {}

    class Where(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            current = torch.accelerator.current_device_index()
            ran.setdefault(str(grad.device), set()).add((threading.get_ident(), current))
            return grad

    leaves = [torch.ones(3, device=f"sim:{i}", requires_grad=True) for i in range(2)]
    for _ in range(2):
        sum(Where.apply(x).sum().to("sim:0") for x in leaves).backward()
    assert ran.keys() == {"sim:0", "sim:1"}
    assert all(len(calls) == 1 for calls in ran.values())  # the same thread in both backward passes
    (thread0, current0), (thread1, current1) = [*ran["sim:0"], *ran["sim:1"]]
    assert len({thread0, thread1, threading.get_ident()}) == 3
    assert (current0, current1) == (0, 1)
    assert [x.grad.device.index for x in leaves] == [0, 1]


def test_training_in_threads():
    losses = {}

    def train(i):
        device = torch.device("sim", i)
        with torch.sim.device(device):
            torch.sim.manual_seed(3)
            model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            for p in model.parameters():
                nn.init.constant_(p, 0.1)
            model.to(device)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(20):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8, device=device)).square().mean()
                loss.backward()
                optimizer.step()
        losses[i] = loss.item()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 4
    assert len(set(losses.values())) == 1  # each drew from its own generator


# ------------------------------------------------------------------------------ placement is checked


def on(device, *size):
    return torch.ones(size or (2, 2), device=device)


MISTAKES = {
    "add": lambda a, b: a + b,
    "in place": lambda a, b: a.mul_(b),
    "product": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": lambda a, b: F.linear(a, b),
    "conv": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "loss": lambda a, b: F.mse_loss(a, b),
    "embedding": lambda a, b: F.embedding(b.long(), a),
    "gather": lambda a, b: a.gather(0, b.long()),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "out": lambda a, b: torch.add(a, a, out=b),
}


@pytest.mark.parametrize("other", ["sim:1", "cpu"])
@pytest.mark.parametrize("name", MISTAKES)
def test_tensors_of_different_devices_are_refused(name, other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        MISTAKES[name](on("sim:0"), on(other))


def test_what_may_mix_devices():
    x = on("sim:0")
    assert (x + torch.tensor(1.0)).device == x.device  # a number on the host
    assert x[torch.tensor([0])].shape == (1, 2)  # host indices
    assert x.copy_(on("sim:1") * 3).sum().item() == 12
    targets, sources = [on("sim:0"), on("sim:1")], [on("sim:1") * 2, on("cpu") * 3]
    torch._foreach_copy_(targets, sources)
    assert [t.sum().item() for t in targets] == [8, 12]
    sums = torch._foreach_add(targets, targets)  # each position on its own device
    assert [t.device.index for t in sums] == [0, 1]
    parameters = [nn.Parameter(on(f"sim:{i}")) for i in range(2)]
    for p in parameters:
        p.grad = on(p.device) * 2
    assert nn.utils.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(32**0.5)
    torch.optim.Adam(parameters).step()


def test_fresh_memory_is_not_zero():
    assert torch.empty(100, device="sim:0").isnan().all()


def test_storage_can_be_freed_and_made_again():
    before = torch.sim.memory_allocated(1)
    x = torch.ones(1000, device="sim:1")
    assert torch.sim.memory_allocated(1) == before + 4000
    assert torch.sim.max_memory_allocated(1) >= before + 4000
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated(1) == before
    x.untyped_storage().resize_(4000)
    assert x.zero_().sum() == 0


def test_properties_and_memory_limit(sim):
    assert torch.sim.get_device_properties(0).total_memory == 16 << 30
    assert torch.sim.get_device_name(1) == "Simulated accelerator"
    sim.set_properties(1, total_memory=torch.sim.memory_allocated(1) + 1000, multi_processor_count=7)
    properties = torch.sim.get_device_properties("sim:1")
    assert properties.multi_processor_count == 7
    assert torch.sim.mem_get_info(1) == (1000, properties.total_memory)
    x = torch.empty(900, dtype=torch.uint8, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(900, dtype=torch.uint8, device="sim:1")
    del x
    torch.empty(900, dtype=torch.uint8, device="sim:1")
    sim.reset()
    assert torch.sim.get_device_properties(1) == torch.sim.get_device_properties(0)
    with pytest.raises(AssertionError):
        torch.sim.get_device_properties(8)


# ------------------------------------------------------------------------------ copies and streams


def test_copies_are_counted(sim):
    sim.reset_copies()
    x = torch.ones(10).to("sim:0")
    y = x.to("sim:1").to("sim:2")
    y.clone().contiguous().add_(y)
    assert sim.copies() == {
        ("cpu", "sim:0"): (1, 40),
        ("sim:0", "sim:1"): (1, 40),
        ("sim:1", "sim:2"): (1, 40),
    }
    assert y.cpu().sum().item() == 10
    assert y[0].item() == 1
    assert sim.copies()["sim:2", "cpu"] == (2, 44)
    assert sim.copies()["sim:2", "sim:0"] == sim.Copies(calls=0, bytes=0)
    sim.reset_copies()
    assert sim.copies() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("how", ["flip", "zero", "stale"])
def test_broken_peer_copies(sim, how, dtype):
    x = torch.tensor([1, 0, 1, 1], dtype=dtype, device="sim:0")
    sim.break_peer_copies(0, 1, how=how)
    assert not torch.equal(x.to("sim:1").cpu(), x.cpu())
    assert torch.equal(x.to("sim:2").to("sim:1").cpu(), x.cpu())  # other ways are whole
    assert torch.equal(x.cpu().to("sim:1").to("sim:0").cpu(), x.cpu())
    sim.break_peer_copies(0, 1, False)
    assert torch.equal(x.to("sim:1").cpu(), x.cpu())


def test_streams_are_logged(sim):
    side = torch.Stream(device="sim:1")
    main = torch.accelerator.current_stream(1)
    x = torch.ones(3, device="sim:1")
    sim.reset_stream_log()
    side.wait_stream(main)
    with side:
        assert torch.accelerator.current_stream(1) == side
        assert torch.accelerator.current_device_index() == 1
        y = (x * 2).to("sim:0")
    assert torch.accelerator.current_device_index() == 0
    x.record_stream(side)
    done = side.record_event()
    main.wait_event(done)
    main.synchronize()
    torch.accelerator.synchronize(1)
    log = sim.stream_log()
    assert [(line.action, line.stream) for line in log if line.device == "sim:1"] == [
        ("record", 0),
        ("wait", side.stream_id),
        ("set", side.stream_id),
        ("copy", side.stream_id),
        ("set", 0),
        ("use", side.stream_id),
        ("record", side.stream_id),
        ("wait", 0),
        ("sync stream", 0),
        *([("sync device", 0)] if torch.__version__ >= "2.12" else []),  # PyTorch 2.11 does not ask the backend
    ]
    assert log[0].event == log[1].event > 0
    assert log[0].event != log[7].event == log[6].event
    assert (log[3].source, log[3].target) == ("sim:1", "sim:0")
    assert sim.launches()["sim:1", side.stream_id] >= 1
    assert y.tolist() == [2, 2, 2]
    sim.reset_stream_log()
    assert sim.stream_log() == []


def test_events():
    start, end = (torch.Event(device="sim:1", enable_timing=True) for _ in range(2))
    stream = torch.Stream(device="sim:1")
    start.record(stream)
    end.record(stream)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert torch.sim.default_stream(1).stream_id == 0 != stream.stream_id
    assert torch.sim.current_stream(1) == torch.sim.default_stream("sim:1")


def test_backward_runs_on_the_stream_of_forward(sim):
    x = torch.ones(3, device="sim:1", requires_grad=True)
    side = torch.Stream(device="sim:1")
    with side:
        y = (x * x).sum()
    sim.reset_stream_log()
    y.backward()
    assert sim.launches()["sim:1", side.stream_id] > 0


# ------------------------------------------------------------------------------ random numbers


def test_every_device_has_its_own_generator():
    torch.manual_seed(5)
    on_cpu = torch.rand(6)
    draws = [torch.rand(6, device=f"sim:{i}") for i in range(2)]
    assert torch.equal(draws[0].cpu(), on_cpu)
    assert torch.equal(draws[1].cpu(), on_cpu)
    state = torch.sim.get_rng_state(1)
    first = torch.rand(3, device="sim:1")
    torch.rand(3, device="sim:0")
    torch.sim.set_rng_state(state, "sim:1")
    assert torch.equal(torch.rand(3, device="sim:1"), first)
    with torch.sim.device(1):
        torch.sim.manual_seed(2**64 - 1)
        assert torch.sim.initial_seed() == 2**64 - 1
    with torch.random.fork_rng(devices=[1], device_type="sim"):
        forked = torch.rand(3, device="sim:1")
    assert torch.equal(torch.rand(3, device="sim:1"), forked)


def test_generators_are_bound_to_a_device():
    generator = torch.Generator(device="sim:1").manual_seed(7)
    assert generator.device == torch.device("sim:1")
    draw = torch.rand(3, device="sim:1", generator=generator)
    assert torch.equal(draw.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="sim:0", generator=generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="sim:0", generator=torch.Generator())


# ------------------------------------------------------------------------------ parity with the CPU


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


MODULES = {
    "linear": (lambda: nn.Linear(3, 4), (5, 3)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, stride=2), (2, 4, 6, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2, bias=False), (2, 3, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (1, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), (2, 2, 3, 3)),
    "batchnorm": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "layernorm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)), (3, 4, 6)),
    "instancenorm": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 6)),
    "pooling": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
        (2, 3, 8, 8),
    ),
    "activations": (
        lambda: nn.Sequential(nn.GELU(), nn.PReLU(), nn.SiLU(), nn.GLU(), nn.Softmax(-1)),
        (3, 8),
    ),
    "dropout": (lambda: nn.Dropout(0.5), (40, 5)),
    "dropouts": (lambda: nn.Sequential(nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.RReLU()), (4, 5, 3, 3)),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), None),
    "embedding max_norm": (lambda: nn.Embedding(10, 4, max_norm=1.0), None),
    "embeddingbag": (lambda: nn.EmbeddingBag(10, 4), None),
    "rnn": (lambda: nn.RNN(3, 4), (5, 2, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, dropout=0.3), (5, 2, 3)),
    "lstm projected": (lambda: nn.LSTM(3, 4, proj_size=2, bias=False), (5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, 2, dropout=0.3), (5, 2, 3)),
    "gru without bias": (lambda: nn.GRU(3, 4, bias=False), (5, 2, 3)),
    "cells": (lambda: nn.Sequential(nn.GRUCell(3, 4), nn.LSTMCell(4, 2)), (5, 3)),
    "attention": (SelfAttention, (2, 5, 8)),
    "encoder layer": (encoder, (2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoder(encoder(), 2), (2, 5, 8)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), (5, 3)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 2)), (5, 3, 4, 4)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
}


def run_module(name, device, train):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double().train(train)
    x = torch.randint(0, 10, (4, 3)) if shape is None else torch.randn(shape, dtype=torch.float64)
    module.to(device)
    x = x.to(device).requires_grad_(shape is not None)
    torch.manual_seed(1)
    out = module(x)
    sum(t.square().sum() for t in tensors(out)).backward()
    with torch.no_grad():  # other paths, such as the fast one of an encoder in eval
        plain = module(x)
    gradients = [p.grad for p in module.parameters()]
    return tensors(out), tensors(plain), [] if x.grad is None else x.grad, gradients, list(module.buffers())


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_what_the_cpu_computes(name, train):
    assert_same(run_module(name, "sim:1", train), run_module(name, "cpu", train))


def case_cross_entropy(device):
    x = torch.randn(6, 5).to(device).requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 4, -100]).to(device)
    weight = torch.rand(5).to(device)
    loss = F.cross_entropy(x, target, weight=weight, label_smoothing=0.1)
    loss = loss + F.cross_entropy(x, x.detach().softmax(1)) + F.nll_loss(x.log_softmax(1), target)
    loss.backward()
    return loss, x.grad


def case_double_backward(device):
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)
    net, lstm = nn.Sequential(*layers).to(device), nn.LSTM(2, 3).to(device)
    x = torch.randn(2, 2, 5, 5).to(device).requires_grad_()
    s = torch.randn(4, 2, 2).to(device).requires_grad_()
    loss = net(x).sin().sum() + lstm(s)[0].sum()
    gradients = torch.autograd.grad(loss, [x, s], create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    return gradients, x.grad, s.grad, [p.grad for m in (net, lstm) for p in m.parameters()]


def case_losses(device):
    x, y = torch.randn(4, 4).to(device).requires_grad_(), torch.rand(4, 4).to(device)
    losses = F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits
    results = [loss(x, y, reduction=how) for loss in losses for how in ("none", "mean", "sum")]
    results += [F.kl_div(x, y, reduction="batchmean"), F.triplet_margin_loss(x, y, x * 2)]
    sum(r.sum() for r in results).backward()
    return results, x.grad


def case_packed_sequence(device):
    lstm = nn.LSTM(2, 3, batch_first=True).to(device)
    x = torch.randn(3, 4, 2).to(device).requires_grad_()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]), batch_first=True)
    y, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    assert lengths.is_cpu
    y.sum().backward()
    return y, x.grad


def case_indexing(device):
    x = torch.randn(5, 4).to(device).requires_grad_()
    i = torch.tensor([0, 2, 2]).to(device)
    rows = i[:, None].expand(3, 4)
    mask = torch.tensor([True, False, True, False, True]).to(device)
    results = [x[i], x[i, 1:3], x[mask], x[:, None, [0, 1]], x.index_select(0, i), x.gather(0, rows)]
    results += [torch.zeros_like(x).scatter_add(0, rows, x[:3]), torch.zeros_like(x).index_add(0, i, x[:3])]
    results += [x.masked_fill(mask[:, None], 0), torch.where(x > 0, x, -x), x.topk(2)[0], x.sort(0)[0]]
    results += [torch.cat([x, x]), torch.stack([x, x]), x.roll(1), x.flip(0), F.pad(x, (1, 1)), x.cumsum(0)]
    sum(r.square().sum() for r in results).backward()
    z = torch.zeros(5, 4).to(device)
    z[mask] = 1.0
    z[i] += 2
    z[1, 2] = 7
    z[:, torch.tensor([1, 2])] = 5.0
    z.scatter_(0, rows, 9.0)
    return results, x.grad, z, x.detach().nonzero()


def case_strides(device):
    x = torch.randn(2, 3, 4, 5).to(device).requires_grad_()
    last = x.to(memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    conv = nn.Conv2d(3, 2, 3).to(device, memory_format=torch.channels_last)
    y = conv(last)
    views = [
        x.transpose(1, 3),
        x[:, ::2, 1:],
        x.permute(3, 1, 0, 2),
        x.expand(2, 2, 3, 4, 5),
        x.unfold(3, 2, 1),
    ]
    results = [y, last, last.mean(1), *views, *[v.reshape(-1) for v in views], *[v * 2 for v in views]]
    sum(r.square().sum() for r in results).backward()
    flat = torch.zeros(6).to(device)
    flat.view(2, 3).t()[1:] += 1  # writes through views
    return [r.contiguous() for r in results], x.grad, conv.weight.grad, flat


def case_linear_algebra(device):
    x = torch.randn(4, 4).to(device).requires_grad_()
    results = [torch.linalg.inv(x), torch.linalg.svdvals(x), torch.linalg.det(x), torch.cdist(x, x), x.std(0)]
    results += [
        torch.einsum("ij,kj->ik", x, x),
        x.norm(),
        x.logsumexp(0),
        x.max(0)[0],
        torch.outer(x[0], x[1]),
    ]
    sum(r.sum() for r in results).backward()
    z = torch.view_as_complex(torch.randn(3, 2).to(device))
    spectrum = torch.view_as_real(torch.fft.fft(z.conj() * z))
    return results, x.grad, spectrum, z.conj().clone().imag


def case_foreach(device):
    a = [torch.randn(3).to(device), torch.randn(2, 2).to(device)]
    b = [torch.randn(3).to(device), torch.randn(2, 2).to(device)]
    results = [torch._foreach_add(a, b), torch._foreach_norm(a), torch._foreach_lerp(a, b, 0.5)]
    torch._foreach_add_(a, b, alpha=2)
    torch._foreach_copy_(b, a)
    torch._foreach_mul_(a, torch.tensor(2.0).to(device))
    torch._foreach_addcdiv_(b, a, a, value=1.0)
    torch._foreach_div_(a, [1.0, 2.0])
    return results, a, b


def case_padded_encoder(device):
    # On the CPU, nested tensors would be used, which warn.
    net = nn.TransformerEncoder(encoder(), 1, enable_nested_tensor=device != "cpu").to(device).eval()
    x = torch.randn(2, 3, 8).to(device)
    mask = torch.tensor([[False, False, True], [False, True, True]]).to(device)
    with torch.no_grad():
        return net(x, src_key_padding_mask=mask)


def case_checkpoint(device):
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
    x = torch.randn(4, 3).to(device).requires_grad_()
    torch.manual_seed(1)
    for reentrant in (False, True):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    return x.grad


def case_functional(device):
    net, x = nn.Linear(3, 2).to(device), torch.randn(4, 3).to(device)

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, x).square().sum()

    parameters = {name: p.detach() for name, p in net.named_parameters()}
    gradient = torch.func.grad(loss)
    return gradient(parameters, x), torch.func.vmap(gradient, (None, 0))(parameters, x)


def case_inference(device):
    with torch.inference_mode():
        net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2)).to(device)
        return net(torch.randn(2, 2, 5, 5).to(device)), nn.LSTM(2, 3).to(device)(torch.ones(3, 1, 2).to(device))


def case_out_and_set(device):
    x = torch.randn(4, 3).to(device)
    out = torch.empty(0, device=device)
    torch.add(x, 1, out=out)
    wide = torch.empty(2, 2, device=device).resize_(0)
    torch.mm(x, x.t(), out=wide)
    y = x.clone()
    y.data = x[:2]
    w = torch.empty(0, device=device).set_(x)
    vector = nn.utils.parameters_to_vector([nn.Parameter(x)])
    return out, wide, y, w, vector, x.half().double(), x.view(torch.int64), x.to(torch.int8), x.new_zeros(2)


CASES = {name[5:]: case for name, case in globals().items() if name.startswith("case_")}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", CASES)
def test_operators_compute_what_the_cpu_computes(case):
    results = []
    for device in ("sim:1", "cpu"):
        torch.manual_seed(0)
        results.append(CASES[case](device))
    assert_same(*results)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam loop": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=4),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_compute_what_the_cpu_computes(name):
    results = []
    for device in ("sim:1", "cpu"):
        torch.manual_seed(0)
        net, x = nn.Linear(3, 2).to(device), torch.randn(5, 3).to(device)
        optimizer = OPTIMIZERS[name](net.parameters())

        def closure(net=net, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            return loss

        for _ in range(3):
            optimizer.step(closure)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append(list(net.parameters()))
    assert_same(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2)).to("sim:1")
    x = torch.randn(2, 2, 5, 5, device="sim:1")
    with torch.autocast("sim", dtype=dtype):
        y = net(x)
        assert y.dtype == (y @ y.t()).dtype == dtype
        assert y.softmax(1).dtype == F.mse_loss(y, y.detach()).dtype == torch.float32
        assert nn.LSTM(2, 3).to("sim:1")(x[0, :, :, :2])[0].dtype == dtype
        assert (x.double() @ x.double().mT).dtype == torch.float64
        with torch.autocast("sim", enabled=False):
            assert net(x).dtype == torch.float32
    assert net(x).dtype == torch.float32
    torch.testing.assert_close(y.float(), net(x), rtol=0.05, atol=0.05)
    scaler, optimizer = torch.amp.GradScaler("sim"), torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(y.float().sum()).backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    scaler.step(optimizer)
    scaler.update()


# ------------------------------------------------------------------------------ modules and storage


def test_state_dict_deepcopy_and_pickle():
    net = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.BatchNorm1d(3))).to("sim:1")
    twin = copy.deepcopy(net)
    assert {t.device for t in twin.state_dict().values()} == {torch.device("sim:1")}
    state = pickle.loads(pickle.dumps({k: v.cpu() for k, v in net.state_dict().items()}))
    nn.init.zeros_(twin.a.weight)
    assert net.a.weight.abs().sum() > 0
    twin.load_state_dict(state)
    assert torch.equal(twin.a.weight, net.a.weight)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    for location in ("cpu", "sim:2", None):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert {t.device for t in loaded.values()} == {torch.device(location or "sim:1")}
        assert torch.equal(loaded["a.weight"].cpu(), net.a.weight.cpu())
    assert str(torch.ones(1, device="sim:1")) == "tensor([1.], device='sim:1')"


def test_moving_a_module(sim):
    def tied():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight = net[0].weight
        return net, net[0].weight

    net, weight = tied()
    net.to("sim:0")
    assert net[0].weight is not weight  # PyTorch's behaviour for such a backend
    weight = net[0].weight
    net.to("sim:1")
    assert net[0].weight is weight
    assert weight.device == torch.device("sim:1")
    net, weight = tied()
    with sim.keeping_parameters():
        net.to("sim:0")
    assert net[0].weight is net[1].weight is weight
    assert isinstance(weight, nn.Parameter)


def test_pinned_memory():
    x = torch.randn(4, 2)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.device == torch.device("cpu")
    assert torch.equal(pinned.to("sim:1", non_blocking=True).cpu(), x)
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert next(iter(DataLoader(x, batch_size=2, pin_memory=True))).is_pinned()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch 2.11
def test_gradients_cross_devices():
    x = torch.ones(2, device="sim:1", requires_grad=True)
    (x.to("sim:0").cpu().to("sim:2") * 3).sum().backward()
    assert x.grad.device == x.device
    assert x.grad.tolist() == [3, 3]


# ------------------------------------------------------------------------------ building and conftest


def run_python(*arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": str(TESTS), **environment}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_loading_twice(sim):
    assert simulator.load(8) is sim
    assert simulator.load(2) == "8 simulated devices were loaded, not 2"


def test_reasons_for_not_building(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(simulator, "_SOURCES", [broken])
    assert "do not compile here: " in simulator.build(tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["building"]
    assert "cannot be built here: " in simulator.build(broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in simulator.build(tmp_path / "cache")


def test_another_process_takes_the_built_backend():
    program = """
import sim, torch
assert sim.load(2) is sim
x = torch.ones(2, device="sim:1", requires_grad=True)
x.sum().backward()
print(torch.accelerator.device_count(), x.grad.tolist())
"""
    run = run_python("-c", program)
    assert (run.returncode, run.stdout, run.stderr) == (0, "2 [1.0, 1.0]\n", "")


def test_loading_too_late():
    program = """
import sim, torch
torch.ones(2, requires_grad=True).sum().backward()
sim.load(2)
"""
    run = run_python("-c", program)
    assert run.returncode == 1
    assert "load() has to come before the first backward pass" in run.stderr


LEAKS = """
import subprocess, threading, time, torch
def test_clean(kind, devices, first):
    assert [d.type for d in devices(2)] == [kind, kind] and first == devices(1)[0]
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_dtype_is_put_back(): assert torch.get_default_dtype() == torch.float32
def test_device(): torch.accelerator.set_device_index(1)
def test_device_is_put_back(): assert torch.accelerator.current_device_index() == 0
def test_grad_mode(): torch.set_grad_enabled(False)
def test_default_device(): torch.set_default_device("sim:1")
def test_default_device_is_put_back(): assert torch.ones(1).is_cpu
def test_autocast(): torch.set_autocast_enabled("sim", True)
def test_autocast_is_put_back(): assert not torch.is_autocast_enabled("sim")
def test_num_threads(): torch.set_num_threads(torch.get_num_threads() + 1)
def test_thread(): threading.Thread(target=time.sleep, args=(0.5,)).start()
def test_process(): globals().update(child=subprocess.Popen(["sleep", "10"]))
def test_end(): child.kill(); child.wait()
"""


def test_conftest_fails_what_leaves_something_behind(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text().replace("GRACE = 10.0", "GRACE = 0.1"))
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = run_python("-m", "pytest", "-rE", str(tmp_path))
    assert "15 passed, 8 errors" in run.stdout, run.stdout + run.stderr
    for message in [
        "default dtype: torch.float32 -> torch.float64",
        "current device: 0 -> 1",
        "default device: cpu -> sim:1",
        "grad mode: True -> False",
        "autocast: ",
        "number of threads: ",
        "thread Thread-",
        "process ",
    ]:
        assert f"the test left behind: {message}" in run.stdout
