"""What this rank's contribution to the next round counts.

A weight belongs to the gradients that it came with, and goes with them: when they are given up (``zero_grad()``), when
a round fails, when they have been reduced. What parameters had before the first of the backward passes that a round
reduces - means of an earlier round - has been divided already.

A loss that reaches no trained parameter has a weight, too: its gradients are zero. If nothing has accumulated that the
weight could go with, it waits for the next round; ``zero_grad()`` of the module and an optimizer's step without a round
give it up.
"""

from collections.abc import Collection, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Protocol

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.distributed.reduction.accumulated import AccumulatedGradients, EarlierGradients
from lockstep.distributed.reduction.optimizer_steps import NextStep
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.errors import OptionError

_grad_of = attrgetter("parameter.grad")


class Weights:
    """Adds up what is announced for each micro-batch (``accumulation.py``), once a backward has used it."""

    def __init__(self) -> None:
        self.total = 0.0
        self.given = False
        """Whether this rank weighs its contributions."""
        self.earlier = EarlierGradients()
        self._accumulated = AccumulatedGradients()
        self._parameters: Sequence[ManagedParameter] = ()
        self._newcomers: Sequence[ManagedParameter] = ()
        self._departed: Collection[int] = ()
        self._arrived: set[int] = set()  # newcomers that have had a gradient
        self._announced: float | None = None
        self._is_new = True
        self._passes = 0
        self._has_accumulated = False  # some of those passes have given parameters gradients
        self._reduced = False  # all that has been counted has been reduced
        self._problem = ""  # why it cannot be told whether what has accumulated is still there

    def watch(
        self,
        parameters: Sequence[ManagedParameter],
        newcomers: Sequence[ManagedParameter] = (),
        departed: Collection[int] = (),
    ) -> None:
        """The parameters are these, from now on; ranks have not agreed on the ``newcomers`` yet, nor on leaving out
        the ``departed``, by identity, which are in the module no more."""
        self._parameters, self._newcomers, self._departed = parameters, newcomers, departed

    def newcomer_arrived(self, parameter: Parameter) -> None:
        """A newcomer has got a gradient."""
        self._arrived.add(id(parameter))

    def _all(self) -> Sequence[ManagedParameter]:
        return [*self._parameters, *self._newcomers]

    def _present(self) -> set[int]:
        """The parameters that are in the module now, by identity."""
        return {id(member.parameter) for member in self._all()} - set(self._departed)

    def announce(self, weight: float | None) -> None:
        """The weight of the backward passes that come next, all together; None if they are not weighed."""
        self._announced, self._is_new = weight, True

    @property
    def concerned(self) -> bool:
        """Whether the backward pass that comes next is weighed, or one since the last round was."""
        return self._announced is not None or self.given

    @property
    def counted(self) -> bool:
        """Whether a backward pass has been counted since the last round."""
        return bool(self._passes) and not self._reduced

    def look(self, idle: bool = False) -> None:
        """A backward pass is about to accumulate gradients, and has added to none yet: see what is there before it.

        ``idle``: whether or not it has a weight, since the rank has run out of batches, and contributes what is there.
        """
        self._problem = ""
        if not (self.concerned or idle):
            return
        if self._has_accumulated and not self._reduced:
            gone, problem = self._accumulated.look(self._present())
            self._problem = problem if self.concerned else ""
            if gone:
                self._start_again()
        if self._announced is not None and (self._reduced or not self._has_accumulated):
            self.earlier.copy(self._all())

    def check(self) -> None:
        """Raise :class:`OptionError` if some of the gradients that have been counted were gone when the pass under way
        began, but not all, or if that could not be told."""
        if self._problem:
            raise OptionError(self._problem)

    def use(self) -> None:
        """A backward pass begins to accumulate gradients; raises :class:`OptionError` as :meth:`check` does, or if only
        some of those since the last round have a weight."""
        self._count_pass()
        self._has_accumulated = True

    def use_without_gradient(self) -> bool:
        """A ``backward()`` has ended; if it was the first since a weight was announced, and has given no parameter a
        gradient, the weight counts all the same. Returns whether it has to be given up with the batch, because nothing
        has accumulated that it would go with.

        Raises :class:`OptionError` as :meth:`use` does.
        """
        if self._announced is None or not self._is_new:
            return False
        self._count_pass()
        return not self._has_accumulated

    def give_up_without_gradients(self) -> None:
        """The batch has been given up: weights that came with no gradient at all go."""
        if self._passes and not (self._has_accumulated or self._reduced):
            self._start_again()

    def _count_pass(self) -> None:
        self.check()
        if self._reduced:
            self._reduced = False
            if self._is_new:
                self._start_again()
        weighed = self._announced is not None
        if self._is_new and self._passes and weighed != self.given:
            raise OptionError(
                f"this backward pass has {'a' if weighed else 'no'} weight, an earlier one since the last "
                "synchronisation had "
                f"{'none' if weighed else 'one'}; give accumulate() a weight in every micro-batch, or in none"
            )
        if self._is_new and self._announced is not None:
            self.total += self._announced
            self.given = True
        self._is_new = False
        self._passes += 1

    def pass_ended(self, used: bytearray) -> None:
        """A backward pass has ended that did not synchronise."""
        came = list(compress(self._parameters, used))
        left = list(compress(came, map(is_not, map(_grad_of, came), repeat(None))))  # no Python for each
        left += [m for m in self._newcomers if id(m.parameter) in self._arrived and m.parameter.grad is not None]
        self._accumulated.note(left, closely=self.given)

    def note_closely(self) -> None:
        """What is there now is what was left; a look finds out whether it has changed since."""
        self._accumulated.note_closely()

    def reduced(self) -> None:
        """The contribution has been made. A further backward in the same block counts as much as all before it."""
        self._reduced, self._passes, self._has_accumulated = True, 0, False
        self._arrived.clear()  # identities, of parameters that may be gone from now on
        self.earlier.drop()

    def gradients_zeroed(self) -> None:
        """``zero_grad()`` of the module has run; a class may have one of its own, which leaves some as they are."""
        if self.counted and (self._accumulated.are_zero() or not self._has_accumulated):
            self._start_again()

    def give_up(self) -> None:
        """The round has failed, unless it has been reduced."""
        if not self._reduced:
            self._start_again()
            self.earlier.drop()

    def leave_out(self) -> None:
        """The batch is left out: what is announced counts no more, either."""
        self._start_again()
        self.earlier.drop()
        self._announced = None

    def _start_again(self) -> None:
        """Nothing has been counted; what is announced is still to be."""
        self.total, self.given, self._passes, self._reduced = 0.0, False, 0, False
        self._is_new, self._has_accumulated, self._problem = True, False, ""
        self._arrived.clear()


class Weighed(Protocol):
    """Whose contribution has a weight that came with no gradient."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses gradients that the weight is to divide."""

    def give_up_without_gradients(self) -> None:
        """The batch has been given up."""


def give_up_after_next_step(weighed: Weighed) -> None:
    """An optimizer's step ends the batch: a weight that no round has taken along by then is of no batch to come.

    After the step and not before it, for backward may run inside, in a closure.
    """
    _next_step.wait(weighed)


_next_step: NextStep[Weighed] = NextStep(
    register_optimizer_step_post_hook, lambda weighed: weighed.give_up_without_gradients()
)
