"""Claim: over a link of 200 Mbit/s a step of two modules with a group each takes about as long as with two wrappers of
PyTorch's DDP. On one group each module follows the other at the end of backward: how much longer it takes is measured.

Measured: a GAN of two encoders, 9.5 MB of gradients each, trained as PyTorch's tutorial of DCGAN trains one. A backward
goes through the discriminator alone; another one goes through both, and leaves gradients in both. Ranks are processes,
each on a host of its own: a network namespace that sends 200 Mbit/s (``tc``; needs root). All ways live in the same
processes, and take turns.

Where there can be no such link, the same on loopback shows that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import RATE, encoder
from harness import arguments, ms, ratio, table
from link_ranks import MEGABITS, is_rank, no_links, over_links, run_as_rank
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

ONE, EACH = "lockstep, one group", "lockstep, a group each"
DDP_ONE, DDP_EACH = "DDP, one group", "DDP, a group each"
WAYS: dict[str, tuple[Callable[[nn.Module, Any], nn.Module], bool]] = {
    ONE: (lambda module, group: lockstep.replicate(module, process_group=group), False),
    EACH: (lambda module, group: lockstep.replicate(module, process_group=group), True),
    DDP_ONE: (lambda module, group: ddp(module, group), False),
    DDP_EACH: (lambda module, group: ddp(module, group), True),
    "no communication": (lambda module, group: module, False),
}
"""How a module is wrapped, and whether each has a group of its own."""


def ddp(module: nn.Module, group: Any) -> nn.Module:
    """PyTorch's wrapper."""
    return DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)


def gan_step(generator: nn.Module, discriminator: nn.Module, real: torch.Tensor) -> Callable[[], None]:
    """A step of a GAN: the discriminator learns, then the generator."""
    of_generator = torch.optim.SGD(generator.parameters(), lr=RATE, foreach=True)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=RATE, foreach=True)
    noise = real.flip(0)

    def step() -> None:
        fake = generator(noise)
        of_discriminator.zero_grad()
        said = discriminator(torch.cat([real, fake.detach()]))
        (said[: len(real)].square().mean() - said[len(real) :].square().mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        discriminator(fake).square().mean().backward()
        of_generator.step()

    return step


def modules(quick: bool) -> list[nn.Module]:
    """The generator and the discriminator, with the same weights at every call."""
    torch.manual_seed(0)
    return [encoder(1, 16) if quick else encoder(3, 256) for _ in range(2)]


def turns_of(rank: int, quick: bool, rounds: int) -> dict[str, list[Turn]]:
    """On one rank: the turns of all ways, which are checked to train alike."""
    batch = (2, 4, 16) if quick else (4, 64, 256)
    real = torch.randn(batch, generator=torch.Generator().manual_seed(1 + rank))
    steps, grads = {}, {}
    for name, (wrap, has_own) in WAYS.items():
        plain = modules(quick)
        groups = [dist.new_group() for _ in plain] if has_own else [dist.new_group()] * 2
        wrapped = [wrap(module, group) for module, group in zip(plain, groups, strict=True)]
        steps[name] = gan_step(wrapped[0], wrapped[1], real)
        steps[name]()
        grads[name] = [p.grad.clone() for module in plain for p in module.parameters() if p.grad is not None]
    for name in (ONE, EACH, DDP_EACH):
        torch.testing.assert_close(grads[name], grads[DDP_ONE], rtol=1e-3, atol=1e-5)
    return take_turns(steps, rounds, 1)


def report(title: str, times: dict[str, Turn]) -> None:
    """A table of the ways, and the ratios."""
    seconds = {name: whole for name, (_, whole) in times.items()}
    table(title, ["way", "step ms"], [[name, ms(each)] for name, each in seconds.items()])
    for own in (EACH, ONE):
        for other in (DDP_ONE, DDP_EACH):
            ratio(f"{title}: {own} / {other}", seconds[own], seconds[other], 1.0 if own == EACH else None)
    ratio(f"{title}: {ONE} / {EACH}", seconds[ONE], seconds[EACH])


def main() -> None:
    """Measure all."""
    args = arguments(__doc__, 9, ("--ranks", {"type": int, "nargs": "+", "default": [2]}))
    if reason := no_links():
        print(f"\nno link: {reason}")
        report("2 ranks on loopback", slowest(launch(turns_of, args.quick, args.rounds)))
        return
    for world in args.ranks:
        times = slowest(over_links(__file__, world, args.quick, args.rounds))
        report(f"{world} ranks over {MEGABITS} Mbit/s", times)


if __name__ == "__main__":
    if is_rank():
        run_as_rank(turns_of)
    else:
        main()
