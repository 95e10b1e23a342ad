"""Who reduces when: one conductor for each group opens rounds, closes them at the end of backward, and keeps them in
order.

A round opens with the first gradient of a backward pass and closes in the engine's final callback, of the outermost
backward where reentrant checkpointing nests them. All ranks must send the same buckets in the same order over a group.
With one replicated module on a group that is the order of its plan, and buckets leave while backward runs. With
several, one rank's branches could make another module's bucket ready first; so they wait for the end of backward,
where the ranks tell each other, in one tiny collective, which modules take part, and then reduce them in the order of
their creation.

One backward pass may go through modules on several groups, and on another rank in another order. So their ends wait for
the end of the pass as a whole, and come one group after the other, in an order that is the same on every rank: the
group's number, which its ranks agree on when they first replicate a module over it, is higher than that of any group
that one of them has had before.

If backward fails, this rank takes its part in what the other ranks wait for, with a mark that says so, before the
exception reaches the program (``backward.py``): they raise instead of hanging. Which modules the others wait for is
what the pass had reached, and what its graph says that it would have. A pass that C++ has begun is known by its
callback alone: the engine drops it unrun, and it knows that it is dropped.
"""

import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from lockstep.compiler import outside_compiler
from lockstep.distributed.collectives import Collectives, Group, Pending
from lockstep.distributed.one_by_one import OneByOne
from lockstep.distributed.reduction.backward import BackwardPass, Reach, current_pass, follow
from lockstep.distributed.reduction.parameter_hooks import run_held_hooks
from lockstep.errors import CommunicationError, PeerError
from lockstep.phases import Phases

if TYPE_CHECKING:
    from lockstep.distributed.reduction.reducer import Reducer

_TAKES_PART, _FAILED = 1, 1 << 16
_conductors: "weakref.WeakSet[Conductor]"
_lock = threading.Lock()
_orders = 0  # the highest number of a group in this process


class Conductor:
    """The rounds of all replicated modules on one group, in this process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.exclusive = True
        """Whether at most one module is replicated over the group, on all ranks: agreed, see :meth:`settle`."""
        self.next_serial = 0
        """The number of the next module; ranks take the highest of theirs."""
        self.order = 0
        """The group's number among those of this process, the same on all of its ranks."""
        self.lost = ""
        """Why this rank cannot communicate over the group any more, if so."""
        self._members: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
        self._armed = False
        self._pass: BackwardPass | None = None  # in which it was armed
        self._arming = threading.Lock()
        self._open: list[Reducer] = []
        self._ahead: list[Reducer] = []
        self._collectives = Collectives(group, Phases())

    def living(self, leaving: "Collection[Reducer]" = ()) -> list[int]:
        """The modules that are still there on this rank, and not about to be replaced by another."""
        return sorted(n for n, member in self._members.items() if not any(member is each for each in leaving))

    def leave(self, reducer: "Reducer") -> None:
        """Forget a module that reduces no more."""
        for known in [number for number, member in self._members.items() if member is reducer]:
            del self._members[known]

    def propose_order(self) -> int:
        """The number that this rank wants for the group; ranks take the highest of theirs."""
        return self.order or _orders + 1

    def settle(self, reducer: "Reducer", serial: int, living_anywhere: Collection[int], order: int) -> None:
        """Add a module under a number that all ranks agree on; ``living_anywhere`` are the others that any rank has,
        ``order`` is the group's number."""
        global _orders
        with _lock:
            self.order, _orders = order, max(order, _orders)
        self.leave(reducer)
        self._members[serial] = reducer
        self.next_serial = serial + 1
        self.exclusive = not living_anywhere

    def arm(self) -> bool:
        """Make sure that :meth:`close` runs when the backward pass under way ends; False if it has failed already."""
        return self._armed or self._arm()

    def _arm(self) -> bool:
        with self._arming:
            current = current_pass()
            this = None if current is None else current.whole
            if this is not None and this.over:
                return False
            if not self._armed:
                if this is current:  # else a callback would run at the end of the step
                    closing = _LoneClosing(self) if this is None else _Closing(self, this)
                    Variable._execution_engine.queue_callback(closing)
                self._pass, self._armed = this, True
                if this is not None:
                    this.followers.append(self)
            return True

    def expect(self, reducer: "Reducer") -> None:
        """The backward pass under way is about to go through a module."""
        if not reducer.retired and self.arm() and not self.expects(reducer):
            self._ahead.append(reducer)
            reducer.look()

    def expects(self, reducer: "Reducer") -> bool:
        """Whether :meth:`expect` has told of a module in the backward pass under way."""
        return any(each is reducer for each in self._ahead)

    def enter(self, reducer: "Reducer") -> None:
        """A module takes part in the backward pass under way."""
        self._open.append(reducer)

    def give_up(self, reducer: "Reducer") -> None:
        """All ranks know, or find out by themselves, that the module's round fails in the pass under way."""
        _give_up(reducer, self._pass)

    @torch.no_grad()  # as it is in a pass; compiled autograd refuses create_graph=True
    def pass_ended(self, this: BackwardPass) -> None:
        """Compiled autograd has run a backward pass, as one function: its callbacks are dropped, and hooks that it has
        compiled have only left a mark."""
        if not self._armed and (marked := [each for each in self._in_order() if each.is_marked()]):
            self._pass, self._armed = this, True
            for reducer in marked:
                reducer.take_marked()
        if self._armed and self._pass is this:
            self.close()

    def close(self) -> None:
        """The backward pass has ended: reduce what is left, hand out gradients."""
        this = self._pass
        if this is not None:
            this.settled.add(id(self))
        gone_through = dict.fromkeys(self._ahead)
        reducers = self._disarm()
        reducing = [reducer for reducer in reducers if reducer.reducing]
        silent = (each for each in gone_through if not any(each is other for other in reducers))
        accumulates = this is not None and this.accumulates
        reducing += [each for each in silent if each.requires_sync and each.takes_part(accumulates)]
        try:
            self.reduce(reducing if self.exclusive or not reducing else self._participants(reducing))
        except BaseException:
            for reducer in reducing:
                _give_up(reducer, this)
            raise
        finally:
            for reducer in dict.fromkeys([*reducers, *gone_through]):
                reducer.cancel()

    def reduce(self, reducers: Sequence["Reducer"]) -> None:
        """Run the rounds of modules; then users' hooks."""
        steps = OneByOne()
        reduced: list[tuple[Reducer, Sequence[Parameter]]] = []
        for reducer in reducers:
            with steps:
                reduced.append((reducer, reducer.finish()))
        for reducer, parameters in reduced:
            with steps:
                run_held_hooks(parameters, reducer)
        steps.end()

    def tell(self, reducer: "Reducer", mark: int) -> list[int]:
        """Inside ``join()``: a module's forward begins. Returns every rank's ``mark``, 0 of those that listen."""
        row, pending = self._exchange([reducer], _TAKES_PART, mark)
        pending.wait()
        return [int(each) for each in row[: self._collectives.world].tolist()]

    def listen(self) -> tuple[list[int], list["Reducer"]]:
        """Inside ``join()``, for a rank that has run out: what the others do next, and with which modules.

        Either a module's forward begins, with a mark of each rank that is not listening, or no rank has a mark, and
        the modules are reduced.
        """
        row, pending = self._exchange([], _TAKES_PART)
        pending.wait()
        marks = [int(each) for each in row[: self._collectives.world].tolist()]
        return marks, self._read_participants(row)

    def pass_failed(self, this: BackwardPass, reach: Reach) -> None:
        """A backward pass has failed: let the other ranks know, and wait for nobody."""
        if id(self) in this.settled or (self._armed and self._pass is not this):
            return  # nothing is left to tell, or all that is known of another pass is that it goes on
        ahead, reducers = (self._ahead, self._disarm()) if self._armed else ([], [])
        for each in self._in_order():
            if each not in reducers and each.requires_sync and each.is_within(reach, each in ahead):
                reducers.append(each)
        self._abandon(reducers, this)

    def dropped(self) -> None:
        """A backward pass that C++ has begun has failed: as above, but nothing is known of its graph."""
        ahead = dict.fromkeys(self._ahead)
        reducers = self._disarm()
        self._abandon(reducers + [each for each in ahead if each not in reducers and each.requires_sync], None)

    @torch.no_grad()
    def _abandon(self, reducers: Sequence["Reducer"], this: BackwardPass | None) -> None:
        known = this.failed if this is not None else ()
        reducing = [each for each in reducers if (each.reducing or not each.open) and id(each) not in known]
        try:
            if reducing and not self.exclusive:
                self._abandoned = self._exchange(reducing, _FAILED)  # kept until it has arrived
            for reducer in reducing if self.exclusive else ():
                reducer.abandon()
        except RuntimeError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            for reducer in reducers:
                _give_up(reducer, this)
                reducer.cancel(failed=any(reducer is each for each in reducing))
            if reducing and not self.exclusive:
                self._end_rounds()

    def lose(self, reason: str) -> None:
        """Send nothing more: others wait for what this rank cannot send, and would take anything else for it.

        Ends the group on all ranks, if that can be done.
        """
        if not self.lost:
            self.lost = reason
            self._collectives.end(f"rank {self._collectives.global_rank} is lost: {reason}")

    def check(self) -> None:
        """Raise :class:`CommunicationError` if this rank cannot communicate over the group any more."""
        if self.lost:
            raise CommunicationError(
                f"rank {self._collectives.global_rank} can no longer take part in what the other ranks of its process "
                f"group do: {self.lost}. Destroy the group and make another, or start anew"
            )

    def _in_order(self) -> list["Reducer"]:
        """The modules, in the order of their creation."""
        return [member for _, member in sorted(self._members.items())]

    def _disarm(self) -> list["Reducer"]:
        if self._pass is not None and self in self._pass.followers:
            self._pass.followers.remove(self)
        self._pass, self._armed = None, False
        reducers, self._open = self._open, []
        self._ahead = []
        return reducers

    def _participants(self, reducers: Sequence["Reducer"]) -> list["Reducer"]:
        """The modules that take part on any rank, in the order of their creation."""
        row, pending = self._exchange(reducers, _TAKES_PART)
        pending.wait()
        return self._read_participants(row)

    def _read_participants(self, row: Tensor) -> list["Reducer"]:
        counts = row[self._collectives.world :].tolist()
        members = [self._members.get(serial) for serial, count in enumerate(counts) if count]
        if any(count >= _FAILED for count in counts):
            self._end_rounds()
            raise PeerError(
                f"rank {self._collectives.global_rank}: the backward pass failed on another rank before its gradients "
                "were reduced; that rank's own error says why. No gradient has been handed out"
            )
        return [member for member in members if member is not None]

    def _end_rounds(self) -> None:
        """All ranks know that the pass has failed, but not which of the modules each of them would have gone through:
        end the rounds of all. See tests/ranks/test_several_modules.py."""
        for member in self._in_order():
            member.cancel(failed=True)

    def _exchange(self, reducers: Sequence["Reducer"], mark: int, own: int = 0) -> tuple[Tensor, Pending]:
        """One number for each rank, and one for each module."""
        world = self._collectives.world
        row = torch.zeros(world + self.next_serial, dtype=torch.int64)
        row[self._collectives.rank] = own
        for serial, member in self._members.items():
            if any(member is reducer for reducer in reducers):
                row[world + serial] = mark
        row = row.to(self._collectives.device)
        return row, self._collectives.all_reduce(row, "which modules take part")


_conductors = weakref.WeakSet()


class _Closing:
    """The engine's callback. The first one that is called closes what the pass has gone through on all groups."""

    __slots__ = ("_conductor", "_pass")

    def __init__(self, conductor: Conductor, this: BackwardPass | None = None) -> None:
        self._conductor: Conductor | None = conductor
        self._pass = this

    @outside_compiler
    def __call__(self) -> None:
        conductor, self._conductor = self._conductor, None
        this, self._pass = self._pass, None
        if this is not None:
            conductors = [each for each in this.followers if isinstance(each, Conductor)]
            for each in sorted(conductors, key=lambda each: each.order):
                each.close()
        elif conductor is not None:
            conductor.close()


class _LoneClosing(_Closing):
    """The callback of a pass that nothing else follows. It is the engine's alone, so that dropping it unrun shows."""

    __slots__ = ()

    @outside_compiler
    def __del__(self) -> None:
        if self._conductor is not None:
            self._conductor.dropped()


def _give_up(reducer: "Reducer", this: BackwardPass | None) -> None:
    """All ranks know, or find out by themselves, that a module's round has failed in this pass."""
    if this is not None:
        this.failed.add(id(reducer))


def conductor_of(group: Group) -> Conductor:
    """The conductor of a group: one in a process, for as long as a module holds it."""
    with _lock:
        for conductor in _conductors:
            if conductor.group is group:
                return conductor
        conductor = Conductor(group)
        _conductors.add(conductor)
        follow(conductor)
        return conductor
