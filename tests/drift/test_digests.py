"""Digests of tensors' bits: whatever bit flips, and wherever it is, they change, and tell which tensor it was in."""

from __future__ import annotations

import random

import pytest
import torch

from lockstep._base.digests import Digests

CPU = torch.device("cpu")


def tensors():
    numbers = torch.Generator().manual_seed(0)
    sizes = [(3, torch.float32), (70_001, torch.float32), (7, torch.bfloat16), (40_003, torch.float16)]
    sizes += [(5, torch.float64), (33, torch.complex64), (150_000, torch.float64)]
    made = [torch.randn(n, generator=numbers).to(dtype) for n, dtype in sizes]
    return [*made, torch.ones(5, dtype=torch.bool), torch.arange(9), torch.empty(0), torch.randn(4, 6)[:, ::2]]


def test_every_bit_counts():
    some, numbers = tensors(), random.Random(0)
    look = Digests(some)
    digest, each = look.digest(CPU), look.each()
    for _ in range(60):
        number = numbers.randrange(9)
        data = some[number].view(torch.uint8)
        place, bit = numbers.choice([0, len(data) - 1, numbers.randrange(len(data))]), 1 << numbers.randrange(8)
        data[place] ^= bit
        now = Digests(some)
        assert now.digest(CPU) != digest
        assert [n for n, (a, b) in enumerate(zip(each, now.each(), strict=True)) if a != b] == [number]
        data[place] ^= bit
    assert Digests(some).digest(CPU) == digest


def test_places_count():
    for size in (10, 300_000):
        values = torch.arange(float(size))
        swapped = values.clone()
        swapped[[2, size - 2]] = swapped[[size - 2, 2]]
        assert Digests([values]).digest(CPU) != Digests([swapped]).digest(CPU)
    a, b = torch.ones(20_000), torch.zeros(20_000)
    assert Digests([a, b]).digest(CPU) != Digests([b, a]).digest(CPU)
    assert Digests([a[:3], b[:3]]).digest(CPU) != Digests([b[:3], a[:3]]).digest(CPU)


def test_changes_that_cancel_out_count():
    """Small whole numbers at regular places, as in a histogram: sums with weights of a series would be equal."""
    row = 1 << 16
    for steps in (1, 2, 7, row, row + 1):
        counts = torch.zeros(3 * row + 8, dtype=torch.int64)
        before = Digests([counts]).each()
        counts[[3, 3 + steps, 3 + 2 * steps]] = torch.tensor([1, -2, 1])
        assert Digests([counts]).each() != before
    table = torch.zeros(5, row, dtype=torch.int64)
    table[1, 2] = 7
    swapped = table.clone()
    swapped[1, 2], swapped[2, 1] = 0, 7
    assert Digests([table]).each() != Digests([swapped]).each()
    pair, other = torch.zeros(2, 3 * row, dtype=torch.int64)
    pair[1] = 7  # factor 1 of tensor 0
    one = Digests([pair, other]).digest(CPU)
    pair[1], other[0] = 0, 7  # factor 0 of tensor 1
    assert Digests([pair, other]).digest(CPU) != one


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.complex64])
def test_signs_of_two_values_count(dtype):
    """Two highest bits of eight bytes: what either adds to a product is half of 2**64, whatever its factor."""
    numbers = random.Random(0)
    for size in (16, 300_000):
        values = torch.rand(size).to(dtype) + 1
        before = Digests([values]).each()
        for _ in range(20):
            places = numbers.sample(range(size), 2)
            other = values.clone()
            other[places] *= -1
            assert Digests([other]).each() != before
    one, two = torch.ones(3, dtype=dtype), torch.ones(100_000, dtype=dtype)
    before = Digests([one, two]).digest(CPU)
    one[1], two[7] = -1, -1
    assert Digests([one, two]).digest(CPU) != before


def test_zeros_are_not_nothing():
    for size in (1, 9, 300_000):
        assert Digests([torch.zeros(size)]).each() != Digests([torch.empty(0)]).each()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_and_views_of_conjugates_have_their_values_digest():
    a, b = torch.eye(3), torch.eye(3)
    b[1, 1] = 2
    for layout in (torch.sparse_coo, torch.sparse_csr):
        first, again, other = (Digests([t.to_sparse(layout=layout)]).each() for t in (a, a.clone(), b))
        assert first == again != other
    values = torch.randn(5, dtype=torch.complex64)
    assert Digests([values.conj()]).each() == Digests([values.conj().resolve_conj()]).each()
    assert Digests([values.conj().imag]).each() == Digests([-values.imag]).each()


def test_memory_and_strides_do_not_count():
    values = torch.randn(7, 11_001)
    views = torch.cat([torch.zeros(1), values.flatten()])[1:].view(7, -1), values.t().contiguous().t()
    for view in views:
        assert Digests([view]).each() == Digests([values]).each()


def test_nothing_at_all():
    assert Digests([]).digest(CPU) == 1
    assert Digests([torch.empty(0)]).each() == [0]
