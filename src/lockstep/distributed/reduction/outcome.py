"""Carries out the verdict on a round: gradients, or an error on every rank."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch.nn import Parameter

from lockstep.distributed.reduction.contribution import Contribution
from lockstep.distributed.reduction.drift import Drift, warn_of_drift
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.status import Report
from lockstep.distributed.reduction.usage import Usage
from lockstep.distributed.reduction.verdict import Verdict, judge, judge_loops
from lockstep.errors import AgreementError, OptionError, PeerError


class _Findings(NamedTuple):
    """Facts that take an agreement of all ranks."""

    renews: bool = False
    """Whether all ranks have agreed anew on what is replicated."""
    newcomers: Sequence[ManagedParameter] = ()
    """Parameters that are new, and that some rank has a gradient of."""
    drift: Drift | None = None


_USUAL = _Findings()


class Outcome:
    """Draws the consequences of a module's reports."""

    def __init__(self, setup: Setup, lock: AbstractContextManager[object]) -> None:
        """``lock`` is held by whoever reduces."""
        self._setup, self._lock = setup, lock
        self._collectives, self._decisions = setup.collectives, setup.scheduler.decisions
        self.usage = Usage()
        self.has_failed = False
        """Whether the last round has failed on some rank, or was left out, and that was told."""
        self._abandoned: Round | None = None  # what it has sent may not have arrived yet
        self._loop = self._decisions.innermost  # of the last round; it may end before the report is read
        self._batch = 0  # that it was at

    def abandon(self, failing: Round) -> None:
        """Abandon a round, because this rank's part in it has failed."""
        self.has_failed, self._abandoned = True, failing
        self._loop, self._batch = self._decisions.innermost, self._decisions.batch
        failing.abandon()
        self._decisions.has_unheard(self)

    def wait_for_abandoned(self) -> None:
        """Return when all that an abandoned round has sent has arrived."""
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            abandoned.wait_abandoned()
            self._setup.buffers.drop_large()
            report = self._setup.transport.read_abandoned(abandoned.abandoned_row)
            if report is not None:
                self._decisions.hear(judge_loops(report.statuses), self._batch, self._loop, abandoned=True)

    def conclude(self, ended: Round, own: Contribution, *, lists_used: bool) -> Sequence[Parameter]:
        """Read the report of a round that has been reduced, and give the parameters their gradients.

        Returns the parameters that any rank has used, in an order that is the same on all, if ``lists_used``. Raises on
        every rank if the ranks were not in the same round.
        """
        setup, transport = self._setup, self._setup.transport
        buffers_row = ended.bucket_row if transport.splits else ended.report_row  # which go with the gradients
        verdict = self._judge(transport.read(ended.report_row))
        self.has_failed = False
        found = _USUAL if verdict.is_usual and self._decisions.is_default else self._find(verdict, ended.number, own)
        if found is None:
            own.forget()
            return ()
        try:
            ended.copy_out(verdict, found.newcomers)
        except BaseException:  # of a late gradient, on every rank
            self._drop()
            raise
        setup.buffers.finish_large()
        if not verdict.changed:
            transport.take_buffers(buffers_row)
        self.usage.look(own.used)
        used = ended.parameters_in_order(verdict, found.newcomers) if lists_used else ()
        if found.renews:
            self._renew(own)
        else:
            setup.adapt(verdict)
        warn_of_drift(found.drift, self._collectives.global_rank)
        return used

    def _judge(self, report: Report) -> Verdict:
        collectives = self._collectives
        return judge(report, collectives.rank, collectives.global_ranks, self._setup.gradient_divide_factor)

    def _find(self, verdict: Verdict, number: int, own: Contribution) -> "_Findings | None":
        """Agree with all ranks on what the verdict on round ``number`` asks for; None if the batch is left out.

        Raises as :meth:`conclude` does.
        """
        setup = self._setup
        self._decisions.hear(verdict.loop, self._decisions.batch)
        try:
            if verdict.error is not None:
                raise verdict.error.exception()
            if verdict.skip:
                self._drop()
                return None
            setup.check_values(verdict, number)
            newcomers: Sequence[ManagedParameter] = setup.agree_anew() if verdict.changed else ()
            return _Findings(verdict.changed, newcomers, self._find_drift(own) if verdict.drifted else None)
        except (PeerError, AgreementError, OptionError):
            self._fail(verdict)
            raise

    def _fail(self, verdict: Verdict) -> None:
        """The round has failed on every rank, which is about to be raised."""
        self._drop()
        if verdict.failed:
            self._decisions.note_failure()

    def _drop(self) -> None:
        """Nothing of the round counts: it has failed, or the batch is left out."""
        self.has_failed = True
        self._setup.buffers.drop_large()
        self._setup.drop_gradients()

    def forget(self) -> None:
        """Another run goes on here: what was abandoned has no consequence any more."""
        with self._lock:
            self.wait_for_abandoned()

    def hear_abandoned(self) -> None:
        """The loop asks what the ranks have decided in a round that was abandoned here."""
        with self._lock:
            self.wait_for_abandoned()

    def _find_drift(self, own: Contribution) -> Drift | None:
        """Compare the parameters, as they are now, with those of all other ranks, which do the same."""
        return own.drift.compare(self._setup.members.current, self._collectives)

    def _renew(self, own: Contribution) -> None:
        """Go on with what all ranks have now."""
        before = self._setup.renew()
        if before is not None:
            own.renumber(before, self._setup.parameters)
