"""A training run with everything that has state, which a test can stop after any step and resume."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

EPOCHS, ROWS, BATCH = 3, 28, 4
STEPS_PER_EPOCH = -(-ROWS // 2 // BATCH)  # on two ranks
LAST = EPOCHS * STEPS_PER_EPOCH


@dataclass(frozen=True)
class Kind:
    """Which of the many things a run has."""

    optimizer: str = "adamw"
    power_sgd: bool = False
    accumulate: bool = False
    buffer_policy: str = "rank0"
    wrapper: bool = False


def sha256(tensor):
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()).hexdigest()


def network():
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3)
    )


class Run:
    """One rank of a run."""

    def __init__(self, rank, kind: Kind):
        self.rank, self.kind = rank, kind
        torch.manual_seed(100 + rank.rank)  # dropout: every rank has numbers of its own
        random.seed(200 + rank.rank)
        numpy.random.seed(300 + rank.rank)
        options = {"process_group": rank.group, "buffer_policy": kind.buffer_policy}
        make = lockstep.DistributedDataParallel if kind.wrapper else lockstep.replicate
        self.model = make(network(), **options)
        parameters = self.model.parameters()
        if kind.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=0.02)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=LAST)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.generator = torch.Generator().manual_seed(400 + rank.rank)
        self.losses: list[float] = []
        if kind.power_sgd:
            state = powerSGD_hook.PowerSGDState(rank.group, 1, start_powerSGD_iter=2, min_compression_rate=1)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        numbers = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(ROWS, 6, generator=numbers), torch.randint(3, (ROWS,), generator=numbers), torch.arange(ROWS)
        )
        order = DistributedSampler(data, rank.world, rank.rank, seed=5)
        self.sampler = lockstep.ResumableSampler(order, seed=6)
        self.loader = DataLoader(data, BATCH, sampler=self.sampler)
        self.seen: list[list[int]] = []
        self.step = 0

    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": self.sampler,
            "generator": self.generator,
            "losses": lockstep.checkpoints.per_rank(self.losses),
        }

    def train(self, *, save_to: Path | None = None, until: int = LAST) -> None:
        while self.sampler.epoch < EPOCHS:
            for x, y, rows in self.sampler.batches(self.loader):
                self._step(x, y, rows)
                if save_to is not None:
                    lockstep.save(save_to, keep=LAST, step=self.step, group=self.rank.group, **self.state())
                if self.step == until:
                    return

    def _step(self, x, y, rows):
        self.optimizer.zero_grad()
        noise = torch.randn(x.shape, generator=self.generator) * random.random() + float(numpy.random.randn())
        parts = [(x + noise, y)]
        if self.kind.accumulate and len(x) == BATCH:
            parts = [(x[:2] + noise[:2], y[:2]), (x[2:] + noise[2:], y[2:])]
        for number, (part, labels) in enumerate(parts, start=1):
            with lockstep.accumulate(self.model, last=number == len(parts)):
                loss = nn.functional.cross_entropy(self.model(part), labels)
                self.scaler.scale(loss / len(parts)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.losses.append(loss.item())
        self.seen.append(rows.tolist())
        self.step += 1

    def resume(self, folder: Path) -> None:
        found = lockstep.resume(folder, group=self.rank.group, **self.state())
        assert found is not None
        self.step = found.step

    def digests(self) -> dict[str, str]:
        """Everything that a step has changed, by digest."""
        model = self.model.module if self.kind.wrapper else self.model
        found = {f"model {name}": sha256(tensor) for name, tensor in model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"optimizer {number} {name}"] = sha256(torch.as_tensor(value))
        found["random numbers"] = str(
            [torch.rand(1).item(), random.random(), numpy.random.rand(), torch.rand(1, generator=self.generator).item()]
        )
        found["rest"] = str(
            [self.scheduler.state_dict(), self.scaler.state_dict(), self.sampler.state_dict(), self.losses]
        )
        return found

    def check(self, wanted: dict[str, str]) -> None:
        """What it ends with is what another run has ended with."""
        got = self.digests()
        assert got == wanted, (
            self.step,
            [(name, got[name], wanted[name]) for name in wanted if got[name] != wanted[name]],
        )
