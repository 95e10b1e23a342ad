"""Who reduces when: one conductor for each group opens rounds, closes them at the end of backward, and keeps them in
order.

A round opens with the first gradient of a backward pass and closes in the engine's final callback, of the outermost
backward where reentrant checkpointing nests them. All ranks must send the same buckets in the same order over a group.
With one replicated module on a group that is the order of its plan, and buckets leave while backward runs. With
several, one rank's branches could make another module's bucket ready first; so they wait for the end of backward,
where the ranks tell each other, in one tiny collective, which modules take part, and then reduce them in the order of
their creation.

If backward fails, the engine drops its callbacks unrun. A callback that is dropped knows it, and at once takes this
rank's part in what the other ranks wait for, with a mark that says so: they raise instead of hanging.
"""

import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from lockstep.compiler import hooks_of_compiled_backward, outside_compiler
from lockstep.distributed.collectives import Collectives, Group, Pending
from lockstep.errors import PeerError
from lockstep.phases import Phases

if TYPE_CHECKING:
    from lockstep.distributed.reducer import Reducer

_TAKES_PART, _FAILED = 1, 1 << 16
_conductors: "weakref.WeakSet[Conductor]"
_lock = threading.Lock()


class Conductor:
    """The rounds of all replicated modules on one group, in this process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.exclusive = True
        """Whether at most one module is replicated over the group, on all ranks: agreed, see :meth:`settle`."""
        self.next_serial = 0
        """The number of the next module; ranks take the highest of theirs."""
        self._members: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
        self._armed = False
        self._closing: weakref.ref[_Closing] | None = None
        self.hooks_left = 0
        """Hooks that compiled autograd has yet to run in the backward pass under way."""
        self._open: list[Reducer] = []
        self._ahead: list[Reducer] = []
        self._collectives = Collectives(group, Phases())

    def living(self) -> list[int]:
        """The modules that are still there on this rank."""
        return sorted(self._members.keys())

    def settle(self, reducer: "Reducer", serial: int, living_anywhere: Collection[int]) -> None:
        """Add a module under a number that all ranks agree on; ``living_anywhere`` are the others that any rank has."""
        for known in [number for number, member in self._members.items() if member is reducer]:
            del self._members[known]
        self._members[serial] = reducer
        self.next_serial = serial + 1
        self.exclusive = not living_anywhere

    def arm(self) -> None:
        """Make sure that :meth:`close` runs when the backward pass under way ends."""
        if not self._armed:
            self._armed = True
            closing = _Closing(self)
            self._closing = weakref.ref(closing)
            hooks = hooks_of_compiled_backward()
            if hooks is not None:
                self.hooks_left = sum(getattr(hook, "conductor", None) is self for hook in hooks)
            Variable._execution_engine.queue_callback(closing)

    def hook_has_run(self) -> None:
        """A parameter's hook has done its work. The last one ends a pass of compiled autograd, which drops
        callbacks."""
        self.hooks_left -= 1
        closing = self._closing() if self._closing is not None and not self.hooks_left else None
        if closing is not None:
            closing()

    def expect(self, reducer: "Reducer") -> None:
        """The backward pass under way is about to go through a module."""
        self.arm()
        self._ahead.append(reducer)

    def enter(self, reducer: "Reducer") -> None:
        """A module takes part in the backward pass under way."""
        self.arm()
        self._open.append(reducer)

    def close(self) -> None:
        """The backward pass has ended: reduce what is left, hand out gradients."""
        reducers = self._disarm()
        reducing = [reducer for reducer in reducers if reducer.reducing]
        try:
            for reducer in reducing if self.exclusive or not reducing else self._participants(reducing):
                reducer.finish()
        finally:
            for reducer in reducers:
                reducer.cancel()

    def shadow(self, reducer: "Reducer") -> None:
        """Take part in a round of the other ranks without a backward pass of this one."""
        for member in [reducer] if self.exclusive else self._participants([reducer]):
            member.finish()

    def abandon(self) -> None:
        """The backward pass has failed: let the other ranks know, and wait for nobody.

        Modules that it was about to reach count, too: on the other ranks it reaches them.
        """
        ahead = dict.fromkeys(self._ahead)
        reducers = self._disarm()
        reducers += [each for each in ahead if each not in reducers and each.requires_sync]
        try:
            reducing = [reducer for reducer in reducers if reducer.reducing or not reducer.open]
            if reducing and not self.exclusive:
                self._abandoned = self._exchange(reducing, _FAILED)  # kept until it has arrived
            for reducer in reducing if self.exclusive else ():
                reducer.abandon()
        except RuntimeError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            for reducer in reducers:
                reducer.cancel()

    def _disarm(self) -> list["Reducer"]:
        self._armed, self.hooks_left = False, 0
        reducers, self._open = self._open, []
        self._ahead = []
        return reducers

    def _participants(self, reducers: Sequence["Reducer"]) -> list["Reducer"]:
        """The modules that take part on any rank, in the order of their creation."""
        row, pending = self._exchange(reducers, _TAKES_PART)
        pending.wait()
        counts = row.tolist()
        if any(count >= _FAILED for count in counts):
            raise PeerError(
                f"rank {self._collectives.rank}: the backward pass failed on another rank before its gradients were "
                "reduced; that rank's own error says why. No gradient has been handed out"
            )
        members = [self._members.get(serial) for serial, count in enumerate(counts) if count]
        return [member for member in members if member is not None]

    def _exchange(self, reducers: Sequence["Reducer"], mark: int) -> tuple[Tensor, Pending]:
        row = torch.zeros(self.next_serial, dtype=torch.int64)
        for serial, member in self._members.items():
            if any(member is reducer for reducer in reducers):
                row[serial] = mark
        row = row.to(self._collectives.device)
        return row, self._collectives.all_reduce(row, "which modules take part")


_conductors = weakref.WeakSet()


class _Closing:
    """The engine's callback. It is the engine's alone, so that dropping it unrun shows."""

    __slots__ = ("__weakref__", "_conductor")

    def __init__(self, conductor: Conductor) -> None:
        self._conductor: Conductor | None = conductor

    @outside_compiler
    def __call__(self) -> None:
        conductor, self._conductor = self._conductor, None
        if conductor is not None:
            conductor.close()

    @outside_compiler
    def __del__(self) -> None:
        if self._conductor is not None:
            self._conductor.abandon()


def conductor_of(group: Group) -> Conductor:
    """The conductor of a group: one in a process, for as long as a module holds it."""
    with _lock:
        for conductor in _conductors:
            if conductor.group is group:
                return conductor
        conductor = Conductor(group)
        _conductors.add(conductor)
        return conductor
