"""Random programs over replicated modules, each beside what one process in float64 makes of it.

A line is an operation::

    use.backward([[F(seed=1, layers=(0, 2))], [F(seed=2, layers=(1,))]])
    use.replace_layer(1, seed=3)

Every rank is a thread and runs every line. Each also keeps one plain copy of the network *for every rank* (``refs``),
in which the same line is done with that rank's part of it; what a synchronising backward does to gradients and buffers
is a few lines of arithmetic over those copies. After each line, a rank's replicated module must equal its plain copy.
In lines that are wrong on purpose - ranks that differ, that fail, that run another backward - every rank must raise an
error that says so, and go on with the next line. Where a step makes the values of ranks differ, the program ends: then
training must raise an ``OutOfSyncError``, by name.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch._dynamo  # else the first checkpoint does, and ranks wait for it longer than GROUP_TIMEOUT
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import lockstep
from fuzz.programs import Program
from lockstep.errors import CommunicationError, LockstepError, OutOfSyncError
from lockstep.sharding import full_state_dict, shard_optimizer
from processes import run_processes
from small_modules import fails_in_backward
from threaded import new_gloo_group, run_ranks

WIDTH = 3
GROUP_TIMEOUT, RUN_TIMEOUT = 5, 60
"""Seconds that ranks wait for each other, and that a program may take: with up to four ranks (:func:`longer`)."""
DRIFT_STEPS = 300  # one slice is looked at within 256 rounds, on accelerators up to 16 rounds later


HARMLESS = (
    "None of the inputs have requires_grad=True",  # of reentrant checkpoints
    "grad and param do not obey",  # of parameters that were transposed
    "rank .+parameter .* was changed .* only one rank's, again and again",  # every rank has changed it alike
    "rank .+ since the last one, rank .+ has left out",  # of forwards that are for one rank alone
    "This process .* is multi-threaded, use of fork",
)
"""What PyTorch and lockstep warn of in programs that are right."""


def longer(seconds: float, world: int) -> float:
    """Return more seconds for many ranks, which share the cores."""
    return seconds * max(1, world / 4)


class F(NamedTuple):
    """A forward: which layers of which module, on which random input."""

    seed: int
    layers: tuple[int, ...]
    module: int = 0
    past: bool = False
    """True if submodules are called instead of the module."""
    recompute: bool | None = None
    """True if layers are checkpointed: None no, True reentrant, False not."""
    norm: bool = False
    penalty: bool = False
    """True if the gradient of its input is part of the loss."""
    void: tuple[int, ...] = ()
    """Layers whose weights get a gradient that is zero everywhere; -1 is the parameter without elements."""
    fail: bool = False
    """True if backward raises behind the first layer."""


class Net(nn.Module):
    """Layers to choose from, two of them tied, one frozen; a parameter without elements; a buffer, and batch
    normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[3].weight = self.layers[1].weight
        self.layers[4].requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, call: F) -> torch.Tensor:
        return run_layers(self, x, call)


def run_layers(net: Any, x: torch.Tensor, call: F) -> torch.Tensor:
    for position, index in enumerate(call.layers):
        layer = net.layers[index % len(net.layers)]
        if x.dtype != layer.bias.dtype:  # that of a layer which was retyped
            x = layer(x.to(layer.bias.dtype)).to(x.dtype)
        else:
            x = checkpoint(layer, x, use_reentrant=call.recompute) if call.recompute is not None else layer(x)
        x = torch.tanh(x + net.shift)
        if position == 0 and call.fail:
            x = fails_in_backward(x, error=IntendedError)
    for index in call.void:
        x = x + 0 * (net.empty if index < 0 else net.layers[index % len(net.layers)].weight).sum().to(x.dtype)
    return net.norm(x) if call.norm else x


class IntendedError(ValueError):
    """What a failing backward raises."""


class CommHook:
    """A communication hook that does nothing; or raises once, at a bucket from which it has sent nothing."""

    def __init__(self) -> None:
        self.fails_at: int | None = None
        """How many buckets from now."""

    def __call__(self, state, bucket):
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise IntendedError("intended")
        return bucket.buffer() * 1


def loss_of(nets: list[Any], called: list[Any], calls: list[F]) -> Any:
    """The sum over forwards, each of a module as a whole (``called``) or of its submodules."""
    total: Any = 0.0
    for call in calls:
        x = _random(call.seed, 2, WIDTH).requires_grad_()
        out = run_layers(nets[call.module], x, call) if call.past else called[call.module](x, call)
        total = total + out.double().square().sum()
        if call.penalty:
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            total = total + grad.square().sum()
    return total


def _random(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
    return numbers.to(torch.get_default_device())


def plain_loss(nets: list[Any], calls: list[F]) -> Any:
    """The same on plain copies, which neither checkpoint nor fail."""
    return loss_of(nets, nets, [call._replace(recompute=None, fail=False) for call in calls])


class Setting(NamedTuple):
    """Under which circumstances a program runs."""

    world: int
    backend: str = "gloo"
    modules: int = 1
    cap: float | None = None
    """Size of a bucket in MiB."""
    wrap: bool = False
    """True if modules are wrapped, or replicated in place."""
    comm_hook: bool = False
    processes: bool = False
    """True if ranks are processes with a default group, or threads."""
    device: str = ""
    """The type of each rank's accelerator, if it has one."""
    own_groups: bool = False
    """True if each module has a group of its own."""
    buffers: str = "rank0"
    """The policy for buffers."""
    half: bool = False
    """True if layers are in float32, and their gradients travel in float16; the rest is in float64."""

    @property
    def options(self) -> dict[str, Any]:
        """What modules are replicated with, but for the group."""
        half = torch.float16 if self.half else None
        return {"bucket_cap_mb": self.cap, "buffer_policy": self.buffers, "reduce_dtype": half}

    @property
    def exact(self) -> bool:
        """True if gradients are those of float64, but for its rounding."""
        return not self.half

    def network(self) -> Net:
        """The network, with random weights."""
        return self.typed(Net())

    def typed(self, net: Any) -> Any:
        """The network, in the dtypes that it is to have."""
        net.double()
        if self.half:
            net.layers.float()
        return net

    def linear(self, seed: int) -> nn.Linear:
        """A further layer, in the dtype of the others."""
        layer = _linear(seed)
        return layer.float() if self.half else layer


class Board:
    """What ranks that are threads tell each other past the process group: how a line ended on each of them."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=longer(RUN_TIMEOUT, world))
        self._said: list[str] = [""] * world
        self._store = dist.HashStore()

    def new_group(self, rank: Any, number: int) -> Any:
        """One more group of all ranks."""
        seconds = longer(GROUP_TIMEOUT, rank.world)
        return new_gloo_group(dist.PrefixStore(str(number), self._store), rank.rank, rank.world, seconds)

    def exchange(self, rank: int, value: str) -> list[str]:
        self._said[rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class GroupBoard:
    """The same for ranks that are processes."""

    def __init__(self, world: int) -> None:
        limit = timedelta(seconds=longer(RUN_TIMEOUT, world))
        self._world, self._group = world, dist.new_group(backend="gloo", timeout=limit)

    def new_group(self, rank: Any, number: int) -> Any:
        """One more group of all ranks."""
        return dist.new_group(timeout=timedelta(seconds=longer(GROUP_TIMEOUT, self._world)))

    def exchange(self, rank: int, value: str) -> list[str]:
        said = [""] * self._world
        dist.all_gather_object(said, value, group=self._group)
        return said


class Use:
    """One rank's replicated modules, and a plain copy of them for every rank."""

    def __init__(self, rank: Any, setting: Setting, board: Board | GroupBoard) -> None:
        self.rank, self.number, self.world, self.setting = rank, rank.rank, rank.world, setting
        self.mine: list[Any] = [rank.make(setting.network, seed=n) for n in range(setting.modules)]
        """The modules themselves, without a wrapper."""
        self.refs = [copy.deepcopy(self.mine) for _ in range(rank.world)]
        self.touched: list[set[Any]] = [set() for _ in range(rank.world)]
        """By rank, the parameters that have had a gradient since the last synchronisation."""
        self.stepping: set[Any] = set()
        """Parameters, of the plain copies, with an optimizer in a gradient hook."""
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flats: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Parameters, and a tensor of the program of which their gradient was once made a part."""
        self.hook = CommHook()
        """The communication hook of all modules, if they have one."""
        own = setting.own_groups
        self._groups = [board.new_group(rank, n) if own else rank.group for n in range(setting.modules)]
        self.called: list[Any] = [self._replicate(n, module) for n, module in enumerate(self.mine)]
        """What forward is called on: the modules, or the wrappers around them."""

    def _replicate(self, number: int, module: Any) -> Any:
        make: Any = lockstep.DistributedDataParallel if self.setting.wrap else lockstep.replicate
        called = make(module, process_group=self._groups[number], **self.setting.options)
        if self.setting.comm_hook:
            called.register_comm_hook(None, self.hook)
        return called

    # ------------------------------------------------------------------------------- backward passes

    def _loss(self, calls: list[F]) -> Any:
        return loss_of(self.mine, self.called, calls)

    def _taking_part(self, calls: list[list[F]]) -> list[list[F]]:
        """The same forwards; where those of a rank go past a module, to nothing in it that is trained, one more on all
        ranks. Such a rank takes no part in a round, and is waited for (see "What cannot be noticed")."""
        for number in range(self.setting.modules):
            if not all(any(self._reaches(r, number, c) for c in each) for r, each in enumerate(calls)):
                calls = [[*each, F(1, (0,), number)] for each in calls]
        return calls

    def _reaches(self, rank: int, number: int, call: F) -> bool:
        net = self.refs[rank][number]
        layers = [net.layers[index % len(net.layers)] for index in call.layers]
        trained = any(p.requires_grad for layer in layers for p in layer.parameters())
        return call.module == number and (trained or call.norm or not call.past)

    def backward(
        self, calls: list[list[F]], sync: bool = True, times: int = 1, zero: bool | None = None, train: bool = True
    ) -> None:
        """Each rank its own forwards, and one backward through their sum, ``times`` times; ``zero``: gradients are
        set to None (True) or to zero (False) between forward and backward."""
        calls = self._taking_part(calls)
        times = 1 if self.stepping else times  # values that have changed cannot be gone through again
        self._train(train)
        loss = self._loss(calls[self.number])
        losses = [plain_loss(refs, calls[r]) for r, refs in enumerate(self.refs)]
        if zero is not None:
            self.zero(zero)
        self._mirror(losses, sync, times, called=_called(calls))
        own = self._in_own_memory()
        with self._no_sync() if not sync else contextlib.nullcontext():
            for left in reversed(range(times)):
                loss.backward(retain_graph=left > 0)
        for p, address in own:
            assert p.grad is None or p.grad.data_ptr() == address, "a gradient has left the memory of the program"
        self._train(True)

    def whole(self, seed: int, steps: int) -> None:
        """Steps that train every parameter."""
        frozen = [p for _, nets in self._all() for net in nets for p in net.parameters() if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        for step in range(steps):
            calls = [
                [
                    F(seed + step + r, (index,), module, norm=self.setting.exact and not index)  # on few layers: exact
                    for module, net in enumerate(refs)
                    for index in range(len(net.layers))
                ]
                for r, refs in enumerate(self.refs)
            ]
            self.zero(True)
            self.backward(calls)
            self.step()
        self.zero(True)
        for p in frozen:
            p.requires_grad_(False)

    def _train(self, mode: bool) -> None:
        for _, nets in self._all():
            for net in nets:
                net.train(mode)

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self.called:
                stack.enter_context(module.no_sync())
            yield

    def pile_up(self, ranks: list[int], calls: list[list[F]]) -> None:
        """A backward without synchronisation on some ranks only."""
        calls = [each if r in ranks else [] for r, each in enumerate(calls)]
        self._mirror([plain_loss(refs, calls[r]) for r, refs in enumerate(self.refs)], False, 1)
        if self.number in ranks:
            with self._no_sync():
                self._loss(calls[self.number]).backward()

    def _mirror(
        self,
        losses: list[Any],
        sync: bool,
        times: int,
        total: float | None = None,
        called: frozenset[int] = frozenset(),
    ) -> None:
        """What backward through these losses does to the plain copies; modules in ``called`` have a round anyway."""
        for _ in range(times):
            reached = set(called)
            for r, refs in enumerate(self.refs):
                reached |= self._accumulate(r, refs, losses[r])
            if sync:
                for number in reached:
                    self._synchronise(number, total)

    def _accumulate(self, r: int, refs: list[Any], loss: torch.Tensor) -> set[int]:
        """Add the gradients of a loss to a rank's plain copies; returns the modules that got any."""
        reached = set()
        for number, net in enumerate(refs):
            parameters = [p for p in net.parameters() if p.requires_grad]
            if not parameters or not isinstance(loss, torch.Tensor):
                continue
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            for parameter, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    reached.add(number)
                    self.touched[r].add(parameter)
                    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        return reached

    def _synchronise(self, number: int, total: float | None, ranks: Sequence[int] | None = None) -> None:
        """What ends a synchronising backward: every rank gets the mean of what all have, and the first one's
        buffers."""
        ranks = range(self.world) if ranks is None else ranks
        for same in zip(*(self.refs[r][number].parameters() for r in ranks), strict=True):
            used = [p in self.touched[r] and p.grad is not None for r, p in zip(ranks, same, strict=True)]
            if any(used):
                summed = sum(p.grad for p in same if p.grad is not None)
                for p in same:
                    p.grad = summed / (self.world if total is None else total)
                    if p in self.stepping:
                        p.data.add_(p.grad, alpha=-0.05)
                        p.grad = None
            for r, p in zip(ranks, same, strict=True):
                self.touched[r].discard(p)
        self._equal_buffers([self.refs[r][number] for r in ranks], self.setting.buffers)

    def _equal_buffers(self, nets: list[Any], policy: str) -> None:
        for buffers in zip(*(net.buffers() for net in nets), strict=True) if policy != "local" else ():
            averages = policy == "mean" and buffers[0].is_floating_point()
            value = torch.stack(buffers).mean(0) if averages else buffers[0].clone()
            for buffer in buffers:
                buffer.data.copy_(value)  # a graph that is still needed may have saved it

    def weighted(
        self, batches: list[list[list[F]]], weights: list[list[float]], zero: bool = True, times: int = 1
    ) -> None:
        """Micro-batches with weights, by rank; the last one synchronises. The backward of each runs ``times`` times, of
        which the last one does. Gradients before it are set to None (``zero`` is True), or to zero."""
        self._begin(zero)
        times = 1 if self.stepping else times  # values that have changed cannot be gone through again
        held, everybody = self._set_aside(), range(self.world)
        for number, calls in enumerate(map(self._taking_part, batches)):
            last = number == len(batches) - 1
            loss, losses = self._losses(calls, everybody)
            for _ in range(times):
                self._pile(losses, everybody)
            if last:
                self._reduce(held, everybody, sum(map(sum, weights)))
            with self._accumulating(last, weights[number]):
                for left in reversed(range(times)):
                    with self._no_sync() if left else contextlib.nullcontext():
                        loss.backward(retain_graph=left > 0)
        self._give_back(held)

    def _begin(self, zero: bool) -> None:
        """Set gradients to None (True), or to zero (False), but those that are one rank's alone."""
        if any(p.grad is not None and bool(p.grad.any()) for touched in self.touched for p in touched):
            zero = True
        if zero:
            for touched in self.touched:
                touched.clear()
        self.zero(zero)

    @contextlib.contextmanager
    def _accumulating(self, last: bool, weights: list[float] | None) -> Iterator[None]:
        weight = None if weights is None else weights[self.number]
        with contextlib.ExitStack() as stack:
            for module in self.called:
                stack.enter_context(lockstep.accumulate(module, last=last, weight=weight))
            yield

    def _losses(self, calls: list[list[F]], ranks: Sequence[int]) -> tuple[Any, dict[int, Any]]:
        """This rank's loss, and those of the plain copies of some ranks."""
        return self._loss(calls[self.number]), {r: plain_loss(self.refs[r], calls[r]) for r in ranks}

    def _set_aside(self) -> list[dict[Any, torch.Tensor]]:
        """The gradients of the plain copies, by rank, which have none for now."""
        held = []
        for refs in self.refs:
            parameters = [p for net in refs for p in net.parameters()]
            held.append({p: p.grad for p in parameters if p.grad is not None})
            for p in parameters:
                p.grad = None
        return held

    def _give_back(self, held: list[dict[Any, torch.Tensor]]) -> None:
        for each in held:
            for p, grad in each.items():
                p.grad = grad if p.grad is None else p.grad + grad
            each.clear()

    def _pile(self, losses: dict[int, Any], ranks: Sequence[int]) -> None:
        for r in ranks:
            self._accumulate(r, self.refs[r], losses[r])

    def _reduce(self, held: list[dict[Any, torch.Tensor]], ranks: Sequence[int], total: float) -> None:
        """What has piled up on ``ranks``, divided by ``total``, on top of the mean of what they have ``held``, is
        every rank's; buffers are those of the first of them."""
        for number in range(self.setting.modules):
            for same in zip(*(refs[number].parameters() for refs in self.refs), strict=True):
                piles = [same[r].grad for r in ranks if same[r].grad is not None]
                if not piles and not any(same[r] in self.touched[r] and same[r] in held[r] for r in ranks):
                    continue
                before = [held[r][same[r]] for r in ranks if same[r] in held[r]]
                value = sum(piles) / total + sum(before) / len(ranks)
                for r, p in enumerate(same):
                    p.grad, held[r][p] = None, value.clone()
                    self.touched[r].discard(p)
                    if p in self.stepping:
                        p.data.add_(held[r].pop(p), alpha=-0.05)
            if ranks:
                self._equal_buffers([self.refs[r][number] for r in ranks], self.setting.buffers)
                self._take_buffers(number, ranks)

    def _take_buffers(self, number: int, ranks: Sequence[int]) -> None:
        first = self.refs[ranks[0]][number]
        for r, refs in enumerate(self.refs):
            if r not in ranks and self.setting.buffers != "local":
                for mine, theirs in zip(refs[number].buffers(), first.buffers(), strict=True):
                    mine.data.copy_(theirs)

    def loops(
        self,
        lengths: list[list[int]],
        calls: list[list[list[F]]],
        *,
        piles: bool,
        streams: bool,
        zero: bool | None,
        weights: list[float] | None,
    ) -> None:
        """A loop over batches inside of another one; ranks have other numbers of batches (``lengths``, of the outer one
        and of the inner one). The inner one's pile up (``piles``), or reduce, as the outer one's do; then all step.
        Ranks do not know beforehand how many batches the inner one has, if it ``streams``."""
        self._begin(True)
        held, counted = self._set_aside(), [0.0] * self.world
        outer, inner = lengths
        for i, _ in enumerate(lockstep.batches([0] * outer[self.number], *self.called)):
            active = [r for r, length in enumerate(outer) if length > i]
            given: Any = [0] * inner[self.number]
            for j, _ in enumerate(lockstep.batches(iter(given) if streams else given, *self.called)):
                within = [r for r in active if inner[r] > j]
                self._turn(_later(calls[0], 100 * i + j), within, held, counted, not piles, zero, weights)
            self._turn(_later(calls[1], 100 * i + 50), active, held, counted, True, zero, weights)
        self.zero(True)  # so that nothing is one rank's alone

    def _turn(
        self,
        calls: list[list[F]],
        active: list[int],
        held: list[dict[Any, torch.Tensor]],
        counted: list[float],
        sync: bool,
        zero: bool | None,
        weights: list[float] | None,
    ) -> None:
        """One batch of a loop, which some ranks have, and counts there."""
        loss, losses = self._losses(self._taking_part(calls), active)
        self._pile(losses, active)
        with self._accumulating(sync, weights):
            loss.backward()
        for r in active:
            counted[r] += 0.0 if weights is None else weights[r]
        if not sync:
            return
        self._reduce(held, active, len(active) if weights is None else sum(counted))
        self._give_back(held)
        counted[:] = [0.0] * self.world
        lockstep.loop.skipped(*self.called)  # on accelerators, waits for the buffers
        self.check()
        self.step()
        if zero is not None:
            self.zero(zero)
        held[:] = self._set_aside()

    def given_up(self, calls: list[list[F]], weights: list[float], how: str = "module") -> None:
        """A weighted micro-batch that every rank gives up again: gradients are set to None, to zero, or written. All
        hear of it in the round; then they start over."""
        self._begin(True)
        calls = self._taking_part(calls)
        self._pile({r: plain_loss(refs, calls[r]) for r, refs in enumerate(self.refs)}, range(self.world))
        by_module = zip(*self.refs, strict=True)
        if not all(any(p.grad is not None for net in nets for p in net.parameters()) for nets in by_module):
            return self._begin(True)  # of a module without gradients nobody could notice it
        with self._accumulating(False, weights):
            self._loss(calls[self.number]).backward()
        match how:
            case "module":
                self.zero(False)
            case "none":
                self.zero(True)
            case _:
                for grad in [p.grad for net in self.mine for p in net.parameters() if p.grad is not None]:
                    grad.mul_(0.5)
        for r, refs in enumerate(self.refs):
            plain_loss(refs, calls[r])
        with self._accumulating(True, weights):
            self._is_refused(calls)
        return self._begin(True)

    def failing(self, calls: list[list[F]], sync: bool = True, ranks: Sequence[int] = (), where: str = "") -> None:
        """A backward that raises, on the ranks whose forwards say so, or at the loss (``where``), in a hook of a
        parameter or in a communication hook on some ranks; if it synchronises, all others are told, and all start
        over."""
        calls = self._taking_part(calls)
        loss = self._loss(calls[self.number])
        for refs, theirs in zip(self.refs, calls, strict=True):
            plain_loss(refs, theirs)  # for its buffers
        fails = any(call.fail for call in calls[self.number]) or self.number in ranks
        handle = self._failing_hook(loss, where) if self.number in ranks and where != "bucket" else None
        self.hook.fails_at = 0 if self.number in ranks and where == "bucket" else None
        try:
            with contextlib.nullcontext() if sync else self._no_sync():
                loss.backward()
        except IntendedError:
            assert fails, "this rank has not failed"
        except lockstep.errors.PeerError:
            assert sync, "this rank has not synchronised"
        else:
            assert not fails, "this rank has not raised"
            assert not sync, "nothing was raised"
        if handle is not None:
            handle.remove()
        self.zero(True)

    def _failing_hook(self, loss: torch.Tensor, where: str) -> Any:
        def raise_(_: torch.Tensor) -> None:
            raise IntendedError("intended")

        leaves = [p for p in self.mine[0].layers[0].parameters() if p.requires_grad and p.is_leaf]
        return (leaves[0] if where == "parameter" and leaves else loss).register_hook(raise_)

    def _is_refused(self, calls: list[list[F]]) -> None:
        """All ranks hear, by name, that this backward is not right; then they start over."""
        try:
            self._loss(calls[self.number]).backward()
        except CommunicationError as error:
            raise AssertionError(f"time-out: {error}") from error
        except LockstepError:
            self.zero(True)
        else:
            raise AssertionError("nothing was raised")

    def _settle(self) -> bool:
        """Equal buffers on all ranks, whichever modules are reduced in a line that fails; False if some of those would
        step."""
        if self.stepping and self.setting.modules > 1:
            return False
        self.backward([[F(1, (0,), number) for number in range(self.setting.modules)]] * self.world)
        self.zero(True)
        return True

    def differing(self, how: str, module: int, layer: int, ranks: list[int], calls: list[list[F]]) -> None:
        """A change of a module on some ranks only: all must hear of it; then it is undone."""
        if not self._settle():
            return
        calls = self._taking_part(calls)
        net = self.mine[module]
        index = layer % len(net.layers)
        old = net.layers[index]
        weight = None if hasattr(old, "parametrizations") else old.weight
        data = [(p, p.data) for p in old.parameters()]
        if how == "retyped":
            frozen = not any(p.requires_grad for refs in self.refs for p in refs[module].layers[index].parameters())
            tied = any(p is q for p in old.parameters() for q in self._others(net, old))
            if not self.setting.exact or frozen or tied:
                return  # it would be cast anyway; has no gradient; is another's, too, which could not be called
            calls = [[*each, F(1, (index,), module)] for each in calls]
        if self.number in ranks:
            match how:
                case "added":
                    net.layers.append(_linear(1))
                case "retyped":
                    old.float()
                case "assigned" if weight is not None:
                    old.weight = nn.Parameter(weight.detach().clone())
                case _:
                    net.layers[index] = _linear(1)
        self._is_refused(calls)
        if self.number in ranks and how == "added":
            del net.layers[-1]
        elif self.number in ranks and how == "retyped":
            for p, before in data:
                p.data = before  # a layer that was tied and parametrized may share it
        elif self.number in ranks:
            net.layers[index] = old
            if weight is not None:
                old.weight = weight
        self.zero(True)

    def _others(self, net: Any, layer: nn.Module) -> list[nn.Parameter]:
        """The parameters of all layers but one."""
        return [p for each in net.layers if each is not layer for p in each.parameters()]

    def left_out(self, ranks: list[int], calls: list[list[F]]) -> None:
        """Some ranks have run one more forward, and leave it out, as for a log: all are warned."""
        if not self._settle():
            return
        if self.number in ranks:
            self._loss([F(1, (0,))])
        for rank in ranks:
            plain_loss(self.refs[rank], [F(1, (0,))])
        self.backward(calls)

    def copied(self, ranks: list[int], call: F) -> None:
        """Some ranks train a copy of a module, by themselves."""
        if self.number in ranks:
            twin, ref = (copy.deepcopy(nets[call.module]) for nets in (self.mine, self.refs[self.number]))
            for net in (twin, ref):
                net.zero_grad()
                run_layers(net, _random(call.seed, 2, WIDTH).requires_grad_(), call).sum().backward()
            for mine, theirs in zip(twin.parameters(), ref.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if mine.grad is not None:
                    self._close(mine.grad, theirs.grad, "gradient of a copy")

    def again(self, module: int) -> None:
        """Replaces a wrapper by another around the same module. Gradients before it are dropped."""
        if len({tuple(p.requires_grad for p in refs[module].parameters()) for refs in self.refs}) > 1:
            return  # refused
        self.zero(True)
        self.called[module] = self._replicate(module, self.mine[module])
        self._equal_buffers([refs[module] for refs in self.refs], "rank0")

    def restore(self, module: int) -> None:
        """Save the state of training, and load it."""
        state = copy.deepcopy(lockstep.distributed.training_state_dict(self.called[module]))
        lockstep.distributed.load_training_state_dict(self.called[module], state)

    def local_grad(self, ranks: list[int], calls: list[F], fail: bool = False) -> None:
        """``torch.autograd.grad`` on some ranks only: it accumulates into no parameter, so it is no round."""
        if self.number not in ranks:
            return
        x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        out = sum(run_layers(self.mine[c.module], x, c._replace(norm=False, fail=fail)).sum() for c in calls)
        with contextlib.suppress(IntendedError):
            torch.autograd.grad(out, x)

    def lone_backward(self, ranks: list[int], calls: list[list[F]]) -> None:
        """Some ranks run a backward that the others do not run, which pairs with the others' next one: all must hear of
        it, in that step. With groups of their own, it goes through all modules: ranks that leave a group out in a
        step that is refused over another are a round behind there."""
        count = self.setting.modules if self.setting.own_groups else 1
        lone = [F(seed=1, layers=(0,), module=number, past=True) for number in range(count)]
        if not all(self._reaches(r, call.module, call) for r in ranks for call in lone) or not self._settle():
            return
        calls = [lone if r in ranks else each for r, each in enumerate(calls)]
        for r, refs in enumerate(self.refs):
            plain_loss(refs, calls[r])
        self._is_refused(calls)

    def join(self, batches: list[list[F]], counts: list[int], zero: bool) -> None:
        """Ranks train for unequal numbers of batches (``counts``), by rank; all modules are in one ``Join``."""
        self.zero(True)
        with Join(self.called):
            for number in range(counts[self.number]):
                self._loss(_seeded(batches[number], self.number)).backward()
                _sgd(self.mine)
                for net in self.mine if zero else ():
                    net.zero_grad()
        for number, calls in enumerate(batches[: max(counts)]):
            active = [r for r, count in enumerate(counts) if count > number]
            for r in active:
                self._accumulate(r, self.refs[r], plain_loss(self.refs[r], _seeded(calls, r)))
            for module in range(len(self.mine)):
                self._synchronise(module, None, active)
            for r in active:
                _sgd(self.refs[r])
                for net in self.refs[r] if zero else ():
                    net.zero_grad()
        last = max(r for r, count in enumerate(counts) if count == max(counts))
        for refs in self.refs:
            for net, source in zip(refs, self.refs[last], strict=True):
                for mine, theirs in zip(_values(net), _values(source), strict=True):
                    mine.data.copy_(theirs)
        self.check()
        self.zero(True)  # of unequal gradients

    def fork(self) -> None:
        """A child process, as of a loader, clears what it takes for its own gradients."""
        pid = os.fork()
        if pid == 0:
            try:
                for net in self.mine:
                    net.zero_grad(set_to_none=False)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def evaluate(self, ranks: list[int], module: int, seed: int) -> None:
        """A forward without gradients on some ranks only."""
        if self.number in ranks:
            with torch.no_grad():
                self._loss([F(seed, (0, 1, 2), module)])

    # ------------------------------------------------------------------------------------- gradients

    def _all(self) -> Iterator[tuple[int, list[Any]]]:
        """This rank's modules, and the plain copies of all, each with the rank's number."""
        yield self.number, self.mine
        yield from enumerate(self.refs)

    def zero(self, to_none: bool) -> None:
        """Of what is replicated, be it a wrapper."""
        for nets in (self.called, *self.refs):
            for net in nets:
                net.zero_grad(set_to_none=to_none)

    def step(self) -> None:
        for _, nets in self._all():
            _sgd(nets)

    def sharded_step(self, calls: list[list[F]]) -> None:
        """A step of an optimizer that is sharded for it, whose state is then the gradients. Only where ranks have the
        same values: what a rank has trained by itself would be overwritten."""
        self._begin(True)
        self.backward(calls)
        for number, net in enumerate(self.mine):
            same = list(zip(*(refs[number].parameters() for refs in self.refs), strict=True))
            if not all(
                torch.equal(p, each[0]) and p.requires_grad == each[0].requires_grad for each in same for p in each
            ):
                continue
            try:
                optimizer = shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
            except lockstep.errors.LayoutError:
                places = [p.data_ptr() for p in net.parameters() if p.numel()]
                if len(set(places)) < len(places):  # weight_norm of a tied weight: refused
                    continue
                raise
            optimizer.step()
            for refs in self.refs:
                _sgd([refs[number]])
            state = full_state_dict(optimizer, all_ranks=True)["state"]
            for index, p in enumerate(self.refs[self.number][number].parameters()):
                if p.grad is not None and p.numel():
                    self._close(state[index]["momentum_buffer"], p.grad, "state of a sharded optimizer")

    def _each_layer(self, module: int, layer: int, ranks: list[int] | None = None) -> Iterator[tuple[Any, nn.Module]]:
        for r, nets in self._all():
            if ranks is None or r in ranks:
                yield nets[module], nets[module].layers[layer % len(nets[module].layers)]

    def halve_grad(self, module: int, layer: int, how: str) -> None:
        """Half of a gradient, written in one of the ways in which programs write one."""
        for _, each in self._each_layer(module, layer):
            grad = each.weight.grad if each.weight.is_leaf else None
            if grad is None:
                continue
            match how:
                case "in place":
                    grad.mul_(0.5)
                case "data":
                    grad.data = grad.data * 0.5
                case "new":
                    each.weight.grad = grad * 0.5
                case "transposed":
                    each.weight.grad = (grad * 0.5).t().contiguous().t()
                case "cast":
                    each.weight.grad = (grad * 0.5).float().to(grad.dtype)

    def drop_grad(self, module: int, layer: int, ranks: list[int] | None = None) -> None:
        for _, each in self._each_layer(module, layer, ranks):
            each.weight.grad = None

    def keep_grads(self, detached: bool = False) -> None:
        """Keep every gradient; what is kept must not change any more."""
        grads = [p.grad for net in self.mine for p in net.parameters() if p.grad is not None]
        grads = [grad.detach() for grad in grads] if detached else grads
        self.kept = [(grad, grad.clone()) for grad in grads]
        self.zero(True)

    def own_grads(self, module: int) -> None:
        """Let gradients lie in larger tensors of the program, as those of optimizers with one flat tensor do."""
        for _, nets in self._all():
            for p in nets[module].parameters():
                flat = torch.zeros(p.numel() + 1, dtype=p.dtype)
                if p.grad is not None:
                    flat[1:] = p.grad.flatten()
                p.grad = flat[1:].view_as(p)
                if nets is self.mine:
                    self.flats.append((p, flat))

    def _in_own_memory(self) -> list[tuple[nn.Parameter, int]]:
        """The parameters whose gradient lies in memory of the program, and its address."""
        return [
            (p, p.grad.data_ptr())
            for p, flat in self.flats
            if p.grad is not None and p.grad.untyped_storage().data_ptr() == flat.data_ptr()
        ]

    def step_in_backward(self, module: int, layer: int) -> None:
        """Let a gradient hook step, as soon as the gradient is there. Not on a parameter that has one already: if it is
        new to the ranks, it counts as used in the next round, whether a pass reaches it or not."""
        weights = [nets[module].layers[layer % len(nets[module].layers)].weight for _, nets in self._all()]
        if any(not weight.requires_grad or not weight.is_leaf or weight in self.stepping for weight in weights):
            return
        if any(weight.grad is not None for weight in weights):
            return
        mine, *refs = weights
        mine.register_post_accumulate_grad_hook(_step)
        self.stepping.update(refs)

    def scale_in_backward(self, module: int, layer: int, factor: float) -> None:
        """Let a hook scale what each backward adds to a gradient."""
        weights = [nets[module].layers[layer % len(nets[module].layers)].weight for _, nets in self._all()]
        if all(weight.requires_grad and weight.is_leaf for weight in weights):
            for weight in weights:
                weight.register_hook(lambda grad: grad * factor)

    # ------------------------------------------------------------------------------------ parameters

    def freeze(self, module: int, layer: int, trained: bool, ranks: list[int] | None = None) -> None:
        for _, each in self._each_layer(module, layer, ranks):
            each.requires_grad_(trained)

    def replace_layer(self, module: int, layer: int, seed: int) -> None:
        """A new layer in an old one's place."""
        for net, each in self._each_layer(module, layer):
            net.layers[list(net.layers).index(each)] = self.setting.linear(seed)

    def add_layer(self, module: int, seed: int) -> None:
        for net, _ in self._each_layer(module, 0):
            net.layers.append(self.setting.linear(seed))

    def add_buffer(self, module: int, size: int) -> None:
        """A buffer, or one of another size, with other values on each rank."""
        for r, nets in self._all():
            nets[module].register_buffer("extra", torch.full((size,), float(r), dtype=torch.float64))

    def assign_state(self, module: int) -> None:
        for _, nets in self._all():
            state = {name: value.clone() for name, value in nets[module].state_dict().items()}
            nets[module].load_state_dict(state, assign=True)

    def assign_parameter(self, module: int, layer: int, tie: bool) -> None:
        """A new parameter of the same values, or the one of another layer."""
        for net, each in self._each_layer(module, layer):
            if hasattr(each, "parametrizations") or hasattr(net.layers[0], "parametrizations"):
                return  # its weight is computed
            each.weight = net.layers[0].weight if tie else nn.Parameter(each.weight.detach().clone())

    def write_data(self, module: int, layer: int, how: str) -> None:
        for _, each in self._each_layer(module, layer):
            weight = each.weight
            match how:
                case "add":
                    weight.data.add_(0.01)
                case "new":
                    weight.data = weight.data * 1.01
                case "transposed":
                    weight.data = weight.data.t().contiguous().t()
                case "no_grad":
                    with torch.no_grad():
                        weight.mul_(0.99)

    def retype(self, module: int) -> None:
        """To float32 and back: the values are rounded, the parameters' memory is new."""
        for _, nets in self._all():
            self.setting.typed(nets[module].float())

    def weight_norm(self, module: int, layer: int) -> None:
        for _, each in self._each_layer(module, layer):
            if not hasattr(each, "parametrizations"):
                torch.nn.utils.parametrizations.weight_norm(each)

    def shift(self, module: int, by: float, ranks: list[int] | None = None) -> None:
        """A new buffer; what only other ranks than the first have set, is gone with the next round."""
        for r, nets in self._all():
            if ranks is None or r in ranks:
                nets[module].shift = nets[module].shift + by

    # ---------------------------------------------------------------------------------------- drift

    @property
    def has_drifted(self) -> bool:
        """True if ranks have other values, as after a step with a gradient that some of them have dropped."""
        first, *others = ([p for net in refs for p in net.parameters()] for refs in self.refs)
        return any(not torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True))

    def go_on(self) -> None:
        """Train modules that have drifted apart: all ranks must hear of it, by name. With a communication hook of the
        program they do not, as it may give each rank another gradient."""
        if self.setting.comm_hook:
            return
        numbers = range(self.setting.modules)
        self.zero(True)
        said = ""
        for seed in range(DRIFT_STEPS):
            try:
                self._loss([F(seed, (0, 1, 2), number) for number in numbers]).backward()
            except OutOfSyncError as error:
                said = str(error)
                break
            _sgd(self.mine)
            self.zero(True)
        apart = set()
        for number in numbers:
            named = [dict(refs[number].named_parameters()) for refs in self.refs]
            apart |= {name for name, p in named[0].items() if any(not torch.equal(p, each[name]) for each in named)}
        assert said, f"ranks have drifted apart, and nothing was raised in {DRIFT_STEPS} steps"
        assert any(f"parameter {name} is out of sync" in said for name in apart), f"{said}, not {apart}"

    # --------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Compare this rank's modules with its plain copies, and kept gradients with what they were."""
        for number, (net, ref) in enumerate(zip(self.mine, self.refs[self.number], strict=True)):
            theirs = dict(ref.named_parameters())
            assert [n for n, _ in net.named_parameters()] == list(theirs)
            for name, p in net.named_parameters():
                where = f"module {number}, {name}"
                self._close(p, theirs[name], f"value of {where}")
                assert (p.grad is None) == (theirs[name].grad is None), (
                    f"gradient of {where}: {p.grad}, not {theirs[name].grad}"
                )
                if p.grad is not None:
                    self._close(p.grad, theirs[name].grad, f"gradient of {where}")
            for (name, buffer), other in zip(net.named_buffers(), ref.buffers(), strict=True):
                self._close(buffer, other, f"buffer {name} of module {number}")
        for grad, before in self.kept:
            assert torch.equal(grad, before), "a gradient that was kept has changed"

    def _close(self, mine: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        same = mine.dtype == wanted.dtype and mine.shape == wanted.shape
        rtol, atol = (1e-7, 1e-9) if self.setting.exact else (1e-3, 1e-4)
        if self.setting.half:
            rtol, atol = 1e-2, 1e-2
        if not (same and torch.allclose(mine, wanted, rtol=rtol, atol=atol, equal_nan=True)):
            raise AssertionError(f"{what}: got {mine.tolist()}, expected {wanted.tolist()}")


def _called(calls: list[list[F]]) -> frozenset[int]:
    """The modules that any rank calls as a whole."""
    return frozenset(call.module for each in calls for call in each if not call.past)


def _later(calls: list[list[F]], number: int) -> list[list[F]]:
    return [[call._replace(seed=call.seed + number) for call in each] for each in calls]


def _seeded(calls: list[F], rank: int) -> list[F]:
    return [call._replace(seed=call.seed + rank) for call in calls]


def _sgd(nets: list[Any]) -> None:
    parameters = [p for net in nets for p in net.parameters()]
    torch.optim.SGD(parameters, lr=0.05, foreach=False).step()  # weight_norm() of tied weights: two have one memory


def _values(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]


def _step(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.05)
    parameter.grad = None


def _linear(seed: int) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH).double()
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = _random(2 * seed + number, *parameter.shape) * 0.5
    return layer


# ---------------------------------------------------------------------------------- running programs


def play(program: Program) -> None:
    """Run a program on all ranks; raises what is wrong, with the line."""
    setting: Setting = program.setting
    limits: dict[str, Any] = {
        "timeout": longer(RUN_TIMEOUT, setting.world),
        "group_timeout": longer(GROUP_TIMEOUT, setting.world),
        "device": setting.device,
    }
    if setting.processes:
        run_processes(setting.world, play_rank, None, program, backend=setting.backend, **limits)
        return
    hosts = "a" * setting.world if setting.backend == "shm" else ""
    with warnings.catch_warnings():
        for text in HARMLESS:
            warnings.filterwarnings("ignore", text)
        run_ranks(setting.world, play_rank, Board(setting.world), program, hosts=hosts, **limits)


def play_rank(rank: Any, board: Board | GroupBoard | None, program: Program) -> None:
    """One rank's part of a program."""
    setting: Setting = program.setting
    if board is None:  # a process of its own, where every warning is an error
        board = GroupBoard(setting.world)
        torch.set_num_threads(1)
        for text in HARMLESS:
            warnings.filterwarnings("ignore", text)
    use = Use(rank, setting, board)
    for number, line in enumerate(program.lines):
        wrong = ""
        try:
            eval(line, {"F": F, "use": use})  # a program of our own making
            use.check()
            if use.has_drifted:
                use.go_on()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:1000]} {_where(error)}"
        said = board.exchange(rank.rank, wrong)
        if any(said):  # all ranks stop here: none waits for another in vain
            text = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said) if text)
            raise AssertionError(f"in line {number + 1}, {line}\n{text}")
        if use.has_drifted:
            return


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"({os.path.basename(frame.filename)}:{frame.lineno})"


# ---------------------------------------------------------------------------------- drawing programs

Draw = Callable[["Programs"], list[str]]


class Programs:
    """Draws programs for a number of ranks and modules."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.chance = random.Random(seed)
        self.world, self.modules, self.setting = setting.world, setting.modules, setting

    def draw(self, length: int) -> list[str]:
        lines: list[str] = []
        for _ in range(length):
            lines += self.chance.choice(OPERATIONS)(self)
        return [*lines, *self.train()]

    def forward(self, **fixed: Any) -> F:
        chance = self.chance
        chosen: dict[str, Any] = {
            "seed": chance.randrange(10**6),
            "layers": (*(chance.randrange(6) for _ in range(chance.randint(1, 3))), 0),
            "module": chance.randrange(self.modules),
            "past": chance.random() < 0.25,
            "recompute": chance.choice([None, None, None, False, True]),
        }
        chosen |= fixed
        exact = chosen["recompute"] is None and self.setting.exact
        chosen["norm"] = chosen.get("norm", exact and chance.random() < 0.3)
        chosen["penalty"] = chosen.get("penalty", exact and chance.random() < 0.15)
        chosen["void"] = tuple(chance.randrange(-1, 6) for _ in range(chance.choice([0, 0, 1, 2])))
        return F(**chosen)

    def calls(self, past: bool = False) -> list[list[F]]:
        """Forwards for each rank: as many, through the same entrance of the same modules, on all ranks; ``past``: none
        calls a module as a whole."""
        chance, fixed = self.chance, {"past": True} if past else {}
        first = [self.forward(**fixed) for _ in range(chance.randint(1, 2))]
        alike = chance.random() < 0.3
        ranks = [first]
        for _ in range(self.world - 1):
            own = [self.forward(module=f.module, past=f.past, recompute=f.recompute, norm=f.norm) for f in first]
            ranks.append(list(first) if alike else own)
        for number in range(self.modules):  # every module takes part, so that nothing stays piled up
            for calls in ranks:
                if all(call.module != number for call in calls):
                    calls.append(F(seed=number, layers=(0,), module=number, past=past))
        for calls in ranks if chance.random() < 0.5 else ():
            chance.shuffle(calls)
        return ranks

    def layer(self) -> str:
        return f"{self.chance.randrange(self.modules)}, {self.chance.choice([0, 1, 2, 3])}"

    def train(self) -> list[str]:
        chance = self.chance
        options = chance.choice(
            [f"times={chance.choice([1, 1, 1, 2])}"] * 4 + ["zero=True", "zero=False", "train=False"]
        )
        lines = [f"use.backward({_text(self.calls())}, {options})"]
        lines += ["use.step()"] if self.chance.random() < 0.7 else []
        lines += [f"use.zero({self.chance.random() < 0.6})"] if self.chance.random() < 0.8 else []
        return lines

    def join(self) -> list[str]:
        """Only where there are wrappers."""
        setting = self.setting
        fits = setting.wrap and setting.processes and not setting.own_groups and setting.buffers != "local"
        if not fits:  # PyTorch's Join asks for a default group, and wants one for all
            return self.train()
        counts = [self.chance.randint(0, 3) for _ in range(self.world)]
        batches = [
            [self.forward(module=number, past=False) for number in range(self.modules)] for _ in range(max(counts))
        ]
        text = ", ".join("[" + ", ".join(map(_call, calls)) + "]" for calls in batches)
        return [f"use.join([{text}], {counts}, {self.chance.random() < 0.5})"]

    def fork(self) -> list[str]:
        """Only where ranks are processes: of a process with other ranks' threads, a child may inherit a lock that is
        held, of CPython itself."""
        return ["use.fork()"] if self.setting.processes else self.train()

    def lone_backward(self) -> list[str]:
        """Through a part of a module; the others go through the module."""
        return [f"use.lone_backward({self.some_ranks()}, {_text(self.through_module())})"]

    def through_module(self) -> list[list[F]]:
        """Forwards of which at least one goes through each module as a whole. With several, whose buffers one of them
        makes equal is not fixed, where another is refused: their buffers stay as they are."""
        calls = self.calls()
        if self.modules > 1:
            calls = [[call._replace(norm=False) for call in each] for each in calls]
        for each in calls:
            each += [F(seed=7, layers=(0,), module=number) for number in range(self.modules)]
        return calls

    def left_out(self) -> list[str]:
        return [f"use.left_out({self.some_ranks()}, {_text(self.through_module())})"]

    def differing(self) -> list[str]:
        how = self.chance.choice(["replaced", "added", "assigned", "retyped"])
        calls = [[call._replace(norm=False) for call in each] for each in self.calls()]
        return [f"use.differing({how!r}, {self.layer()}, {self.some_ranks()}, {_text(calls)})"]

    def wrap_again(self) -> list[str]:
        return [f"use.again({self.chance.randrange(self.modules)})"] if self.setting.wrap else self.train()

    def shift(self) -> list[str]:
        ranks = self.chance.choice([None, self.some_ranks()])
        return [f"use.shift({self.chance.randrange(self.modules)}, {self.chance.random()}, {ranks})"]

    def copied(self) -> list[str]:
        call = self.forward(recompute=None, norm=False, penalty=False)
        return [f"use.copied({self.some_ranks()}, {_call(call)})"]

    def weights(self) -> list[float]:
        return [float(self.chance.randint(1, 9)) for _ in range(self.world)]

    def weighted(self) -> list[str]:
        chance = self.chance
        count, past = chance.randint(1, 3), chance.random() < 0.4
        batches, weights = [self.calls(past) for _ in range(count)], [self.weights() for _ in range(count)]
        options = f"{chance.choice([True, False])}, {chance.choice([1, 1, 2])}"
        return [f"use.weighted([{', '.join(map(_text, batches))}], {weights}, {options})", *self.finish()]

    def given_up(self) -> list[str]:
        how = self.chance.choice(["module", "none", "in place"])
        past = self.chance.random() < 0.4
        lines = [f"use.given_up({_text(self.calls(past))}, {self.weights()}, {how!r})"]
        if self.chance.random() < 0.7:
            lines.append(f"use.weighted([{_text(self.calls(past))}], {[self.weights()]})")
        return lines

    def loops(self) -> list[str]:
        chance = self.chance
        lengths = [[chance.randint(1, 3) for _ in range(self.world)] for _ in range(2)]
        calls = ", ".join(_text(self.calls()) for _ in range(2))
        piles = chance.random() < 0.5
        streams = not piles and chance.random() < 0.4
        weights = self.weights() if chance.random() < 0.5 else None
        zero = chance.choice([True, False, *([None] if weights is None else [])])
        options = f"piles={piles}, streams={streams}, zero={zero}, weights={weights}"
        return [f"use.loops({lengths}, [{calls}], {options})"]

    def finish(self) -> list[str]:
        return ["use.step()", f"use.zero({self.chance.random() < 0.6})"] if self.chance.random() < 0.7 else []

    def failing(self) -> list[str]:
        calls = self.calls()
        failed = self.chance.sample(range(self.world), self.chance.randint(1, self.world))
        sync = self.chance.random() < 0.8
        if self.setting.comm_hook and self.modules == 1 and self.chance.random() < 0.5:
            return [f"use.failing({_text(calls)}, True, {sorted(failed)}, 'bucket')"]
        if self.chance.random() < 0.4 or self.setting.own_groups:
            # What is reentrantly checkpointed past forward shows in no graph.
            calls = [[c._replace(past=c.past and not c.recompute) for c in each] for each in calls]
            where = self.chance.choice(["loss", "parameter"])
            return [f"use.failing({_text(calls)}, {sync}, {sorted(failed)}, {where!r})"]
        for rank in failed:
            position = self.chance.randrange(len(calls[rank]))
            calls[rank][position] = calls[rank][position]._replace(fail=True, penalty=False)
        return [f"use.failing({_text(calls)}, {sync})"]

    def some_ranks(self) -> list[int]:
        return sorted(self.chance.sample(range(self.world), self.chance.randint(1, self.world - 1)))

    def local_grad(self) -> list[str]:
        calls = "[" + ", ".join(map(_call, [self.forward(recompute=None)])) + "]"
        return [f"use.local_grad({self.some_ranks()}, {calls}, fail={self.chance.random() < 0.5})"]


def _call(call: F) -> str:
    given = {k: v for k, v in call._asdict().items() if k in ("seed", "layers") or v != F._field_defaults[k]}
    return f"F({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def _text(ranks: list[list[F]]) -> str:
    return "[" + ", ".join("[" + ", ".join(map(_call, calls)) + "]" for calls in ranks) + "]"


def _one(template: Callable[[Programs], str]) -> Draw:
    return lambda programs: [template(programs)]


WAYS_OF_A_GRADIENT = ["in place", "data", "new", "transposed", "cast"]

OPERATIONS: list[Draw] = [
    Programs.train,
    Programs.train,
    Programs.train,
    _one(lambda p: f"use.whole({p.chance.randrange(10**6)}, {p.chance.randint(1, 5)})"),
    Programs.weighted,
    Programs.failing,
    Programs.local_grad,
    _one(lambda p: f"use.backward({_text(p.calls())}, sync=False)"),
    Programs.given_up,
    Programs.loops,
    _one(lambda p: f"use.evaluate({p.some_ranks()}, {p.chance.randrange(p.modules)}, {p.chance.randrange(99)})"),
    _one(
        lambda p: f"use.halve_grad({p.layer()}, {p.chance.choice(['in place', 'data', 'new', 'transposed', 'cast'])!r})"
    ),
    _one(lambda p: f"use.drop_grad({p.layer()}, {p.chance.choice([None, p.some_ranks()])})"),
    _one(lambda p: f"use.keep_grads({p.chance.random() < 0.5})"),
    _one(lambda p: f"use.step_in_backward({p.layer()})"),
    _one(lambda p: f"use.scale_in_backward({p.layer()}, {p.chance.choice([0.5, 2.0])})"),
    _one(lambda p: f"use.pile_up({p.some_ranks()}, {_text(p.calls())})"),
    _one(lambda p: f"use.zero({p.chance.random() < 0.5})"),
    _one(lambda p: f"use.sharded_step({_text(p.calls())})"),
    Programs.left_out,
    Programs.differing,
    Programs.copied,
    Programs.wrap_again,
    _one(lambda p: f"use.restore({p.chance.randrange(p.modules)})"),
    _one(lambda p: f"use.add_buffer({p.chance.randrange(p.modules)}, {p.chance.randint(1, 3)})"),
    Programs.fork,
    Programs.lone_backward,
    Programs.join,
    _one(lambda p: f"use.freeze({p.layer()}, {p.chance.random() < 0.5}, {p.chance.choice([None, p.some_ranks()])})"),
    _one(lambda p: f"use.replace_layer({p.layer()}, seed={p.chance.randrange(99)})"),
    _one(lambda p: f"use.add_layer({p.chance.randrange(p.modules)}, seed={p.chance.randrange(99)})"),
    _one(lambda p: f"use.assign_state({p.chance.randrange(p.modules)})"),
    _one(lambda p: f"use.assign_parameter({p.layer()}, {p.chance.random() < 0.4})"),
    _one(lambda p: f"use.write_data({p.layer()}, {p.chance.choice(['add', 'new', 'transposed', 'no_grad'])!r})"),
    _one(lambda p: f"use.retype({p.chance.randrange(p.modules)})"),
    _one(lambda p: f"use.weight_norm({p.layer()})"),
    Programs.shift,
    _one(lambda p: f"use.own_grads({p.chance.randrange(p.modules)})"),
]


def draw(seed: int, length: int, device: str = "", worlds: tuple[int, ...] = (2, 3)) -> Program:
    """A program of some length, on each rank's ``device``, and under which circumstances it is to run."""
    chance = random.Random(seed)
    setting = Setting(
        world=chance.choice(worlds),
        backend=chance.choice(["gloo"] if device else ["gloo", "shm"]),
        modules=chance.choice([1, 1, 2]),
        cap=chance.choice([None, 1e-4]),
        wrap=chance.random() < 0.3,
        comm_hook=chance.random() < 0.1,
        processes=chance.random() < 0.15,
        device=device,
        buffers=chance.choice(["rank0"] * 4 + ["mean", "local"]),
    )
    if setting.modules == 2 and setting.backend == "gloo" and not device and chance.random() < 0.4:
        setting = setting._replace(own_groups=True)
    if not setting.comm_hook and random.Random(f"half {seed}").random() < 0.15:
        setting = setting._replace(half=True)
    return Program(setting, tuple(Programs(seed, setting).draw(length)))
