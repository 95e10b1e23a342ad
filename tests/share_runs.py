"""Short trainings with shares, whose fingerprint is to be the same on any number of ranks."""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import lockstep
from threaded import Rank


class Cell(NamedTuple):
    """What is trained, and how."""

    model: str
    dtype: str
    optimizer: str
    clips: bool = True
    accumulates: bool = False


CELLS = [
    Cell(model, dtype, optimizer, accumulates=dtype == "bfloat16")
    for model, dtype, optimizer in itertools.product(
        ["digits", "characters"], ["float32", "bfloat16"], ["SGD", "fused AdamW"]
    )
]


def dropout_rate(rate: float) -> float:
    """The rate for ranks that are processes; those that are threads share the generator of the CPU: without dropout."""
    return rate if threading.current_thread() is threading.main_thread() else 0.0


class Characters(nn.Module):
    """Predicts the next of 32 characters; with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout_rate(0.1), batch_first=True)
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, with the classes in the second dimension."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.embedding(x), src_mask=mask, is_causal=True)).transpose(1, 2)


def digits(width: int = 8) -> nn.Module:
    """Tells 10 digits apart; with batch normalisation and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout_rate(0.2)),
        nn.Linear(2 * width * 16, 10),
    )


MODELS = {"digits": digits, "characters": Characters}


def data_of(model: str, samples: int = 90) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    if model == "digits":
        return TensorDataset(
            torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)
        )
    text = torch.randint(32, (samples, 9), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


ROWS = TensorDataset(torch.arange(16.0).view(16, 1))


def batches_of(
    rank: Rank, rows: Any = ROWS, size: int = 4, shares: int = 4, *, shuffle: bool = False, **options: Any
) -> lockstep.shares.GlobalBatches:
    """Batches of the rows, in their order."""
    return lockstep.shares.GlobalBatches(rows, size, shares, shuffle=shuffle, process_group=rank.group, **options)


def backward(model: Any, batch: Any) -> None:
    """Through the sum of what each share of a batch gives."""
    for (x,) in batch:
        model(x).sum().backward()


def train(
    rank: Rank, cell: Cell, steps: int = 3, shares: int = 8, data: Dataset[Any] | None = None, batch_size: int = 32
) -> str:
    """The fingerprint after so many steps."""
    model = lockstep.replicate(rank.make(MODELS[cell.model]), shares=shares, process_group=rank.group)
    optimizer = make_optimizer(cell.optimizer, model)
    batches = lockstep.shares.GlobalBatches(
        data or data_of(cell.model), batch_size, shares, seed=1, last="smaller", process_group=rank.group
    )
    for number, batch in enumerate(itertools.islice(forever(batches), steps)):
        if not cell.accumulates or number % 2 == 0:
            optimizer.zero_grad()
        for x, y in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=cell.dtype == "bfloat16"):
                loss = cross_entropy(model(x), y, reduction="sum")
            loss.backward()
        if cell.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return lockstep.shares.fingerprint(model, optimizer)


def forever(batches: lockstep.shares.GlobalBatches) -> Any:
    """The batches of one epoch after the other."""
    while True:
        yield from batches


def train_all(rank: Rank, steps: int = 3) -> list[str]:
    """The fingerprint of each cell."""
    return [train(rank, cell, steps) for cell in CELLS]
