"""Random programs that are right, and train with optimizers: replicas stay alike, and nothing is raised or warned of.

Its setting says which optimizers, and a line what else is done in a round. Every rank is a thread, which has batches of
its own; all else is alike on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import lockstep
from fuzz.programs import Program
from programs.networks import Applying
from threaded import run_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=False),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-3),
    "tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2, dtype=torch.float64)),
    "LBFGS": lambda groups: torch.optim.LBFGS([p for each in groups for p in each["params"]], lr=0.05, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=1000),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}
EVENTS = (
    *("freeze", "unfreeze", "average written back", "average for a while", "noise for a while", "skip", "accumulate"),
    *("load", "load the optimizer", "another optimizer", "rate", "evaluate", "nothing", "nothing", "nothing"),
)
"""What may happen in a round, beside its step."""


class Setting(NamedTuple):
    """What holds for a whole program."""

    seed: int
    world: int
    backend: str
    form: str
    """replicate, wrapper or sharded."""
    optimizers: tuple[str, ...]
    """They share the parameters, or take turns on all of them."""
    turns: bool
    scheduler: str
    closure: bool
    clip: str
    skip_on: bool
    device: str = ""


def draw(seed: int, length: int, device: str = "") -> Program:
    """Return the program of a seed."""
    chance = random.Random(f"optimizers {seed}")
    names = tuple(chance.choices(list(OPTIMIZERS), k=chance.choice([1, 1, 2, 3])))
    form = chance.choice(["replicate", "replicate", "wrapper", "sharded"])
    if form == "sharded" or "LBFGS" in names:
        names = names[:1]
    if form == "sharded" and names[0] in ("LBFGS", "Adafactor"):
        names = ("AdamW",)
    scheduler = chance.choice(["", "", *SCHEDULERS])
    if scheduler == "one cycle" and {*names} & {"Adagrad", "Rprop", "LBFGS", "Adafactor", "SGD"}:
        scheduler = "step"
    setting = Setting(
        seed,
        chance.choice([2, 2, 3]),
        "gloo" if device else chance.choice(["gloo", "shm"]),
        form,
        names,
        len(names) > 1 and chance.random() < 0.4,
        scheduler,
        names[0] == "LBFGS" or (form != "sharded" and len(names) == 1 and chance.random() < 0.15),
        chance.choice(["", "", "norm", "value"]),
        chance.random() < 0.2,
        device,
    )
    return Program(setting, tuple(chance.choice(EVENTS) for _ in range(length)))


def one_after_the_other(module: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in module.layers:
        x = torch.tanh(layer(x))
    return x


class Training:
    """One rank's part in a program."""

    def __init__(self, rank: Any, program: Program) -> None:
        self.rank, self.setting, self.events = rank, program.setting, program.lines
        torch.manual_seed(self.setting.seed)
        self.net: Any = rank.make(lambda: nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), seed=self.setting.seed)
        self.net.double()
        wrap: Any = lockstep.DistributedDataParallel if self.setting.form == "wrapper" else lockstep.replicate
        self.chain = Applying(one_after_the_other, (), layers=self.net)
        self.model: Any = wrap(self.chain, process_group=rank.group)
        self.numbers = rank.generator()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.make()

    def make(self) -> None:
        """Make the optimizers and their schedulers."""
        setting, layers = self.setting, list(self.net)
        self.optimizers = []
        for number, name in enumerate(setting.optimizers):
            own = layers if setting.turns else layers[number :: len(setting.optimizers)]
            groups = [{"params": [layer.weight for layer in own]}, {"params": [layer.bias for layer in own]}]
            optimizer = OPTIMIZERS[name](groups)
            if name != "LBFGS":
                optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] / 2
            self.optimizers.append(lockstep.shard_optimizer(optimizer) if self.setting.form == "sharded" else optimizer)
        make = SCHEDULERS.get(setting.scheduler)
        self.schedulers = [make(each) for each in self.optimizers] if make and setting.form != "sharded" else []

    def backward(self, fails: bool = False) -> torch.Tensor:
        x = torch.randn(4, 3, generator=self.numbers, device="cpu", dtype=torch.float64).to(self.rank.device)
        loss = self.model(x).square().mean()
        if fails:
            raise ArithmeticError("a bad batch")
        loss.backward()
        return loss.detach()

    def run(self) -> bool:
        """Run all rounds; return True if replicas are alike."""
        for number, event in enumerate(lockstep.batches(self.events, group=self.rank.group)):
            self.before(event, number)
            self.round(event, number)
            torch._foreach_lerp_([*self.average.parameters()], [p.detach() for p in self.net.parameters()], 0.1)
        optimizers = [] if self.setting.form == "sharded" else self.optimizers
        lockstep.check_in_sync(self.net, *optimizers, self.rank.group)
        return all(self.rank.all_equal(p) for p in self.net.parameters())

    @torch.no_grad()
    def before(self, event: str, number: int) -> None:
        layer, optimizer = self.net[number % 3], self.optimizers[0]
        match event:
            case "freeze" | "unfreeze":
                layer.requires_grad_(event == "unfreeze" or number % 3 == 0)
            case "average written back":
                torch._foreach_copy_([*self.net.parameters()], [*self.average.parameters()])
            case "average for a while" if self.rank.rank == 0:
                kept = [p.clone() for p in self.net.parameters()]
                torch._foreach_copy_([*self.net.parameters()], [*self.average.parameters()])
                self.chain(torch.ones(2, 3, dtype=torch.float64))
                torch._foreach_copy_([*self.net.parameters()], kept)
            case "load":
                self.net.load_state_dict({name: value * 0.99 for name, value in self.net.state_dict().items()})
            case "load the optimizer" if self.setting.form != "sharded":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            case "another optimizer" if self.setting.form != "sharded":
                self.make()
            case "rate" if self.setting.form != "sharded":
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9
            case "evaluate":
                self.model(torch.ones(1 + self.rank.rank, 3, dtype=torch.float64))

    def round(self, event: str, number: int) -> None:
        setting, group = self.setting, self.rank.group
        for each in self.optimizers:
            each.zero_grad()
        chosen = [self.optimizers[number % len(self.optimizers)]] if setting.turns else self.optimizers
        if setting.closure:
            self.closure_step(chosen[0])
            return
        fails = event == "skip" and number % setting.world == self.rank.rank
        with lockstep.loop.skip_on(ArithmeticError, group=group) if setting.skip_on else contextlib.nullcontext():
            self.gradients(event, number, fails and setting.skip_on)
        if setting.skip_on and lockstep.loop.skipped(group=group):
            return
        self.clip()
        for each in chosen:
            each.step()
        self.schedule()

    def gradients(self, event: str, number: int, fails: bool) -> None:
        if event == "accumulate":
            for last in (False, True):
                with lockstep.accumulate(self.model, last=last, weight=1.0 + self.rank.rank):
                    self.backward()
        elif event == "noise for a while":
            noise = [
                torch.randn(p.shape, generator=self.numbers, device="cpu", dtype=p.dtype) for p in self.net.parameters()
            ]
            noise = [each.to(self.rank.device) for each in noise]
            kept = [p.detach().clone() for p in self.net.parameters()]
            with torch.no_grad():
                torch._foreach_add_([*self.net.parameters()], noise, alpha=0.01)
            self.backward()
            with torch.no_grad():
                torch._foreach_copy_([*self.net.parameters()], kept)
        else:
            self.backward(fails)

    def closure_step(self, optimizer: torch.optim.Optimizer) -> None:
        """All ranks take the same decisions in it, since they get the mean of the losses."""

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.backward()
            self.clip()
            return torch.as_tensor(lockstep.mean(loss, group=self.rank.group))

        optimizer.step(closure)
        self.schedule()

    def clip(self) -> None:
        if self.setting.clip == "norm":
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        elif self.setting.clip == "value":
            torch.nn.utils.clip_grad_value_(self.net.parameters(), 0.05)

    def schedule(self) -> None:
        for each in self.schedulers:
            plateau = isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau)
            each.step(*([1.0] if plateau else []))


def _run(rank: Any, program: Program) -> bool:
    return Training(rank, program).run()


def play(program: Program) -> None:
    """Run a program on all ranks; raises what is wrong."""
    setting = program.setting
    hosts = "a" * setting.world if setting.backend == "shm" else ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in HARMLESS:
            warnings.filterwarnings("ignore", text)
        found = run_ranks(setting.world, _run, program, hosts=hosts, device=setting.device)
    assert all(found), "replicas differ"


HARMLESS = (
    ".*lr_scheduler.step",  # of rounds without a step
    ".*uses the gradient of parameter",
    "This process .* is multi-threaded, use of fork",
    ".*forward changes buffers",
)
"""What PyTorch warns of in programs that are right."""
