"""A module that is replicated with shares: its gradients and buffers in the phases of a step."""

import logging
from collections.abc import Sequence
from math import nan
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep._base.optimizer_steps import has_any
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import state_of
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.selection import Selection
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.distributed.replication.replicate import Loss
from lockstep.errors import CommunicationError, NotReplicableError, OptionError, ShareError
from lockstep.shares.balance import Pace
from lockstep.shares.gradients import ShareGradients, Values
from lockstep.shares.share_agreement import Agreement, Members
from lockstep.shares.share_buffers import ShareBuffers, Versions
from lockstep.shares.share_exchange import ShareExchange, with_buffers
from lockstep.shares.share_report import (
    EVALUATION,
    TRAINING,
    Head,
    ShareReport,
    check_heads,
    check_modes,
    check_precision,
    loops_of,
    number_of,
    weights_of_all,
)
from lockstep.shares.share_settings import check_settings, precision_on, settings_of
from lockstep.shares.share_step import Evidence, ShareStep
from lockstep.shares.share_tree import add_in_tree_order
from lockstep.shares.spare import SpareMemory


class _InStep:
    """The part of a module in the step under way, on this rank."""

    def __init__(self, step: ShareStep) -> None:
        self.step = step
        self.exchange: ShareExchange | None = None
        """None if this rank is alone, or the ranks have not agreed on an exchange of the module as it is."""
        self.evidence: Evidence | None = None
        """None if the step is not audited."""
        self.buffers = ShareBuffers([], step.deal, [])
        """Those of the module once the step is open."""
        self.share: int | None = None
        """The share under way."""
        self.is_last = False
        """True in the last share of this rank."""
        self.is_auditing = False
        """True if the share under way is computed for comparison only."""
        self.is_finishing = False
        self.has_reported = False
        self.modes = 0
        self.pace = Pace()
        self.weights: dict[int, float] = {}


class ShareModule:
    """A module that takes part in the steps of a :class:`~lockstep.shares.share_state.ShareWorld`."""

    def __init__(
        self,
        selection: Selection,
        collectives: Collectives,
        shares: int,
        loss: Loss,
        reduce_dtype: torch.dtype | None,
        compares_values: bool,
    ) -> None:
        self._selection = selection
        self._reduce_dtype = reduce_dtype
        self._collectives = collectives
        self._group_state = state_of(collectives.group)
        self._decisions = decisions_of(collectives.group)
        self.number = self._group_state.modules_with_shares
        """The number of the module among those of the group, the same on every rank."""
        self.shares = shares
        self.loss = loss
        self.steps = 0
        """Number of finished steps."""
        self._now: _InStep | None = None
        self._may_overlap = True
        self._precisions: set[str] = set()
        self._expected_precision: str | None = None
        self._spare = SpareMemory()
        self._look()
        # Another thread may tell the watch of a step when this is gone already.
        link = ref(self)
        self.drift = DriftWatch(
            lambda: [] if (here := link()) is None else here._members.parameters,
            collectives,
            compares=compares_values,
        )
        """Compares what optimizers leave."""
        self._knows_steps = False
        """True if optimizers make as many steps as on all ranks that do the same, since the last step."""
        self.agreement = Agreement(self._members, collectives, compares_values, self._spare)
        self.settings = {**settings_of(self.devices), "reduce_dtype": str(reduce_dtype)}

    def _look(self) -> None:
        """Begin to use the parameters and buffers that the module has now."""
        self._members = members = Members(self._selection, self._reduce_dtype)
        self._gradients = ShareGradients(members.trained, self._arrived, self._spare, self._reduce_dtype)
        self._left: Versions = []
        """The buffers as the last step has left them."""
        self._own = {id(parameter) for _, parameter in members.parameters}
        self._used_before: list[int] | None = None

    def watch(self) -> None:
        """Note gradients that come from now on, by hooks on the parameters."""
        self._gradients.hook()

    def withdraw(self) -> None:
        """Undo :meth:`watch` and :meth:`open`, and send nothing: the module has not been replicated on all ranks."""
        if self._now is not None:
            self._gradients.restore_grads()
            self._now = None
        self._gradients.unhook()
        self.drift.stop()

    @property
    def module_or_none(self) -> Module | None:
        """The module; None if it no longer exists."""
        return self._selection.module_or_none()

    @property
    def is_used(self) -> bool:
        """True if a share of this rank has used the module in the step under way."""
        return self._now is not None and (any(self._gradients.used) or self._now.buffers.is_used)

    @property
    def devices(self) -> set[torch.device]:
        """The devices of its parameters."""
        return {parameter.device for _, parameter in self._members.parameters}

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has one of the module's parameters."""
        return has_any(optimizer, self._own)

    # ------------------------------------------------------------------------- the phases of a step

    def open(self, step: ShareStep) -> None:
        """Begin a step; raise if the module cannot take part."""
        self._now = now = _InStep(step)
        if self._members.may_have_changed():
            self._gradients.unhook()
            self._look()
            self.drift.parameters_changed()
            self._gradients.hook()
        self._check(step)
        self._gradients.check_hooks()
        self._precisions = set()
        if self._collectives.world > 1 and self.agreement.covers(self._members, step.deal):
            now.exchange = self.agreement.exchange()
        if step.audit is not None:
            names = [f"the gradient of {name}" for name in reversed(self._gradients.names)]
            now.evidence = Evidence([*names, *(f"buffer {buffer.name}" for buffer in self._members.buffers)])
        self._gradients.open()
        now.buffers = ShareBuffers(self._members.buffers, step.deal, self._left)

    def _check(self, step: ShareStep) -> None:
        if step.shares != self.shares:
            raise OptionError(
                f"a batch of {step.shares} shares and a module that is replicated with shares={self.shares} do not go "
                "together; give GlobalBatches and replicate() the same number"
            )
        if step.cut is not None and self.loss == "mean":
            raise OptionError(
                "GlobalBatches(cost=...) makes shares with different numbers of rows, and replicate(loss='mean') gives "
                "all shares equal weight, so rows would not count alike; let the loss be a sum, with loss='sum', and "
                "with accumulate(model, weight=tokens) for a mean over tokens"
            )
        self._collectives.check_alive()
        check_settings(
            self.settings, settings_of(self.devices), self._collectives.global_rank, "when the module was replicated"
        )

    def enter(self, share: int, is_last: bool, again: bool) -> None:
        """Begin a share, which is this rank's last one, or is computed ``again``, for comparison only."""
        now = self._now
        assert now is not None
        now.share = share
        now.is_last = is_last
        now.is_auditing = again
        now.buffers.restore()
        if again:
            return
        self._gradients.enter()
        overlaps = self._may_overlap and self._is_only_one
        if is_last and now.exchange is not None and self._used_before is not None and overlaps:
            now.exchange.send_early(self._used_before)

    @property
    def _is_only_one(self) -> bool:
        """True if no other module has been replicated with shares over the group."""
        return self._group_state.modules_with_shares == 1

    def leave(self) -> None:
        """End the share."""
        now = self._now
        assert now is not None
        share, now.share = now.share, None
        assert share is not None
        audit, exchange = now.step.audit, now.exchange
        if now.evidence is not None and audit is not None and (now.is_auditing or share == audit.share):
            now.evidence.note([*reversed(self._gradients.now()), *now.buffers.now()], now.is_auditing)
        if now.is_auditing:
            self._gradients.drop()
            now.buffers.forget()
            return
        if exchange is not None and exchange.places:
            self._gradients.add(share, exchange.place)
        elif exchange is not None and now.is_last:
            self._gradients.add_last(share)
        else:
            self._gradients.add(share)
        now.buffers.add(share)

    def abort(self) -> None:
        """Drop the results of the shares: the step will not be finished.

        Tells the other ranks, which may be at the step's end, without waiting for them.
        """
        now, self._now = self._now, None
        if now is None:
            return
        try:
            is_awaited = now.is_finishing or self._is_only_one  # else ranks exchange their flags first
            if self._collectives.world > 1 and is_awaited and not now.has_reported:
                exchange = now.exchange or self.agreement.exchange()
                exchange.send_rest([], self._head(now)._replace(has_failed=True).to_row(), blocking=False)
        except CommunicationError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            self._knows_steps = False
            self._gradients.restore_grads()
            now.buffers.forget()
            # Values that were written are compared in the next step.
            self._left = [] if now.buffers.written else now.buffers.versions()

    def finish(self, pace: Pace) -> list[Pace]:
        """Add up the results of all ranks; all shares of this rank have ended. Return the reports on their paces."""
        now = self._now
        assert now is not None
        step = now.step
        now.is_finishing = True
        now.pace = pace
        with self._collectives.phases.phase("finish", f"{step}, shares {' + '.join(map(str, step.deal))}"):
            self._check_complete(step)
            reports, kept = self._reports_of_all(now)
            heads, first_changes = [each.head for each in reports], [each.changed_buffers for each in reports]
            travelling = self.agreement.buffers
            if self._collectives.world > 1:
                self.agreement.expect(now.buffers.travelling_next(first_changes), step.next_deal)
            self._decisions.update(loops_of(heads), self._decisions.batch)
            check_modes(heads, self._collectives)
            self._check_precision(heads)
            if step.audit is not None and now.evidence is not None:
                now.evidence.compare(step.audit, str(step), self._collectives)
            used = [any(column) for column in zip(*(report.used for report in reports), strict=True)]
            sums: dict[int, Tensor] = {}
            if now.exchange is None:
                total = self._gradients.total(step.count)
            else:
                total, sums = self._receive(now.exchange, reports, used, travelling.averaged)
            self._gradients.set_grads(total, self._divisor(step, reports))
            now.buffers.finish(first_changes, self._collectives, sums, kept)
            self._left = now.buffers.versions()
        self._now = None
        self._used_before = [number for number, is_used in enumerate(used) if is_used]
        self.steps += 1
        self.drift.round, self._knows_steps = self.steps, True
        return [head.pace for head in heads]

    def _check_complete(self, step: ShareStep) -> None:
        if self._members.may_have_changed() and (new := self._members.new_parameters()):
            raise NotReplicableError(
                f"parameter {new[0]} was put into the module while {step} was under way, so that shares which came "
                "before, or other ranks have, do not count in its gradient; change modules between batches"
            )

    def _check_precision(self, heads: Sequence[Head]) -> None:
        own = self.precision
        check_precision(heads, own, self._collectives)
        expected, self._expected_precision = self._expected_precision, None
        if expected and own:
            rank = self._collectives.global_rank
            check_settings({"autocast": expected}, {"autocast": own}, rank, "when this run was saved")

    def _reports_of_all(self, now: _InStep) -> tuple[list[ShareReport], list[dict[int, Tensor]]]:
        """Send the rest; return the reports of the ranks, and the buffers that each has kept."""
        head = self._head(now)
        if self._collectives.world == 1:
            return [self._report(head, now)], [{}]
        buffers = now.buffers.values()
        now.has_reported = True
        if now.exchange is None:
            report, rows = None, self.agreement.exchange().rows_alone(head.to_row())
        else:
            report = self._report(head, now)
            rows = self._rows_of_all(now, now.exchange, report)
        heads = Head.of_rows(rows)
        check_heads(heads, now.step, self._collectives)
        self.drift.compare([head.drift for head in heads])
        if any(each.differs for each in heads):
            self.agreement.renew(self._members, now.step, heads)
        self.agreement.check_buffers(buffers, heads)
        if report is None:
            now.exchange = self.agreement.exchange()
            report = self._report(head, now)
            rows = self._rows_of_all(now, now.exchange, report)
        reports, kept = ShareReport.of_rows(rows, report)
        return reports, [now.buffers.split_kept(each, self.agreement.buffers.kept) for each in kept]

    def _rows_of_all(self, now: _InStep, exchange: ShareExchange, report: ShareReport) -> Tensor:
        """Send partial sums and the report; return the rows of all ranks."""
        buffers = self.agreement.buffers
        sums = with_buffers(self._gradients.take_terms(), now.buffers.sums(buffers.averaged))
        exchange.send_rest(sums, torch.cat([report.to_row(), now.buffers.kept(buffers.kept)]), blocking=True)
        return exchange.rows()

    def _head(self, now: _InStep) -> Head:
        """Return this rank's head of the step, which does not depend on the other ranks."""
        loops, precision = self._decisions, number_of(self.precision) if self.precision else 0
        return Head(
            number_of(*now.step.describe()),
            precision,
            now.modes,
            now.buffers.written,
            stops=loops.asks_to_stop(),
            skips=loops.skips_next,
            ends=loops.innermost.batch.ends,
            differs=now.exchange is None,
            is_late=now.exchange is not None and now.exchange.is_late,
            drift=self.drift.tell(self.steps + 1, known=self._knows_steps),
            pace=now.pace,
        )

    def _report(self, head: Head, now: _InStep) -> ShareReport:
        weights = [now.weights.get(share, nan) for share in range(now.step.count)]
        return ShareReport(head, weights, self._gradients.used, now.buffers.first_change)

    def _receive(
        self, exchange: ShareExchange, reports: Sequence[ShareReport], used: Sequence[bool], averaged: Sequence[int]
    ) -> tuple[Values, dict[int, Tensor]]:
        if any(report.head.is_late for report in reports):
            exchange.send_again()
            self._may_overlap = False
        sums = dict(exchange.receive())
        total = [sums[number] if is_used else None for number, is_used in enumerate(used)]
        return total, {number: sums[len(used) + place] for place, number in enumerate(averaged)}

    def _divisor(self, step: ShareStep, reports: Sequence[ShareReport]) -> float:
        weights = weights_of_all(reports)
        if weights is not None:
            return add_in_tree_order(weights) or 1.0
        return float(sum(step.rows) if self.loss == "sum" else step.count)

    # -------------------------------------------------------------------------------- in a share

    def weigh(self, weight: float) -> None:
        """Add to the weight of the loss of the share under way."""
        now = self._in_share("accumulate(model, weight=...)")
        if now.share is not None and not now.is_auditing:
            now.weights[now.share] = now.weights.get(now.share, 0.0) + weight

    @property
    def precision(self) -> str:
        """The precisions in which forward has run in this rank's shares of the last step."""
        return " and ".join(sorted(self._precisions))

    def note_forward(self, training: bool) -> None:
        """Record that a forward begins, in training mode or not."""
        if self._now is not None and self._now.share is not None and torch.is_grad_enabled():
            self._precisions.update(precision_on(device.type) for device in self.devices)
            self._now.modes |= TRAINING if training else EVALUATION

    def expect(self, precision: str | None, steps: int) -> None:
        """Continue after ``steps`` steps, whose forwards ran in that precision."""
        self._expected_precision = precision
        self.steps = self.drift.round = steps

    def _arrived(self, number: int) -> None:
        now = self._now
        if now is None or now.share is None:
            now = self._in_share(f"a backward pass has reached parameter {self._gradients.names[number]}, which")
        share = now.share
        if share is not None and now.is_last and now.exchange is not None:
            now.exchange.arrived(number, lambda: self._gradients.terms_with(share))

    def _in_share(self, what: str) -> _InStep:
        """Return the step under way; raise :class:`ShareError` if no share of it is, so that ``what`` cannot be."""
        if self._now is None or self._now.share is None:
            raise ShareError(
                f"{what} belongs to a share, but none is under way: this module is replicated with "
                f"shares={self.shares}. Run forward and backward inside of `for ... in batch`, where batch comes from "
                "lockstep.shares.GlobalBatches on the same process group; for gradients beside training use "
                "torch.autograd.grad, or copy.deepcopy(model)"
            )
        return self._now
