"""A module that is replicated with shares: its gradients and buffers in the phases of a step."""

import logging
from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.distributed.comm.collectives import Collectives, state_of
from lockstep.distributed.reduction.decisions import decisions_of
from lockstep.distributed.reduction.parameters import Selection, SlotSnapshot
from lockstep.distributed.replication.replicate import Loss
from lockstep.errors import CommunicationError, NotReplicableError, OptionError, ShareError
from lockstep.shares.early import EarlyBuckets
from lockstep.shares.gradients import ShareGradients, Values
from lockstep.shares.share_agreement import Agreement, Members
from lockstep.shares.share_buffers import ShareBuffers
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
from lockstep.shares.share_step import Audit, Evidence, Step
from lockstep.shares.share_tree import add_in_tree_order
from lockstep.shares.spare import SpareMemory


class _Watch:
    """Observes the replicated parameters and buffers of a module."""

    def __init__(self, selection: Selection, reduce_dtype: torch.dtype | None) -> None:
        self._selection = selection
        self._reduce_dtype = reduce_dtype

    def look(self) -> Members:
        """Return the present parameters and buffers."""
        members = Members(self._selection.contents(), self._reduce_dtype)
        self._slots = SlotSnapshot([owner for _, owner in self._selection.owners()])
        self._buffers = self._selection.buffers()
        self._parameters = [parameter for _, parameter in members.parameters]
        self._kinds = self._kinds_now()
        return members

    def changed(self) -> bool:
        """Return True if parameters or buffers may have changed since the last look."""
        return self._slots.changed() or self._buffers.changed() or self._kinds_now() != self._kinds

    def new_parameters(self) -> list[str]:
        """Return the names of parameters that have been added since the last look."""
        known = set(map(id, self._parameters))
        return [name for name, parameter in self._selection.contents().parameters if id(parameter) not in known]

    def _kinds_now(self) -> list[tuple[bool, torch.dtype, torch.Size, torch.device]]:
        return [(p.requires_grad, p.dtype, p.shape, p.device) for p in self._parameters]


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
        self._watch = _Watch(selection, reduce_dtype)
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
        self._step: Step | None = None
        self._share: int | None = None
        self._is_auditing = False
        """True if the share under way is computed for comparison only."""
        self._last_share: int | None = None
        self._is_finishing = self._has_reported = False
        self._may_overlap = True
        self._exchange: ShareExchange | None = None
        self._early: EarlyBuckets | None = None
        self._audit: Audit | None = None
        self._evidence: Evidence | None = None
        self._weights: dict[int, float] = {}
        self._precisions: set[str] = set()
        self._modes = 0
        self._expected_precision: str | None = None
        self._take(self._watch.look())
        self.agreement = Agreement(self._members, collectives, compares_values)
        self.settings = {**settings_of(self.devices), "reduce_dtype": str(reduce_dtype)}

    def _take(self, members: Members) -> None:
        self._members = members
        self._spare = SpareMemory()
        self._gradients = ShareGradients(members.trained, self._arrived, self._spare, self._reduce_dtype)
        self._buffers = ShareBuffers(members.buffers)
        self._own = {id(parameter) for _, parameter in members.parameters}
        self._used_before: list[int] | None = None

    @property
    def alive(self) -> bool:
        """True if the module still exists."""
        return self._selection.alive

    @property
    def is_used(self) -> bool:
        """True if a share of this rank has used the module in the step under way."""
        return self._step is not None and (any(self._gradients.used) or self._buffers.is_used)

    @property
    def devices(self) -> set[torch.device]:
        """The devices of its parameters."""
        return {parameter.device for _, parameter in self._members.parameters}

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has one of the module's parameters."""
        return any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])

    # ------------------------------------------------------------------------- the phases of a step

    def open(self, step: Step, own: range) -> None:
        """Begin a step of which this rank computes the shares ``own``; raise if the module cannot take part."""
        self._step = step
        self._exchange = None
        self._early = None
        self._is_finishing = self._has_reported = False
        if self._watch.changed():
            self._gradients.unhook()
            self._take(self._watch.look())
        self._check(step)
        self._gradients.check_hooks()
        self._precisions = set()
        self._modes = 0
        self._weights = {}
        self._last_share = own[-1] if own else None
        if self._collectives.world > 1 and self.agreement.covers(self._members, step.count):
            self._exchange = self.agreement.exchange(self._spare)
        self._audit = step.audit
        self._evidence = None
        if self._audit is not None:
            names = [f"the gradient of {name}" for name in self._gradients.names]
            self._evidence = Evidence([*names, *(f"buffer {buffer.name}" for buffer in self._members.buffers)])
        self._gradients.open()
        self._buffers.open(step.count)

    def _check(self, step: Step) -> None:
        if step.shares != self.shares:
            raise OptionError(
                f"a batch of {step.shares} shares and a module that is replicated with shares={self.shares} do not go "
                "together; give GlobalBatches and replicate() the same number"
            )
        self._collectives.check_alive()
        check_settings(
            self.settings, settings_of(self.devices), self._collectives.global_rank, "when the module was replicated"
        )

    def enter(self, share: int, is_last: bool, again: bool) -> None:
        """Begin a share, which is this rank's last one, or is computed ``again``, for comparison only."""
        self._share = share
        self._is_auditing = again
        self._buffers.restore()
        if again:
            return
        self._gradients.enter()
        if is_last and self._exchange is not None and self._used_before is not None and self._overlaps:
            self._early = EarlyBuckets(self._exchange, self._gradients, share, self._used_before)

    @property
    def _overlaps(self) -> bool:
        """True if buckets may be sent before the ranks' reports."""
        return self._may_overlap and self._is_only_one

    @property
    def _is_only_one(self) -> bool:
        """True if no other module has been replicated with shares over the group."""
        return self._group_state.modules_with_shares == 1

    def leave(self) -> None:
        """End the share."""
        share = self._share
        self._share = None
        assert share is not None
        if self._is_auditing:
            self._note(again=True)
            self._gradients.drop()
            self._buffers.forget()
            return
        if self._audit is not None and share == self._audit.share:
            self._note(again=False)
        if self._exchange is not None and self._exchange.places:
            self._gradients.add(share, self._exchange.place)
        elif self._exchange is not None and share == self._last_share:
            self._gradients.add_last(share)
        else:
            self._gradients.add(share)
        self._buffers.add(share)

    def _note(self, again: bool) -> None:
        assert self._evidence is not None
        self._evidence.note([*self._gradients.now(), *self._buffers.now()], again)

    def abort(self) -> None:
        """Drop the results of the shares: the step will not be finished.

        Tells the other ranks, which may be at the step's end, without waiting for them.
        """
        step = self._step
        self._step = self._share = None
        if step is None:
            return
        try:
            is_awaited = self._is_finishing or self._is_only_one  # else ranks exchange their flags first
            if self._collectives.world > 1 and is_awaited and not self._has_reported:
                exchange = self._exchange or self.agreement.exchange(self._spare)
                exchange.send_rest([], self._head(step)._replace(has_failed=True).to_row(), blocking=False)
        except CommunicationError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            self._exchange = self._early = None
            self._gradients.restore_grads()
            self._buffers.forget()

    def finish(self) -> None:
        """Add up the results of all ranks; all shares of this rank have ended."""
        step = self._step
        assert step is not None
        self._is_finishing = True
        with self._collectives.phases.phase("finish", str(step)):
            self._check_complete(step)
            reports, kept = self._reports_of_all(step)
            heads, first_changes = [each.head for each in reports], [each.changed_buffers for each in reports]
            travelling = self.agreement.buffers
            if self._collectives.world > 1:
                self.agreement.expect(self._buffers.travelling_next(first_changes), step.next_count)
            self._decisions.update(loops_of(heads), self._decisions.batch)
            check_modes(heads, self._collectives)
            self._check_precision(heads)
            if self._audit is not None and self._evidence is not None:
                self._evidence.compare(self._audit, str(step), self._collectives)
            used = [any(column) for column in zip(*(report.used for report in reports), strict=True)]
            sums: dict[int, Tensor] = {}
            if self._exchange is None:
                total = self._gradients.total(step.count)
            else:
                total, sums = self._receive(self._exchange, reports, used, travelling.averaged)
            self._gradients.set_grads(total, self._divisor(step, reports))
            self._buffers.finish(first_changes, self._collectives, sums, kept)
        self._step = self._exchange = self._early = None
        self._used_before = [number for number, is_used in enumerate(used) if is_used]
        self.steps += 1

    def _check_complete(self, step: Step) -> None:
        if self._watch.changed() and (new := self._watch.new_parameters()):
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

    def _reports_of_all(self, step: Step) -> tuple[list[ShareReport], list[dict[int, Tensor]]]:
        """Send the rest; return the reports of the ranks, and the buffers that each has kept."""
        head = self._head(step)
        if self._collectives.world == 1:
            return [self._report(head, step)], [{}]
        buffers = self._buffers.values()
        head = head._replace(values=self.agreement.look(self.steps + 1, self._members, buffers))
        self._has_reported = True
        if self._exchange is None:
            report, rows = None, self.agreement.exchange(self._spare).rows_alone(head.to_row())
        else:
            report = self._report(head, step)
            rows = self._rows_of_all(self._exchange, report)
        heads = Head.of_rows(rows)
        check_heads(heads, step, self._collectives)
        if any(each.differs for each in heads):
            self.agreement.renew(self._members, step, heads)
        self.agreement.check_buffers(buffers, heads)
        self.agreement.check_values(self._members, buffers, heads)
        if report is None:
            self._exchange = self.agreement.exchange(self._spare)
            report = self._report(head, step)
            rows = self._rows_of_all(self._exchange, report)
        reports, kept = ShareReport.of_rows(rows, report)
        return reports, [self._buffers.split_kept(each, self.agreement.buffers.kept) for each in kept]

    def _rows_of_all(self, exchange: ShareExchange, report: ShareReport) -> Tensor:
        """Send partial sums and the report; return the rows of all ranks."""
        buffers = self.agreement.buffers
        sums = with_buffers(self._gradients.take_terms(), self._buffers.sums(buffers.averaged))
        exchange.send_rest(sums, torch.cat([report.to_row(), self._buffers.kept(buffers.kept)]), blocking=True)
        return exchange.rows()

    def _head(self, step: Step) -> Head:
        """Return this rank's head of the step, which does not depend on the other ranks."""
        loops, precision = self._decisions, number_of(self.precision) if self.precision else 0
        return Head(
            number_of(*step.describe()),
            precision,
            self._modes,
            self._buffers.written,
            stops=loops.asks_to_stop,
            skips=loops.skips_next,
            ends=loops.innermost.batch.ends,
            differs=self._exchange is None,
        )

    def _report(self, head: Head, step: Step) -> ShareReport:
        weights = [self._weights.get(share, nan) for share in range(step.count)]
        leaving = 0 if self._exchange is None else self._exchange.plan.leave_early
        late = [self._early is not None and number in self._early.late for number in range(leaving)]
        return ShareReport(head, weights, self._gradients.used, self._buffers.first_change, late)

    def _receive(
        self, exchange: ShareExchange, reports: Sequence[ShareReport], used: Sequence[bool], averaged: Sequence[int]
    ) -> tuple[Values, dict[int, Tensor]]:
        """Return the sums over all shares, of the gradients and of the buffers that travelled with them."""
        late = [any(column) for column in zip(*(report.late for report in reports), strict=True)]
        exchange.send_again([number for number, is_late in enumerate(late) if is_late])
        self._may_overlap = self._may_overlap and not any(late)
        sums = dict(exchange.receive())
        total = [sums.pop(len(used) - 1 - number) for number in range(len(used))]
        buffers = {number: sums[len(used) + place] for place, number in enumerate(averaged)}
        return [value if is_used else None for value, is_used in zip(total, used, strict=True)], buffers

    def _divisor(self, step: Step, reports: Sequence[ShareReport]) -> float:
        weights = weights_of_all(reports)
        if weights is not None:
            return add_in_tree_order(weights) or 1.0
        return float(sum(step.rows) if self.loss == "sum" else step.count)

    # -------------------------------------------------------------------------------- in a share

    def weigh(self, weight: float) -> None:
        """Add to the weight of the loss of the share under way."""
        share = self._share_under_way("accumulate(model, weight=...)")
        if self._is_auditing:
            return
        self._weights[share] = self._weights.get(share, 0.0) + weight

    @property
    def precision(self) -> str:
        """The precisions in which forward has run in this rank's shares of the last step."""
        return " and ".join(sorted(self._precisions))

    def note_forward(self, training: bool) -> None:
        """Record that a forward begins, in training mode or not."""
        if self._step is not None and self._share is not None and torch.is_grad_enabled():
            self._precisions.update(precision_on(device.type) for device in self.devices)
            self._modes |= TRAINING if training else EVALUATION

    def expect(self, precision: str | None, steps: int) -> None:
        """Continue after ``steps`` steps, whose forwards ran in that precision."""
        self._expected_precision = precision
        self.steps = steps

    def _arrived(self, number: int) -> None:
        if self._step is None or self._share is None:
            name = self._gradients.names[number]
            self._share_under_way(f"a backward pass has reached parameter {name}, which")
        if self._early is not None and not self._is_auditing:
            self._early.arrived(number)

    def _share_under_way(self, what: str) -> int:
        share = self._share
        if self._step is None or share is None:
            raise ShareError(
                f"{what} belongs to a share, but none is under way: this module is replicated with "
                f"shares={self.shares}. Run forward and backward inside of `for ... in batch`, where batch comes from "
                "lockstep.shares.GlobalBatches on the same process group; for gradients beside training use "
                "torch.autograd.grad, or copy.deepcopy(model)"
            )
        return share
