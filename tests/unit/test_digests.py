"""Digests of tensors' bits: whatever bit flips, and wherever it is, they change, and tell which tensor it was in."""

from __future__ import annotations

import random

import torch

from lockstep.distributed.digests import Look

CPU = torch.device("cpu")


def tensors():
    numbers = torch.Generator().manual_seed(0)
    sizes = [(3, torch.float32), (70_001, torch.float32), (7, torch.bfloat16), (40_003, torch.float16)]
    sizes += [(5, torch.float64), (33, torch.complex64), (150_000, torch.float64)]
    made = [torch.randn(n, generator=numbers).to(dtype) for n, dtype in sizes]
    return [*made, torch.ones(5, dtype=torch.bool), torch.arange(9), torch.empty(0), torch.randn(4, 6)[:, ::2]]


def test_every_bit_counts():
    some, numbers = tensors(), random.Random(0)
    look = Look(some)
    digest, each = look.digest(CPU), look.each()
    for _ in range(60):
        number = numbers.randrange(9)
        data = some[number].view(torch.uint8)
        place, bit = numbers.choice([0, len(data) - 1, numbers.randrange(len(data))]), 1 << numbers.randrange(8)
        data[place] ^= bit
        now = Look(some)
        assert now.digest(CPU) != digest
        assert [n for n, (a, b) in enumerate(zip(each, now.each(), strict=True)) if a != b] == [number]
        data[place] ^= bit
    assert Look(some).digest(CPU) == digest


def test_places_count():
    for size in (10, 300_000):
        values = torch.arange(float(size))
        swapped = values.clone()
        swapped[[2, size - 2]] = swapped[[size - 2, 2]]
        assert Look([values]).digest(CPU) != Look([swapped]).digest(CPU)
    a, b = torch.ones(20_000), torch.zeros(20_000)
    assert Look([a, b]).digest(CPU) != Look([b, a]).digest(CPU)
    assert Look([a[:3], b[:3]]).digest(CPU) != Look([b[:3], a[:3]]).digest(CPU)


def test_memory_and_strides_do_not_count():
    values = torch.randn(7, 11_001)
    views = torch.cat([torch.zeros(1), values.flatten()])[1:].view(7, -1), values.t().contiguous().t()
    for view in views:
        assert Look([view]).each() == Look([values]).each()


def test_nothing_at_all():
    assert Look([]).digest(CPU) == 1
    assert Look([torch.empty(0)]).each() == [0]
