"""Modules used at random, by threads as ranks, beside one process: whatever is done, gradients and values agree."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from threaded import run_ranks

# Of reentrant checkpoints. For all tests, since the filters are not a thread's own.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Net(nn.Module):
    """Layers to choose from, two of them tied, and a frozen one; and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
        self.layers[3].weight = self.layers[1].weight
        self.layers[4].requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x, chosen, recomputed, void):
        for index in chosen:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=recomputed) if recomputed is not None else layer(x)
            x = torch.tanh(x + self.shift)
        return x + self.nothing(void)

    def nothing(self, void):
        """Zero, of which weights have a gradient that is zero everywhere, or has no elements."""
        return sum(0 * (self.empty if index < 0 else self.layers[index].weight).sum() for index in void)

    def past_forward(self, x, chosen, recomputed, void):
        """The same, but forward of the module is not called."""
        for index in chosen:
            x = torch.tanh(self.layers[index](x) + self.shift)
        return x + self.nothing(void)


class Beside:
    """One rank's module, and a copy of it that goes through what all ranks do."""

    def __init__(self, rank, world, modules, cap):
        self.rank = rank
        self.modules = [rank.make(lambda: Net().double(), seed=number) for number in range(modules)]
        self.references = copy.deepcopy(self.modules)
        for module in self.modules:
            lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
        pairs = (self.modules, self.references)
        self.optimizers = [torch.optim.SGD([p for m in of for p in m.parameters()], lr=0.05) for of in pairs]
        self.own: list[list[dict]] = [[{} for _ in range(world)] for _ in range(modules)]
        self.counted = 0.0
        """The weights of all that has piled up."""

    def both(self):
        yield from (pair for pair in zip(self.modules, self.references, strict=True))

    def backward(self, plan):
        """Each rank its own losses; in the copy, all of them, their gradients averaged where this backward shares them.

        What a rank has piled up is kept apart, by rank, until it is shared.
        """
        synchronise, weights = plan["synchronise"], plan["weights"]
        loss = self.loss(self.modules, plan, self.rank.rank)
        with contextlib.ExitStack() as stack:
            for module in self.modules:
                if weights is not None:
                    weight = weights[self.rank.rank]
                    stack.enter_context(lockstep.accumulate(module, last=synchronise, weight=weight))
                elif not synchronise:
                    stack.enter_context(module.no_sync())
            for left in reversed(range(plan["backwards"])):
                shares = synchronise and (weights is None or not left)  # the first that does ends a block with a weight
                with contextlib.ExitStack() as local:
                    for module in self.modules if synchronise and not shares else ():
                        local.enter_context(module.no_sync())
                    loss.backward(retain_graph=left > 0)
        self.counted += sum(weights or ())
        for left in reversed(range(plan["backwards"])):
            self.add_reference(plan, synchronise and (weights is None or not left))
        if synchronise:
            self.counted = 0.0

    def add_reference(self, plan, synchronise):
        used: set[int] = set()
        for r in range(self.rank.world):
            loss = self.loss(self.references, plan, r)
            for number, reference in enumerate(self.references):
                parameters = [p for p in reference.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
                for parameter, grad in zip(parameters, grads, strict=True):
                    if grad is not None:
                        used.add(number)
                        pile = self.own[number][r]
                        pile[parameter] = pile[parameter] + grad if parameter in pile else grad
        if not synchronise:
            return
        for number in used:  # a module that no rank's backward reached is not reduced
            for parameter in self.references[number].parameters():
                parts = [pile.pop(parameter) for pile in self.own[number] if parameter in pile]
                if parts:
                    before = 0 if parameter.grad is None else parameter.grad
                    parameter.grad = before + sum(parts) / (self.counted or self.rank.world)

    def loss(self, modules, plan, r):
        total = 0.0
        for forward in plan["forwards"][r]:
            x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(forward["seed"]))
            module = modules[forward["module"]]
            call = module.past_forward if forward["past"] else module
            recomputed = forward["recomputed"] if modules is self.modules else None
            total = total + call(x.requires_grad_(), forward["layers"], recomputed, forward["void"]).square().mean()
        return total

    def zero_grad(self, plan):
        for module, reference in self.both():
            for each in (module, reference):
                each.zero_grad(set_to_none=plan["to_none"])
        self.counted = 0.0
        for pile in (pile for piles in self.own for pile in piles):
            if plan["to_none"]:
                pile.clear()
            for parameter in pile:  # it has had a gradient: all ranks will have one
                pile[parameter] = torch.zeros_like(parameter)

    def step(self, plan):
        for optimizer in self.optimizers:
            optimizer.step()

    def freeze(self, plan):
        for each in (self.modules[plan["module"]], self.references[plan["module"]]):
            each.layers[plan["layer"]].requires_grad_(plan["trained"])

    def shift(self, plan):
        """Buffers are those of rank 0 after the next backward; all ranks write the same here."""
        for pair in self.both():
            for each in pair:
                each.shift = each.shift + plan["by"]

    def compare(self):
        for module, reference in self.both():
            for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(
                    p, q, rtol=1e-8, atol=1e-11, msg=lambda text, n=name: f"value of {n}: {text}"
                )
                assert (p.grad is None) == (q.grad is None), f"gradient of {name}"
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")


def draw_backward(chance, world, modules, synchronise, weighs=False):
    past = chance.random() < 0.3  # on all ranks alike

    def forward():
        return {
            "seed": chance.randrange(10**6),
            "module": chance.randrange(modules),
            "layers": [chance.randrange(5) for _ in range(chance.randint(1, 4))] + [0],
            "past": past,
            "recomputed": chance.choice([None, None, False, True]),
            "void": [chance.randrange(-1, 5) for _ in range(chance.choice([0, 0, 1, 2]))],
        }

    several = [[forward() for _ in range(chance.randint(1, 2))] for _ in range(world)]
    alike = chance.random() < 0.3
    return {
        "what": "backward",
        "forwards": [several[0]] * world if alike else several,
        "synchronise": synchronise,
        "backwards": chance.choice([1, 1, 1, 2]),
        "weights": [chance.randint(1, 9) for _ in range(world)] if weighs else None,
    }


def draw_program(chance, world, modules, length):
    """A list of steps. Nothing steps on gradients that are one rank's alone: each pile ends with a shared backward."""
    program = []
    for _ in range(length):
        what = chance.choice(["train", "train", "train", "pile", "freeze", "zero", "shift"])
        if what in ("train", "pile"):
            weighs = chance.random() < 0.5
            program += [{"what": "zero", "to_none": chance.random() < 0.5}] if weighs else []
            piled = [draw_backward(chance, world, modules, False, weighs) for _ in range(chance.randint(1, 2))]
            program += piled if what == "pile" else []
            if what == "pile" and not weighs and chance.random() < 0.3:
                program += [{"what": "zero", "to_none": chance.random() < 0.3}]
            program += [reach_all(draw_backward(chance, world, modules, True, weighs), modules, chance)]
            program += [{"what": "compare"}]
            program += [{"what": "step"}] if chance.random() < 0.7 else []
            program += [{"what": "zero", "to_none": chance.random() < 0.6}] if chance.random() < 0.7 else []
        elif what == "zero":
            program.append({"what": "zero", "to_none": chance.random() < 0.5})
        elif what == "freeze":
            layer = {"module": chance.randrange(modules), "layer": chance.choice([1, 2, 4])}
            program.append({"what": "freeze", "trained": chance.random() < 0.5, **layer})
        else:
            program.append({"what": "shift", "by": chance.random()})
    return program


def reach_all(plan, modules, chance):
    """So that nothing stays piled up: every module is used by some rank."""
    for number in range(modules):
        chance.choice(plan["forwards"]).append(
            {
                "seed": number,
                "module": number,
                "layers": [0],
                "past": plan["forwards"][0][0]["past"],
                "recomputed": None,
                "void": [],
            }
        )
    return plan


def run(rank, seed, modules, length, cap):
    beside = Beside(rank, rank.world, modules, cap)
    for number, plan in enumerate(draw_program(random.Random(seed), rank.world, modules, length)):
        try:
            match plan["what"]:
                case "backward":
                    beside.backward(plan)
                case "zero":
                    beside.zero_grad(plan)
                case "step":
                    beside.step(plan)
                case "freeze":
                    beside.freeze(plan)
                case "shift":
                    beside.shift(plan)
                case "compare":
                    beside.compare()
        except Exception as error:
            error.add_note(f"seed {seed}, {modules} module(s), {length} steps, cap {cap}: in step {number}, {plan}")
            raise
    for module in beside.modules:
        lockstep.check_in_sync(module)


WORLDS, MODULES, CAPS = (2, 3), (1, 2), (None, 1e-4)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    world=st.sampled_from(WORLDS),
    modules=st.sampled_from(MODULES),
    cap=st.sampled_from(CAPS),
)
def test_random_use(seed, world, modules, cap):
    run_ranks(world, run, seed, modules, 8, cap)


@pytest.mark.soak
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("world", [*WORLDS, 4])
def test_random_use_for_long(world, modules, cap):
    for seed in range(60):
        run_ranks(world, run, seed, modules, 40, cap, timeout=120)
