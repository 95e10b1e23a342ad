"""``join()``: a rank that has run out of inputs takes part in the steps of the others.

In each forward inside of it, one all-reduce of a few numbers tells which ranks still have batches, and if this
iteration synchronises. A rank that has run out then takes part in the round without gradients.

Several wrappers may be in one ``Join``. The forward of the first one begins an iteration; the other forwards and
backwards may come in any order: all messages before a round have the same form, so a rank that has run out can follow
the others.
"""

import weakref
from enum import Enum, auto
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from lockstep._base.run_all import RunAll
from lockstep.distributed.comm.agreement import check_same_on_all_ranks
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.report.status import Part
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.replication.replication import Values, broadcast_values
from lockstep.errors import OptionError

_GONE, _LOCAL, _SYNCHRONISES = 0, 1, 2
_contexts: "weakref.WeakKeyDictionary[Reducer, weakref.ref[ShadowHook]]" = weakref.WeakKeyDictionary()


def enter_iteration(wrapper: Any, reducer: Reducer) -> None:
    """Note that an active rank begins an iteration. Sends nothing outside of a ``Join`` context and after it."""
    hook = _open_hook(reducer)
    if hook is None:
        return
    if hook.is_first and hook.waited_after == reducer.rounds:
        hook.scheduler.fail()
        raise hook.too_many_forwards()
    first = next((each for each in _open_hooks(hook.scheduler) if each.is_first), None)  # else it is not a module
    if first is not None and first is not hook and not first.has_begun:
        raise hook.out_of_order(first)
    hook.has_begun = True
    work = Join.notify_join_context(wrapper)
    if work is not None:  # only the first of several wrappers notifies the others of an iteration
        work.wait()
    synchronises = torch.is_grad_enabled() and reducer.rank_state.requires_sync
    marks = hook.scheduler.announce_forward(reducer, _SYNCHRONISES if synchronises else _LOCAL)
    hook.count_only_active(marks)
    hook.waited_after = reducer.rounds if _GONE in marks and _SYNCHRONISES in marks else None


def is_in_join(reducer: Reducer | None) -> bool:
    """Return True if a module is in a ``Join`` context that is not over; None: it has not started."""
    return reducer is not None and _open_hook(reducer) is not None


class _Iteration(Enum):
    """The progress of an iteration of the other ranks."""

    EXPECTED = auto()
    BEGUN = auto()
    """Its round is still to come."""
    OVER = auto()


class ShadowHook(JoinHook):
    """The hook of a rank without batches."""

    def __init__(self, wrapper: Any, reducer: Reducer, divides_by_all: bool) -> None:
        """``divides_by_all``: sums are divided by the number of all ranks, not of those that have batches."""
        self._wrapper = wrapper
        self._divides_by_all = divides_by_all
        self.reducer = reducer
        """The reducer of the wrapper."""
        self._iteration = _Iteration.EXPECTED
        self.waited_after: int | None = None
        """The number of the last round, if ranks that have run out wait for the one after it, to which the last forward
        of this rank belongs; else None."""
        self.has_begun = False
        """True once the wrapper has had a forward in the context, on this rank."""
        self.ended = False
        """True once all ranks have run out, and the context is over."""
        _contexts[reducer] = weakref.ref(self)

    @property
    def is_first(self) -> bool:
        """True if the wrapper is the first one of its context: its forward tells ranks that have run out that another
        iteration begins."""
        return bool(self._wrapper._join_config.is_first_joinable)

    @property
    def scheduler(self) -> GroupScheduler:
        """The scheduler of the wrapper's group."""
        return scheduler_of(self.reducer.collectives.group)

    def count_only_active(self, marks: list[int]) -> None:
        """Use the buffers of the first rank that has batches, and divide by the number of such ranks if asked to."""
        active = [rank for rank, mark in enumerate(marks) if mark != _GONE]
        if active:
            divide_by = len(marks) if self._divides_by_all else len(active)
            self.reducer.common.set_participants(active, divide_by)

    def too_many_forwards(self) -> OptionError:
        """Return the error for a forward that comes before the last one has had its backward."""
        return OptionError(
            f"{self._place}: forward of {self._name} begins again, and its last forward has had no backward that "
            "synchronises. Ranks that have run out wait for that backward. One forward is one iteration: call the "
            "module once for all inputs of a step, run forwards without a backward under torch.no_grad(), and "
            "micro-batches under no_sync(); or use lockstep.batches() in place of join(), which counts no forwards"
        )

    def out_of_order(self, first: "ShadowHook") -> OptionError:
        """Return the error for a forward that comes before that of the ``first`` wrapper."""
        return OptionError(
            f"{self._place}: forward of {self._name} has come before that of {first._name}, which is the first of "
            "Join([...]). Ranks that have run out follow an iteration from the forward of the first wrapper on: name "
            "that one first whose forward comes first"
        )

    @property
    def _place(self) -> str:
        return f"rank {self.reducer.collectives.global_rank}, in join()"

    @property
    def _name(self) -> str:
        return type(self._wrapper.module).__name__

    def main_hook(self) -> None:
        """Take part in the steps of the others until this wrapper has had its iteration."""
        while self._iteration is not _Iteration.OVER:
            self._follow()
        self._iteration = _Iteration.EXPECTED

    def _follow(self) -> None:
        """Follow the other ranks: begin an iteration of a wrapper, or reduce."""
        scheduler = self.scheduler
        hooks = {hook.reducer: hook for hook in _open_hooks(scheduler)}
        marks, answer = scheduler.listen()
        if any(marks):
            for hook in (hooks[member] for member in answer.modules if member in hooks):
                hook._begin(marks)
            return

        def part_of(module: Reducer) -> Part:
            return hooks[module]._take_part() if module in hooks else Part.FULL

        scheduler.follow(answer, part_of)

    def _begin(self, marks: list[int]) -> None:
        self.count_only_active(marks)
        synchronises = _SYNCHRONISES in marks
        self._iteration = _Iteration.BEGUN if synchronises else _Iteration.OVER
        if synchronises and self.scheduler.modules.exclusive:
            self.scheduler.reduce([self.reducer], lambda _: self._take_part())

    def _take_part(self) -> Part:
        if self._iteration is _Iteration.BEGUN:
            self._iteration = _Iteration.OVER
        return Part.JOINED

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the values of a rank that ended last."""
        self.ended = True
        reducer = self.reducer
        collectives = reducer.collectives
        steps, values, rows = RunAll(), Values.of((), ()), list[list[int]]()
        with steps:
            values = Values.of((m.parameter for m in reducer.parameters), reducer.buffers.buffers)
        with steps:
            rows = check_same_on_all_ranks([], collectives, [is_last_joiner], steps.problem, "join()")
        steps.end()
        source = max(rank for rank, (is_last,) in enumerate(rows) if is_last)
        self._wrapper._authoritative_rank = source
        broadcast_values(values, collectives, steps, source)
        steps.end()
        reducer.common.set_participants(range(collectives.world), collectives.world)


def _open_hook(reducer: Reducer) -> ShadowHook | None:
    """Return the hook of a wrapper in a context that is not over, which keeps the hook alive as long as it lasts."""
    link = _contexts.get(reducer)
    hook = None if link is None else link()
    return None if hook is None or hook.ended else hook


def _open_hooks(scheduler: GroupScheduler) -> list[ShadowHook]:
    """Return the hooks of all wrappers over one group in contexts that are not over."""
    found = map(_open_hook, list(_contexts))
    return [hook for hook in found if hook is not None and hook.scheduler is scheduler]
