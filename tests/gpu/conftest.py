"""What the tests on GPUs share. They skip where CUDA is missing.

`LOCKSTEP_GPU_TESTS=cpu` runs those whose logic does not need a GPU on the CPU instead: it checks the tests, not the
library, and skips what only a GPU can show.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from one_gpu import CYCLES

DRY = os.environ.get("LOCKSTEP_GPU_TESTS") == "cpu"


@pytest.fixture
def home() -> torch.device:
    """The device of the network: the first GPU (the CPU in a dry run)."""
    if DRY:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU, for tests that mean nothing without one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def gpus(gpu: torch.device) -> list[torch.device]:
    """All GPUs, where there are several."""
    if torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


@pytest.fixture(params=["twice", "three times", "all"])
def places(request: pytest.FixtureRequest, home: torch.device) -> list[torch.device]:
    """Device lists: one GPU twice, three times, and all GPUs where there are several."""
    if request.param == "all":
        return request.getfixturevalue("gpus")
    return [home] * (2 if request.param == "twice" else 3)


@pytest.fixture
def busy(gpu: torch.device) -> Callable[..., None]:
    """Keeps a stream (the current one) of a GPU busy for a tenth of a second or more, without the host waiting."""

    def keep_busy(stream: torch.Stream | None = None, device: torch.device = gpu) -> None:
        with torch.cuda.device(device):
            if stream is None:
                torch.cuda._sleep(CYCLES)
            else:
                with stream:
                    torch.cuda._sleep(CYCLES)

    keep_busy()  # the first launch loads the kernel, which may wait for the device
    torch.cuda.synchronize()
    return keep_busy


@pytest.fixture
def exact() -> Any:
    """Convolutions and products of matrices without TF32, so that results may be compared."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), (6,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3)), (3, 8, 8)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[:, 0])


def encoder() -> tuple[nn.Module, tuple[int, ...]]:
    return Encoder(), (5, 16)


@pytest.fixture(params=[mlp, cnn, encoder], ids=lambda make: make.__name__)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[int, ...]]:
    """A network on the CPU with the shape of one row of its input; its output has three numbers a row."""
    return request.param()
