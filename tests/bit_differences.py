"""Small differences in the values of a module: permuted, exchanged, single bits; each has to be found."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Values(nn.Module):
    """Parameters of equal shapes, small and large, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        for name, shape in (("a", (4, 6)), ("b", (4, 6)), ("large", (30, 7000)), ("other", (30, 7000))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=numbers) + 3))
        self.register_parameter("precise", nn.Parameter(torch.randn(16, generator=numbers, dtype=torch.float64)))
        self.register_buffer("histogram", torch.tensor([5, 5, 6, 0, 2, 9, 5]))
        self.register_buffer("nan", torch.full((5,), float("nan")))
        self.register_buffer("zeros", torch.zeros(64, dtype=torch.float64))

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum().double() for parameter in self.parameters()]).sum()


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, four bytes at a time."""
    return tensor.data.view(-1).view(torch.int32)


def exchange(one: Tensor, other: Tensor) -> None:
    """Give each tensor the values of the other."""
    kept = one.data.clone()
    one.data.copy_(other.data)
    other.data.copy_(kept)


def flip(tensor: Tensor, bit: int, *places: int) -> None:
    """Flip a bit in each of some places of four bytes."""
    for place in places:
        bits_of(tensor)[place] ^= -(1 << 31) if bit == 31 else 1 << bit


BIT_DIFFERENCES: dict[str, tuple[Callable[[Values], object], str]] = {
    "values permuted": (lambda m: m.a.data.copy_(m.a.data.flip(1)), "parameter a"),
    "rows permuted": (lambda m: m.large.data.copy_(m.large.data.roll(1, 0)), "parameter large"),
    "columns permuted": (lambda m: m.large.data.copy_(m.large.data.roll(2, 1)), "parameter large"),
    "two values exchanged": (lambda m: exchange(m.large[0, 0], m.large[29, 6999]), "parameter large"),
    "parameters exchanged": (lambda m: exchange(m.a, m.b), "parameter a"),
    "large parameters exchanged": (lambda m: exchange(m.large, m.other), "parameter large"),
    "values exchanged between parameters": (lambda m: exchange(m.a[1], m.b[1]), "parameter a"),
    "values exchanged between large parameters": (lambda m: exchange(m.large[3], m.other[3]), "parameter large"),
    "counts": (lambda m: m.histogram.add_(torch.tensor([-1, 2, -1, 0, 0, 0, 0])), "buffer histogram"),
    "counts exchanged": (lambda m: exchange(m.histogram[0], m.histogram[5]), "buffer histogram"),
    "the lowest bit": (lambda m: flip(m.large, 0, 123_456), "parameter large"),
    "the sign of one zero": (lambda m: m.zeros[9].neg_(), "buffer zeros"),
    "the signs of two zeros": (lambda m: m.zeros[8:10].neg_(), "buffer zeros"),
    "the signs of all zeros": (lambda m: m.zeros.neg_(), "buffer zeros"),
    "the signs of two values": (lambda m: flip(m.precise, 31, 5, 9), "parameter precise"),
    "the signs of two values of a large parameter": (lambda m: flip(m.large, 31, 3, 200_001), "parameter large"),
    "the signs of values of two parameters": (lambda m: (flip(m.b, 31, 3), flip(m.large, 31, 3)), "parameter b"),
    "the payload of one NaN": (lambda m: flip(m.nan, 3, 2), "buffer nan"),
    "the signs of two NaN": (lambda m: flip(m.nan, 31, 1, 3), "buffer nan"),
}
"""What is changed, and the first parameter or buffer that is another one then."""
