"""Frozen weights that packages keep in few bits, with adapters that train beside them: in ranks and in replicas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from client_programs import equal, in_one_process, need, quiet, trained, trains_like
from threaded import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of clients


@pytest.fixture(autouse=True)
def _quiet():
    quiet()


class Adapter(nn.Module):
    """A frozen layer, and one of low rank that trains."""

    def __init__(self, layer, rows, columns):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def by_torchao(config):
    from torchao import quantization

    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    quantization.quantize_(net, getattr(quantization, config)())
    return nn.Sequential(Adapter(net[0], 64, 64), net[1], Adapter(net[2], 64, 64))


def int8():
    return by_torchao("Int8WeightOnlyConfig")


def float8():
    return by_torchao("Float8WeightOnlyConfig")


def four_bits():
    """With 4-bit weights of bitsandbytes, which are made when the module is moved to its device."""
    from bitsandbytes.nn import Linear4bit

    layers = [Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32) for _ in range(2)]
    net = nn.Sequential(Adapter(layers[0], 64, 64), nn.Tanh(), Adapter(layers[1], 64, 64))
    return net.to("cpu")


def eight_bits():
    from bitsandbytes.nn import Linear8bitLt

    layers = [Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2)]
    net = nn.Sequential(Adapter(layers[0], 64, 64), nn.Tanh(), Adapter(layers[1], 64, 64))
    return net.to("cpu")


def adapters_of_peft(factory):
    import peft

    net = factory()
    plain = nn.Sequential(net[0].layer, net[1], net[2].layer)
    return peft.get_peft_model(plain, peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False))


def int8_with_peft():
    return adapters_of_peft(int8)


def four_bits_with_peft():
    return adapters_of_peft(four_bits)


BY_TORCHAO = [int8, float8, int8_with_peft]
quantized = pytest.mark.parametrize("factory", [*BY_TORCHAO, four_bits, eight_bits, four_bits_with_peft])


def made(factory, seed=0):
    need("torchao" if factory in BY_TORCHAO else "bitsandbytes")
    need("peft")
    torch.manual_seed(seed)
    return factory()


def mean_square(module, x):
    return module(x).square().mean()


def random(steps=3, world=2):
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(4, 64, generator=generator) for _ in range(world)] for _ in range(steps)]


@quantized
@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("form", [lockstep.replicate, lockstep.DistributedDataParallel], ids=["replicate", "wrapper"])
def test_ranks(form, factory, hosts):
    """Every rank has rank 0's frozen weights, in all bits; the adapters train as in one process.

    bitsandbytes keeps a part of the values in Python attributes: its ranks begin alike, as from one checkpoint.
    """
    modules = [made(factory, seed if factory in BY_TORCHAO else 0) for seed in range(2)]
    copies = [made(factory) for _ in range(2)]
    kinds = [type(parameter) for parameter in copies[0].parameters()]
    x = random()
    steps = in_one_process(copies, mean_square, x)

    def work(rank):
        module = form(modules[rank.rank], process_group=rank.group)
        assert [type(parameter) for parameter in module.parameters()] == kinds
        trains_like(steps, rank, module, mean_square, x)
        lockstep.check_in_sync(module)

    run_ranks(2, work, hosts=hosts)
    with torch.no_grad():
        for module in modules:
            equal(module(x[0][0]), copies[0](x[0][0]), "output after training")


@quantized
def test_replicas(factory):
    """In one process, the gradients of a batch over two replicas are those of the module itself."""
    module, plain = made(factory), made(factory)
    parallel = lockstep.DataParallel(module, ["cpu", "cpu"])
    optimizers = [torch.optim.SGD(trained(one), 0.1) for one in (module, plain)]
    for batch in random():
        x = torch.cat(batch)
        for one, optimizer in zip((parallel, plain), optimizers, strict=True):
            optimizer.zero_grad()
            mean_square(one, x).backward()
        for got, wanted in zip(trained(module), trained(plain), strict=True):
            equal(got.grad, wanted.grad, "gradient", 1e-4)
        for optimizer in optimizers:
            optimizer.step()
    again = copy.deepcopy(parallel)
    equal(again(x), plain(x), "a copy", 1e-4)
