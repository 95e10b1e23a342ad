"""What this rank's contribution to the next round counts.

A weight belongs to the gradients that it came with, and goes with them: when they are given up (``zero_grad()``), when
a round fails, when they have been reduced. What parameters had before the first of the backward passes that a round
reduces - means of an earlier round - has been divided already.
"""

from collections.abc import Collection, Sequence
from itertools import compress

from torch.nn import Parameter

from lockstep.distributed.reduction.accumulated import AccumulatedGradients, EarlierGradients
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.errors import OptionError


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
        self._touched: set[int] = set()  # newcomers that have had a gradient
        self._announced: float | None = None
        self._news = True
        self._passes = 0
        self._reduced = False  # all that has been counted has been reduced

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
        self._touched.add(id(parameter))

    def _all(self) -> Sequence[ManagedParameter]:
        return [*self._parameters, *self._newcomers]

    def _present(self) -> set[int]:
        """The parameters that are in the module now, by identity."""
        return {id(member.parameter) for member in self._all()} - set(self._departed)

    def announce(self, weight: float | None) -> None:
        """The weight of the backward passes that come next, all together; None if they are not weighed."""
        self._announced, self._news = weight, True
        if weight is not None:
            self._give_up_what_is_gone((), may_fail=False)
            self.earlier.note(self._all())

    @property
    def announced(self) -> bool:
        """Whether the backward passes that come next are weighed."""
        return self._announced is not None

    def before_pass(self, new: Collection[int] = ()) -> None:
        """A backward pass is about to accumulate gradients, or has accumulated those of the parameters ``new``,
        by identity.

        Raises :class:`OptionError` if some of the gradients that have been counted are gone, but not all.
        """
        if self._announced is None and not self.given:
            return
        self._give_up_what_is_gone(new, may_fail=True)
        if self._announced is not None and (self._reduced or not self._passes):
            self.earlier.copy(self._all(), new)

    def _give_up_what_is_gone(self, new: Collection[int], may_fail: bool) -> None:
        counts = self._passes and not self._reduced and (self.given or self._announced is not None)
        if counts and self._accumulated.are_gone(new, self._present(), may_fail):
            self._start_again()

    def use(self) -> None:
        """A backward pass begins; raises :class:`OptionError` if only some of those since the last round have a
        weight."""
        if self._reduced:
            self._reduced = False
            if self._news:
                self._start_again()
        weighed = self._announced is not None
        if self._news and self._passes and weighed != self.given:
            raise OptionError(
                f"this backward pass has {'a' if weighed else 'no'} weight, an earlier one since the last "
                "synchronisation had "
                f"{'none' if weighed else 'one'}; give accumulate() a weight in every micro-batch, or in none"
            )
        if self._news and self._announced is not None:
            self.total += self._announced
            self.given = True
        self._news = False
        self._passes += 1

    def pass_ended(self, touched: bytearray) -> None:
        """A backward pass has ended that did not synchronise."""
        left = [m for m in compress(self._parameters, touched) if m.parameter.grad is not None]
        left += [m for m in self._newcomers if id(m.parameter) in self._touched and m.parameter.grad is not None]
        self._accumulated.note(left, closely=self.given)

    def reduced(self) -> None:
        """The contribution has been made. A further backward in the same block counts as much as all before it."""
        self._reduced, self._passes = True, 0
        self.earlier.drop()
        if self.given:
            self.earlier.note(self._all())

    def give_up(self) -> None:
        """The round has failed, unless it has been reduced."""
        if not self._reduced:
            self._start_again()
            self.earlier.drop()

    def _start_again(self) -> None:
        """Nothing has been counted; what is announced is still to be."""
        self.total, self.given, self._passes, self._reduced = 0.0, False, 0, False
        self._news = True
        self._touched.clear()
