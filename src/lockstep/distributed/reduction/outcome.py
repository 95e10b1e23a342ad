"""What becomes of a round when the ranks have told each other what they did: gradients, or an error on every rank.

The report is read at the end of the round; on an accelerator, if nothing unusual is known here, when an optimizer steps
or the next round opens. All ranks read the same. A consequence that takes all of them is drawn at the end of a round
for whose report all have waited: where some have not, that is the next one. It is never drawn when a round opens, for
another rank may be at another module then, or at none.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.distributed.reduction.contribution import Contribution
from lockstep.distributed.reduction.drift import Drift, warn_of_drift
from lockstep.distributed.reduction.late import late_unnoticed
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.passes import KNOWN_LATE, NOT_STEPPED
from lockstep.distributed.reduction.report import Report, check_ranks, mean_factor
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.unread_reports import before_next_step
from lockstep.distributed.reduction.usage import Usage
from lockstep.errors import AgreementError, OptionError, PeerError


class _Findings(NamedTuple):
    """What follows from a report."""

    factor: float = 1.0
    """What the mean is to be multiplied by."""
    renews: bool = False
    """Whether all ranks have agreed anew on what is replicated."""
    newcomers: Sequence[ManagedParameter] = ()
    """Parameters that are new, and that some rank has a gradient of."""
    drift: Drift | None = None


_USUAL = _Findings()


class Outcome:
    """Draws the consequences of a module's reports."""

    def __init__(self, setup: Setup, lock: AbstractContextManager[object]) -> None:
        """``lock`` is held by whoever reduces; a report that backward has not waited for is read under it, too."""
        self._setup, self._lock = setup, lock
        self._collectives, self._decisions = setup.collectives, setup.scheduler.decisions
        self.usage = Usage()
        self.has_failed = False
        """Whether the last round has failed on some rank, or was left out, and that was told."""
        self.is_awaited = False
        """Whether all ranks wait for the report of the round that has opened: the last one asked for what takes all
        ranks, and some had not waited for it."""
        self._abandoned: Round | None = None  # what it has sent may not have arrived yet
        self._loop = self._decisions.innermost  # of the last round; it may end before the report is read

    def abandon(self, failing: Round) -> None:
        """Abandon a round, because this rank's part in it has failed.

        Ranks that have not read of it when the next one ends fail then, so that one's report is read at once.
        """
        self.has_failed, self._abandoned, self._loop = True, failing, self._decisions.innermost
        failing.abandon()
        self._decisions.has_unread(self)

    def wait_for_abandoned(self) -> None:
        """Return when all that an abandoned round has sent has arrived."""
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            abandoned.wait_abandoned()
            self._setup.buffers.drop_large()
            report = self._setup.transport.read_abandoned(abandoned.abandoned_row)
            if report is not None:
                self._decisions.hear([status.loop for status in report.ranks], self._loop, abandoned=True)

    def conclude(
        self, ended: Round, own: Contribution, may_defer: Callable[[int, bool], bool], *, lists_used: bool
    ) -> Sequence[Parameter]:
        """Read the report of a round that has been reduced, and give the parameters their gradients.

        Where reading takes waiting, ``may_defer`` says whether it can be done later, for the number of a round with a
        late gradient or without.
        Returns the parameters that any rank has used, in an order that is the same on all, if ``lists_used``. Raises on
        every rank if the ranks were not in the same round.
        """
        setup, transport = self._setup, self._setup.transport
        self._loop = self._decisions.innermost
        row = ended.report_row  # which its bucket may give up, with the gradients
        report = transport.read(row, lambda: may_defer(ended.number, bool(ended.late)))
        self.has_failed = False
        usual = report.is_usual and self._decisions.is_default
        found = _USUAL if usual else self._find(report, ended.number, own)
        if found is None:
            own.forget()
            return ()
        try:
            ended.copy_out(report, found.factor, found.newcomers)
        except BaseException:  # of a late gradient, on every rank
            self._drop()
            raise
        if not transport.is_unread:
            setup.buffers.finish_large()
            if not report.module_changed:
                transport.take_buffers(row)
        self.usage.look(own.used)
        used = ended.parameters_in_order(report, found.newcomers) if lists_used else ()
        if found.renews:
            self._renew(own)
        else:
            setup.adapt(report)
        warn_of_drift(found.drift, self._collectives.global_rank)
        if transport.is_unread:
            before_next_step(self)
            self._decisions.has_unread(self)
        return used

    def _find(self, report: Report, number: int, own: Contribution) -> "_Findings | None":
        """What follows from a report, and what takes an agreement of all ranks to know; None if the batch is left out.

        Raises as :meth:`conclude` does.
        """
        setup, all_know = self._setup, not self._was_deferred(report)
        renews, compares = report.module_changed and all_know, report.values_changed and all_know
        try:
            factor = self._check(report, number)
            if report.skips:
                self._drop()
                return None
            setup.check_values(report, number)
            newcomers: Sequence[ManagedParameter] = setup.agree_anew() if renews else ()
            return _Findings(factor, renews, newcomers, self._find_drift(own) if compares else None)
        except (PeerError, AgreementError, OptionError):
            self._fail(report)
            raise

    def _fail(self, report: Report) -> None:
        """The round has failed on every rank, which is about to be raised."""
        is_late = self._is_late_unnoticed(report)
        self._drop()
        if any(status.failed for status in report.ranks):
            self._decisions.note_failure(self._loop)
        elif is_late:
            self._setup.adapt(report)  # as all ranks do: the next round has room

    def _drop(self) -> None:
        """Nothing of the round counts: it has failed, or a report says that the batch is left out."""
        self.has_failed = True
        self._setup.transport.drop_deferred()
        self._setup.buffers.drop_large()
        self._setup.drop_gradients()

    def forget(self) -> None:
        """Another run goes on here: what is unread of the last round has no consequence any more."""
        with self._lock:
            self.wait_for_abandoned()
            self._setup.transport.drop_deferred()
            self._setup.buffers.drop_large()

    # ------------------------------------------------------- a report that backward has not waited for

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses the gradients of the module."""
        return self._setup.members.has_parameter_of(optimizer)

    def read_before_step(self) -> None:
        """An optimizer is about to use the gradients; raises if their round has failed on some rank."""
        with self._lock:
            self._read_unread(NOT_STEPPED)

    def read_for_loop(self) -> None:
        """The loop asks what the ranks have decided. What has failed is told later; the report of a round that was
        abandoned here is heard, too."""
        with self._lock:
            self.wait_for_abandoned()
            report = self._setup.transport.look()
            if report is not None:
                with suppress(PeerError, OptionError):
                    self._check(report, self._setup.rounds)
                    self._drop() if report.skips else self._take_buffers(report)

    def update_buffers(self) -> None:
        """Assign the buffers that have come with the last round, if that has waited for its report, has not failed, and
        counts; an error has to come where all ranks can go on together."""
        if self._setup.transport.is_unread:
            with self._lock:
                report = self._setup.transport.look()
                if report is not None and not report.skips:
                    with suppress(PeerError, OptionError):
                        self._check(report, self._setup.rounds)
                        self._take_buffers(report)

    def _read_unread(self, advice: str) -> None:
        """Read the report of the last round, if it was not waited for: raise if the round has failed, with that
        ``advice``, or assign the buffers that have come with it; a batch that is left out has no gradients."""
        report = self._setup.transport.look()
        if report is None:
            return
        number = self._setup.rounds
        try:
            self._check(report, number, advice)
            if report.skips and advice == KNOWN_LATE:
                raise PeerError(
                    f"rank {self._collectives.global_rank}: a rank has left out the batch of round {number}. {advice}; "
                    "and ask `skipped` before weights are changed in another way than by a torch.optim.Optimizer"
                )
        except (PeerError, OptionError):
            self._fail(report)
            raise
        self._drop() if report.skips else self._take_buffers(report)

    def _take_buffers(self, report: Report) -> None:
        self._setup.buffers.finish_large()
        if not report.module_changed:
            self._setup.transport.take_buffers()
        self._setup.transport.note_looked_at()

    def read_deferred(self) -> None:
        """Read what has not been read of the last round, before the next one opens. Sends nothing."""
        self._read_unread(KNOWN_LATE)
        report = self._setup.transport.read_deferred()
        self.is_awaited = False
        if report is not None and (report.module_changed or report.values_changed):
            self.is_awaited = self._was_deferred(report)

    def _check(self, report: Report, number: int, advice: str = "") -> float:
        """Raise if the ranks were not all in the same round; returns what the mean is to be multiplied by.

        ``advice``: what to do, if parameters have got their gradients.
        """
        ranks = self._collectives.global_ranks
        if report.ranks:
            self._decisions.hear([status.loop for status in report.ranks], self._loop)
        check_ranks(report, number, self._collectives.rank, ranks, advice)
        if report.skips:
            return 1.0
        if self._is_late_unnoticed(report):
            names = [self._setup.parameters[index].name for index in report.late]
            raise late_unnoticed(names[0], number, self._collectives.global_rank, advice)
        return mean_factor(report, self._setup.gradient_divide_factor, number, ranks)

    def _is_late_unnoticed(self, report: Report) -> bool:
        """Whether a gradient was late, and a rank has handed out its gradients without having heard of it, so that it
        does not join in reducing it."""
        return bool(report.late) and self._was_deferred(report)

    def _was_deferred(self, report: Report) -> bool:
        """Whether a rank may have handed out gradients without having read the report."""
        return self._setup.may_defer and not report.all_wait

    def _find_drift(self, own: Contribution) -> Drift | None:
        """Compare the parameters, as they are now, with those of all other ranks, which do the same."""
        return own.drift.compare(self._setup.members.current, self._collectives)

    def _renew(self, own: Contribution) -> None:
        """Go on with what all ranks have now."""
        before = self._setup.renew()
        if before is not None:
            own.renumber(before, self._setup.parameters)
