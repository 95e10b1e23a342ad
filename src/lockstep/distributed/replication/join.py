"""``Join``: lets a rank that has run out of inputs take part in the steps of the others.

In each forward inside ``join()``, the ranks exchange in one all-reduce of a few numbers which of them still have
batches, and whether this iteration synchronises. A rank that has run out then takes part in the round without
gradients.

Several wrappers may be in one ``Join``. Each has one forward in an iteration, but their forwards and backwards may come
in any order: all that is sent before a round has the same form, so a rank that has run out can follow the others.
"""

import weakref
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.run_all import RunAll
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.reduction.values import broadcast_values
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import Replication

_GONE, _LOCAL, _SYNCHRONISES = 0, 1, 2
_contexts: "weakref.WeakKeyDictionary[ReducerReplication, weakref.ref[ShadowHook]]" = weakref.WeakKeyDictionary()


def enter_iteration(wrapper: Any, replication: ReducerReplication) -> None:
    """Note that an active rank begins an iteration. Sends nothing outside of a ``Join`` context and after it."""
    link = _contexts.get(replication)
    hook = None if link is None else link()  # the context keeps it alive as long as it lasts
    if hook is None or hook.ended:
        return
    work = Join.notify_join_context(wrapper)
    if work is not None:  # only the first of several wrappers notifies the others of an iteration
        work.wait()
    synchronises = torch.is_grad_enabled() and replication.requires_sync
    marks = hook.scheduler.announce_forward(hook.reducer, _SYNCHRONISES if synchronises else _LOCAL)
    hook.count_only_active(marks)


def is_in_join(replication: Replication) -> bool:
    """Return True if a module is in a ``Join`` context that is not over."""
    link = _contexts.get(replication)  # type: ignore[call-overload]
    hook = None if link is None else link()
    return hook is not None and not hook.ended


class ShadowHook(JoinHook):
    """The hook of a rank without batches."""

    def __init__(self, wrapper: Any, replication: ReducerReplication) -> None:
        self._wrapper, self._replication = wrapper, replication
        self._has_begun = self._awaits_round = False
        self.ended = False
        """True once all ranks have run out, and the context is over."""
        _contexts[replication] = weakref.ref(self)

    @property
    def reducer(self) -> Reducer:
        """The reducer of the wrapper."""
        return self._replication.started_reducer

    @property
    def scheduler(self) -> GroupScheduler:
        """The scheduler of the wrapper's group."""
        return scheduler_of(self.reducer.collectives.group)

    def count_only_active(self, marks: list[int]) -> None:
        """Use the buffers of the first rank that has batches, and divide by the number of such ranks if asked to."""
        active = [rank for rank, mark in enumerate(marks) if mark != _GONE]
        if active:
            divide_by = len(marks) if self._wrapper._divide_by_initial_world_size else len(active)
            self.reducer.common.set_participants(active, divide_by)

    def main_hook(self) -> None:
        """Take part in the steps of the others until this wrapper has had its iteration."""
        while not self._has_begun or self._awaits_round:
            self._follow()
        self._has_begun = False

    def _follow(self) -> None:
        """Follow the other ranks: begin an iteration of a wrapper, or reduce."""
        scheduler = self.scheduler
        hooks = {hook.reducer: hook for hook in _open_hooks() if hook.scheduler is scheduler}
        marks, members = scheduler.listen()
        if any(marks):
            for hook in (hooks[member] for member in members if member in hooks):
                hook._begin(marks)
            return
        steps = RunAll()
        for member in members:
            with steps:
                if member in hooks:
                    hooks[member]._reduce_without_batch()
                else:
                    scheduler.reduce([member])
        steps.end()

    def _begin(self, marks: list[int]) -> None:
        self._has_begun = True
        self.count_only_active(marks)
        self._awaits_round = _SYNCHRONISES in marks
        if self._awaits_round and self.scheduler.modules.exclusive:
            self._reduce_without_batch()

    def _reduce_without_batch(self) -> None:
        self._awaits_round = False
        self.scheduler.reduce_without_batch(self.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the values of a rank that ended last."""
        self.ended = True
        reducer = self.reducer
        collectives = reducer.collectives
        ended_last = all_gather_object(is_last_joiner, "who ended last", collectives)
        source = max(rank for rank, last in enumerate(ended_last) if last)
        self._wrapper._authoritative_rank = source
        broadcast_values([m.parameter for m in reducer.parameters], reducer.buffers.buffers, collectives, source)
        reducer.common.set_participants(range(collectives.world), collectives.world)


def _open_hooks() -> list[ShadowHook]:
    hooks = (link() for link in list(_contexts.values()))
    return [hook for hook in hooks if hook is not None and not hook.ended]
