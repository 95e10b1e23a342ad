"""Random programs with shares: on any number of ranks they are to come to the bits of one rank, and what only one rank
does is to be an error by name on all, from which they go on.

A line is a step. What is done to the module before a step is done on all ranks, or on the last one only;
then it is taken back after the step. One rank leaves out the steps that have failed on the others, and what the last of
them did alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from fuzz.programs import Program
from lockstep._base.deal import deal_by_speed
from lockstep.errors import AgreementError, NotReplicableError, PeerError
from lockstep.shares import balance
from lockstep.shares import share_exchange as reduction
from share_runs import dropout_rate, forever
from threaded import Rank, run_ranks

WIDTH = 4
ROWS = 44
"""Two batches of sixteen rows, and one of twelve."""
BATCH = 16


class Change(NamedTuple):
    """Something that is done to the module before a step."""

    name: str
    where: int
    alone: bool


class Planned(NamedTuple):
    """One step of a program."""

    changes: tuple[Change, ...]
    event: str
    """"fails", "breaks": what the last rank does in its last share; "left out": all ranks do."""
    zeroes: bool
    weighs: bool
    twice: bool
    updates: bool
    uses_other: bool
    """True if a second module takes part, if the program has one."""


class Setting(NamedTuple):
    """What holds for a whole program."""

    seed: int
    world: int
    hosts: str
    shares: int
    loss: str
    audits: bool
    has_other: bool
    cap: int
    rounds: bool
    """True if what can travel in bfloat16 does."""
    deals: bool
    """True if the ranks are dealt numbers of shares at random, other ones again and again."""
    costs: str
    """How the rows are put into shares: "" by number, "sum" or "padded" by cost."""


class Norm(nn.Module):
    """Takes a running mean away; like a layer of batch normalisation, but for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(0)
        return (x - self.running_mean) * self.weight


class Network(nn.Module):
    """Layers, of which rows of some signs leave out the second; normalisation, dropout, and a counter of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(number) for number in range(3))
        self.norm = Norm()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        self.rows += len(x)
        for number, each in enumerate(self.layers):
            if number != 1 or x[0, 0] > 0:
                x = torch.tanh(each(x.to(each.weight.dtype)))
        return nn.functional.dropout(self.norm(x.float()), dropout_rate(0.2), self.training).square().sum(1)


def layer(number: int) -> nn.Linear:
    made = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).mul(0.7 + number + place).sin()
            parameter.copy_(values.view_as(parameter) / 2)
    return made


# ---------------------------------------------------------------------------------- what is done to modules


def at(net: Network, where: int) -> nn.Linear:
    return net.layers[where % len(net.layers)]


def remove(net: Network, where: int) -> None:
    if len(net.layers) > 1:
        del net.layers[where % len(net.layers)]


def replace(net: Network, where: int) -> None:
    net.layers[where % len(net.layers)] = layer(where)


def exchange(net: Network, where: int) -> None:
    a, b = where % len(net.layers), (where + 1) % len(net.layers)
    net.layers[a], net.layers[b] = net.layers[b], net.layers[a]


def tie(net: Network, where: int) -> None:
    each, first = at(net, where), net.layers[0]
    if each.weight.dtype == first.weight.dtype:
        each.weight = first.weight


def assign(net: Network, where: int) -> None:
    each = at(net, where)
    each.load_state_dict({name: value.clone() for name, value in each.state_dict().items()}, assign=True)


STRUCTURAL: dict[str, Callable[[Network, int], Any]] = {
    "append": lambda net, where: net.layers.append(layer(where)),
    "remove": remove,
    "replace": replace,
    "exchange": exchange,
    "freeze": lambda net, where: at(net, where).requires_grad_(where % 2 == 0),
    "tie": tie,
    "assign": assign,
    "add_a_buffer": lambda net, where: at(net, where).register_buffer("extra", torch.full((2,), float(where))),
    "drop_a_buffer": lambda net, where: [each._buffers.clear() for each in net.layers],
    "change_a_buffer": lambda net, where: setattr(net.norm, "running_mean", torch.full((WIDTH,), float(where))),
}
"""Those of which a rank notices that it is alone with them."""
CHANGES = STRUCTURAL | {
    "evaluate": lambda net, where: net.norm.train(where % 2 == 0),
    "double": lambda net, where: net.layers.double(),
    "single": lambda net, where: net.layers.float(),
}


def kept(net: Network) -> Callable[[], None]:
    """Return what gives all modules the tensors and modules back that they have now."""
    slots = [
        (dictionary, dict(dictionary))
        for module in net.modules()
        for dictionary in (module._parameters, module._buffers, module._modules)
    ]
    flags = [(parameter, parameter.requires_grad) for parameter in net.parameters()]

    def give_back() -> None:
        for dictionary, before in slots:
            dictionary.clear()
            dictionary.update(before)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

    return give_back


# ------------------------------------------------------------------------------------------------ programs


def draw(seed: int, length: int, device: str = "") -> Program:
    """A program, always the same for the seed."""
    rng = random.Random(seed)
    world = rng.choice([2, 2, 3, 4])
    hosts = rng.choice(["", "a" * world, "a" * (world - 1) + "b"])
    steps = []
    for _ in range(length):
        changes = []
        alone = rng.random() < 0.4
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            name = rng.choice(list(STRUCTURAL if alone else CHANGES))
            changes.append(Change(name, rng.randrange(6), alone))
        event = rng.choice(["", "", "", "", "", "fails", "breaks", "left out"])
        steps.append(Planned(tuple(changes), event, *(rng.random() < chance for chance in (0.7, 0.2, 0.3, 0.7, 0.7))))
    shares, loss = rng.choice([4, 5, 8]), rng.choice(["sum", "mean"])
    audits, has_other = rng.random() < 0.2, rng.random() < 0.2
    cap, rounds = rng.choice([1, 200, 2**20]), rng.random() < 0.4
    deals, costs = rng.random() < 0.6, rng.choice(["", "", "sum", "padded"]) if loss == "sum" else ""
    setting = Setting(seed, world, hosts, shares, loss, audits, has_other, cap, rounds, deals, costs)
    return Program(setting, tuple(steps))


def choose_at_random(deal: tuple[int, ...], seconds: Sequence[float]) -> list[float]:
    """Seconds for another deal, the same on all ranks, as they have the same reports."""
    rng = random.Random(repr((deal, [*seconds])))
    others = ([rng.choice([0.1, 1.0, 3.0]) * rng.uniform(0.5, 1) for _ in seconds] for _ in range(100))
    return next((other for other in others if deal_by_speed(sum(deal), other) != deal), [1.0] * len(deal))


class Failed(Exception):
    """What a rank raises in a share."""


def run(rank: Rank, program: Program, left_out: tuple[int, ...] = ()) -> list[str]:
    """Return what each step has given: a digest of gradients, buffers and parameters, or an error."""
    setting = program.setting
    reduce_dtype = torch.bfloat16 if setting.rounds else None
    options = {
        "shares": setting.shares,
        "loss": setting.loss,
        "process_group": rank.group,
        "reduce_dtype": reduce_dtype,
    }
    net = lockstep.replicate(Network(), **options)
    nets = [net, *([lockstep.replicate(layer(7), **options)] if setting.has_other else [])]
    lockstep.shares.audit(net, 1 if setting.audits else None)
    x = torch.arange(ROWS * WIDTH, dtype=torch.float64).mul(0.37).sin().view(ROWS, WIDTH)
    batches = forever(
        lockstep.shares.GlobalBatches(
            TensorDataset(x),
            BATCH,
            setting.shares,
            setting.seed,
            last="smaller",
            cost=x[:, 0].abs() if setting.costs else None,
            padded=setting.costs == "padded",
            balance="speed" if setting.deals else None,
            process_group=rank.group,
        )
    )
    is_last = rank.rank + 1 == rank.world
    found = []
    for number, step in enumerate(program.lines):
        batch = next(batches)
        lonely = rank.world > 1 and is_last
        for change in step.changes:
            if not change.alone:
                CHANGES[change.name](net, change.where)
        if step.zeroes:
            for each in nets:
                each.zero_grad()
        give_back = kept(net)
        for change in step.changes:
            if change.alone and lonely:
                CHANGES[change.name](net, change.where)
        if step.event == "left out" or number in left_out:
            found.append("left out")
            give_back()
            continue
        try:
            one_step(nets if step.uses_other else nets[:1], batch, step, lonely)
        except (AgreementError, PeerError, NotReplicableError, Failed) as error:
            found.append(f"{type(error).__name__}: {error}")
            give_back()
            continue
        if step.updates:
            with torch.no_grad():
                for parameter in nn.ModuleList(nets).parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
        found.append(digest(nn.ModuleList(nets)))
        if any(change.alone for change in step.changes):
            break  # it has changed nothing, as a layer that is loaded again on all ranks: not to be taken back
    return found


def one_step(nets: list[Any], batch: Any, step: Planned, is_last: bool) -> None:
    shares, net = len(batch), nets[0]
    for number, (x,) in enumerate(batch):
        if is_last and number + 1 == shares and not batch.is_auditing:
            if step.event == "fails":
                raise Failed("in a share")
            if step.event == "breaks":
                break
        weighs = lockstep.accumulate(net, weight=float(len(x)) + float(x[0, 0].abs())) if step.weighs else nullcontext()
        with weighs:
            (net(x).sum() + sum(other(x.float()).square().sum() for other in nets[1:])).backward()
        if step.twice and x[0, 1] > 0:
            net(x + 1).mean().backward()
    else:
        return
    raise Failed("the loop was left")


def digest(net: nn.Module) -> str:
    """A few letters that are others for other bits."""
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in each_tensor(net):
        digest.update(name.encode())
        digest.update(
            b"" if tensor is None else tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def each_tensor(net: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, parameter in net.named_parameters():
        yield name, parameter
        yield f"gradient of {name}", parameter.grad
    yield from net.named_buffers()


def play(program: Program) -> None:
    """Run a program, and the same on one rank; raises what is wrong."""
    setting = program.setting
    with (
        mock.patch.object(reduction, "CAP_BYTES", setting.cap),
        mock.patch.object(balance, "choose", choose_at_random),
        mock.patch.object(balance, "_LEAST_STEPS", 1),
    ):
        results = run_ranks(setting.world, run, program, hosts=setting.hosts)
        failed = [tuple(n for n, each in enumerate(result) if ": " in each) for result in results]
        assert all(each == failed[0] for each in failed), f"steps that failed: {failed}\n{results}"
        alone = run_ranks(1, run, program, failed[0])[0]
    for rank, result in enumerate(results):
        for number, (got, wanted) in enumerate(zip(result, alone, strict=True)):
            if number not in failed[0]:
                assert got == wanted, f"rank {rank}, step {number}: {got} in place of {wanted}\n{results}\n{alone}"
