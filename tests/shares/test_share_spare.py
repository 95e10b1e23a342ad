"""Memory that is kept for the next share's gradients."""

import weakref

import torch

from lockstep.shares import spare
from lockstep.shares.spare import SpareMemory


def test_what_is_kept_is_given_back_piece_by_piece():
    memory, tensors = SpareMemory(), [torch.zeros(4) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    memory.keep([None, *tensors])
    del tensors
    counts = []
    for _ in range(5):
        counts.append(sum(link() is not None for link in alive))
        memory.give_back(16)
    assert counts == [3, 2, 1, 0, 0]


def test_room_is_made_for_something_else():
    memory, tensors = SpareMemory(), [torch.zeros(4) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    memory.keep(tensors)
    tensors.clear()
    memory.give_back(20)
    assert sum(link() is not None for link in alive) == 1
    memory.give_back(20)
    assert memory._bytes == 0


def test_there_is_a_most_that_is_kept(monkeypatch):
    monkeypatch.setattr(spare, "MOST_BYTES", 40)
    memory, tensors = SpareMemory(), [torch.zeros(4) for _ in range(4)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    memory.keep(tensors)
    tensors.clear()
    assert [link() is not None for link in alive] == [True, True, False, False]
    memory.give_back(16)
    memory.keep([torch.zeros(6)])
    assert memory._bytes == 40
