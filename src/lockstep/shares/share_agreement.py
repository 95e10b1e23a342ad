"""The agreement of the ranks on the exchange in a step, and on a new exchange when something has changed.

The sizes of all messages follow from the module (which parameters are trained, which buffers there are), from what the
last step has changed, and from the number of shares. All of that is agreed on before a step begins. If it no longer
holds on a rank, since a program has changed the module, say, that rank takes part as agreed: it sends arbitrary values
in place of partial sums, and says so in the head of its row. Then all ranks compare their modules. If all have changed
alike, they exchange the step's sums with the present modules; if not, the difference is an error by name on every rank.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep._base.buckets import TensorSpec, dense_stride
from lockstep._base.deal import Deal, equal_deal
from lockstep._base.dtensors import local_part
from lockstep.distributed.comm.agreement import Line, check_new_everywhere, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.module.buffers import Buffer
from lockstep.distributed.reduction.module.equal_values import check_equal_values
from lockstep.distributed.reduction.module.parameters import SlotSnapshot
from lockstep.distributed.reduction.module.selection import Selection
from lockstep.errors import AgreementError
from lockstep.shares.gradients import sum_dtype
from lockstep.shares.share_buffers import TravellingBuffers, specs_of
from lockstep.shares.share_exchange import ExchangePlan, ShareExchange
from lockstep.shares.share_report import HEAD_BYTES, Head, layout_of
from lockstep.shares.share_step import ShareStep
from lockstep.shares.spare import SpareMemory


class Members:
    """The replicated parameters and buffers of a module at one moment."""

    def __init__(self, selection: Selection, reduce_dtype: torch.dtype | None) -> None:
        contents = selection.contents()
        self._selection = selection
        self._contents = contents
        self._reduce_dtype = reduce_dtype
        self.parameters: Sequence[tuple[str, Parameter]] = contents.parameters
        self.buffers: Sequence[Buffer] = contents.buffers
        self.trained = [(name, parameter) for name, parameter in reversed(self.parameters) if parameter.requires_grad]
        """The trained parameters, in the order in which their gradients travel: from the last to the first."""
        self._lines = self.describe()
        self._slots = SlotSnapshot([owner for _, owner in selection.owners()])
        self._slots_of_buffers = selection.buffers()
        self._kinds = self._present_kinds()

    def _present_kinds(self) -> list[tuple[bool, torch.dtype, torch.Size, torch.device]]:
        return [(p.requires_grad, p.dtype, p.shape, p.device) for _, p in self.parameters]

    def may_have_changed(self) -> bool:
        """Return True if the module may have other parameters or buffers by now."""
        return self._slots.changed() or self._slots_of_buffers.changed() or self._present_kinds() != self._kinds

    def new_parameters(self) -> list[str]:
        """Return the names of parameters that have been added to the module since."""
        known = {id(parameter) for _, parameter in self.parameters}
        return [name for name, parameter in self._selection.contents().parameters if id(parameter) not in known]

    def describe(self, before: "Members | None" = None) -> list[Line]:
        """Return the lines that must be the same on all ranks, whose members were ``before`` until now."""
        return self._contents.describe(
            {} if before is None else {id(parameter): name for name, parameter in before.parameters}
        )

    def are(self, others: "Members") -> bool:
        """Return True if these are the same parameters and buffers, in the same places."""
        pairs = zip(self.parameters, others.parameters, strict=False)
        return self is others or (
            self._lines == others._lines
            and self._kinds == others._kinds
            and all(parameter is other for (_, parameter), (_, other) in pairs)
        )

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """The layouts in which gradients are added."""
        local = [(name, local_part(parameter)) for name, parameter in self.trained]
        dtypes = [sum_dtype(p.dtype, self._reduce_dtype) for _, p in local]
        return [
            TensorSpec(name, tuple(p.shape), dense_stride(p.shape, p.stride()), dtype, p.device)
            for (name, p), dtype in zip(local, dtypes, strict=True)
        ]


class _Agreed(NamedTuple):
    """The exchange of the next step, as agreed by all ranks."""

    deal: Deal
    """The number of shares of each rank in the step."""
    buffers: TravellingBuffers
    plan: ExchangePlan
    row_bytes: int


class Agreement:
    """The present agreement of the ranks for one module.

    With ``compares_values``, parameters that are new, and buffers that a program wrote, must have equal values on all
    ranks. ``spare`` takes the memory of partial sums that have been sent.
    """

    def __init__(self, members: Members, collectives: Collectives, compares_values: bool, spare: SpareMemory) -> None:
        self._members = members
        self._collectives = collectives
        self._spare = spare
        self._compares_values = compares_values
        self._agreed = _Agreed(
            (), TravellingBuffers(), ExchangePlan([], [], equal_deal(1, collectives.world), collectives), HEAD_BYTES
        )

    @property
    def buffers(self) -> TravellingBuffers:
        """The buffers that travel with the gradients."""
        return self._agreed.buffers

    def covers(self, members: Members, deal: Deal) -> bool:
        """Return True if the ranks have agreed on a step with this ``deal`` of a module with these ``members``."""
        return deal == self._agreed.deal and members.are(self._members)

    def exchange(self) -> ShareExchange:
        """Return the exchange of a step."""
        return ShareExchange(self._agreed.plan, self._agreed.row_bytes, self._collectives, self._spare)

    def expect(self, buffers: TravellingBuffers, deal: Deal) -> None:
        """Set the buffers and the deal of the next step, which all ranks know."""
        if (deal, buffers) != (self._agreed.deal, self._agreed.buffers):
            self._agreed = self._for_steps_of(deal, buffers)

    def _for_steps_of(self, deal: Deal, buffers: TravellingBuffers) -> _Agreed:
        members = self._members
        averaged = specs_of([members.buffers[number] for number in buffers.averaged])
        plan = ExchangePlan(members.specs, averaged, deal, self._collectives)
        row_bytes = HEAD_BYTES + layout_of(sum(deal), len(members.trained), len(members.buffers)).size
        kept = sum(members.buffers[number].nbytes for number in buffers.kept)
        return _Agreed(deal, buffers, plan, row_bytes + kept)

    @torch.no_grad()
    def renew(self, members: Members, step: ShareStep, heads: Sequence[Head]) -> None:
        """Agree with all ranks on what each has now, after the head of one has said that it has something else.

        Raises on every rank if ranks differ, and then leaves everything as it is. Communicates what
        :func:`check_same_on_all_ranks` and :func:`check_equal_values` do.
        """
        known = {id(parameter) for _, parameter in self._members.parameters}
        new = [number for number, (_, parameter) in enumerate(members.parameters) if id(parameter) not in known]
        lines, what = members.describe(self._members), "the end of a step with shares"
        rows = check_same_on_all_ranks(lines, self._collectives, new, what=what)
        names, ranks = [name for name, _ in members.parameters], self._collectives.global_ranks
        check_new_everywhere(names, rows, ranks)
        for rank, head in zip(ranks, heads, strict=True):
            if not head.differs:
                changed = next(other for other, each in zip(ranks, heads, strict=True) if each.differs)
                raise AgreementError(
                    f"rank {changed} has changed its module between {step} and the step before, and rank {rank} has "
                    "not: the number of shares, or the devices of parameters; make the same change on all ranks"
                )
        if self._compares_values:
            check_equal_values([members.parameters[number] for number in new], self._collectives)
        buffers = self.buffers if members.are(self._members) else TravellingBuffers()
        self._members = members
        self._agreed = self._for_steps_of(step.deal, buffers)

    @torch.no_grad()
    def check_buffers(self, values: Sequence[tuple[str, Tensor]], heads: Sequence[Head]) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if a program has given buffers other values on some rank.

        Communicates what :func:`check_equal_values` does if heads say that a program may have.
        """
        if self._compares_values and any(head.buffers != heads[0].buffers for head in heads):
            check_equal_values(values, self._collectives, "buffer", "was registered or written between steps")
