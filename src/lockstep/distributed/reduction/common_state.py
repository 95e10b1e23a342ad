"""The state that all ranks have alike: parameters, hook, buffers, the plan, its buckets, and where reports travel.

Whatever changes here changes on every rank in the same round: because all have the same report, or because they have
compared what they have.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.devices import is_accelerator
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives, Pending, plain_memory
from lockstep.distributed.reduction.buckets import BucketsInUse
from lockstep.distributed.reduction.buffer_sync import BufferSync
from lockstep.distributed.reduction.comm_hooks import Hook, HookInUse
from lockstep.distributed.reduction.decisions import decisions_of
from lockstep.distributed.reduction.managed_parameters import ManagedParameter
from lockstep.distributed.reduction.parameters import ParameterSet
from lockstep.distributed.reduction.plan import AdaptivePlan, travels_in_half
from lockstep.distributed.reduction.replicated_modules import ReplicatedModules
from lockstep.distributed.reduction.status import Part, Report, ReportLayout, Status
from lockstep.distributed.reduction.values import check_equal_values
from lockstep.distributed.reduction.verdict import Verdict


class CommonState:
    """What the rounds of one module go through."""

    def __init__(
        self,
        members: ParameterSet,
        collectives: Collectives,
        modules: ReplicatedModules[Any],
        buffers: BufferSync,
        caps: Sequence[int],
        half: torch.dtype | None = None,
        *,
        compares_values: bool = True,
    ) -> None:
        """``half``: the half precision in which gradients travel; None for their own dtype; ``compares_values``: those
        of parameters that are put into the module later."""
        self.collectives = collectives
        self.modules = modules
        self.buffers = buffers
        self.decisions = decisions_of(collectives.group)
        self.hook = HookInUse()
        self.members = members
        self.rounds = 0
        """The number of the last round of which anything was sent."""
        self.gradient_divide_factor = float(collectives.world)
        """What sums are divided by: the world size, but where joined ranks do not count."""
        self._caps = tuple(caps)
        self._half = half
        self._compares_values = compares_values
        self.buffer_source_moved = False
        """True if buffers are those of another rank than the first, which had run out of batches."""
        self._before_next_round: list[Callable[[], object]] = []
        self.is_settled = False
        """True if every parameter has a bucket, in a plan that has been made anew after the first round, there are no
        communication hook, and nothing has to be agreed on."""
        self.plan_changes: Counter[str] = Counter()
        """Why buckets were made anew, and how often."""
        self._plan_anew()

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self.members.parameters

    @property
    def is_planned(self) -> bool:
        """True if the plan has been made anew after the first round."""
        return not self.plan.observes

    def _settle(self) -> None:
        has_hook = self.hook.hook is not None or self.hook.has_changed
        self.is_settled = self.plan.is_whole and self.is_planned and self.is_ready and not has_hook

    @property
    def is_ready(self) -> bool:
        """True if nothing has to be agreed on before a bucket may leave."""
        return self.hook.is_agreed and not self._before_next_round

    # ----------------------------------------------------------------------- building what is planned

    def _plan_anew(self) -> None:
        """Make everything that depends on which parameters there are."""
        parameters = self.parameters
        specs, sparse = [each.spec for each in parameters], [each.index for each in parameters if each.sparse]
        self.plan = AdaptivePlan(specs, self.members.trained, sparse, self.members.last, self._caps)
        self._make_buckets()

    def _make_buckets(self) -> None:
        planned, hooked = self.plan.current.buckets, self.hook.hook is not None
        # Hooks would change the report: test_hooks_run_once_for_each_bucket_and_the_report_goes_alone. So would
        # rounding: test_small_buffers_and_the_report_stay_exact.
        shares_bucket = bool(planned) and planned[-1].can_hold_report and not hooked
        shares_bucket = shares_bucket and not travels_in_half(planned[-1].layout.dtype, self._half)
        self.device = self.parameters[0].spec.device if self.parameters else self.collectives.device
        self.is_on_accelerator = is_accelerator(self.device)
        behind = planned[-1].layout.dtype if shares_bucket else None
        self.transport = ReportTransport(len(self.parameters), self.collectives, self.buffers, behind, self.device)
        empty = plain_memory if hooked else self.collectives.empty  # some hooks resize what they are given
        self.buckets = BucketsInUse(self.plan, self.parameters, self.transport.numel, empty, self._half)
        self._settle()

    def adapt(self, verdict: Verdict) -> None:
        """Let the plan follow what the ranks have used. Communicates one broadcast, the first time."""
        if self.plan.observes:
            told = torch.tensor(self.plan.observed_order, dtype=torch.int64, device=self.collectives.device)
            self.collectives.broadcast(told, "order of gradients").wait()
            self.plan.rebuild(index for index in told.tolist() if verdict.uses(index))
            self.plan_changes["the order of gradients is known"] += 1
        elif self.plan.adapt(verdict.late):
            self.plan_changes["gradients came that no bucket waited for"] += 1
        else:
            return
        self._make_buckets()

    def set_buffer_source(self, active: Sequence[int] | None) -> None:
        """Buffers of the round that opens are those of the ``active`` ranks of the group; None: of all."""
        if active is not None or self.buffer_source_moved:  # else ``join()`` may have chosen others
            self.buffers.set_active(active)
            self.buffer_source_moved = active is not None

    def count_round(self, number: int) -> None:
        """Note that the round of that number is over, and other ranks may have had something of it."""
        self.rounds = number

    def restore(self, rounds: int, plan: str) -> None:
        """Go on where an earlier run was, after so many rounds and with its plan; all ranks must."""
        self.rounds = rounds
        before = self.plan.current
        self.plan.restore(plan)
        if self.plan.current != before:
            self._make_buckets()
            self.do_before_next_round(lambda: check_same_on_all_ranks([Line("plan", plan)], self.collectives))

    def register_hook(self, hook: Hook) -> None:
        """Use a communication hook; the report travels on its own from now on.

        After the first round, it takes part when all ranks have it: that is agreed on at the end of the next one.
        """
        if self.hook.register(hook):
            self._make_buckets()
        self._settle()

    def set_participants(self, ranks: Sequence[int], divide_by: float) -> None:
        """Inside ``join()``: which ranks have batches. The first one's buffers count; sums are divided by
        ``divide_by``."""
        self.buffers.set_active(ranks)
        self.gradient_divide_factor = float(divide_by)

    # ------------------------------------------------------------------------------ agreeing with all ranks

    def do_before_next_round(self, call: Callable[[], object]) -> None:
        """Call ``call``, which may communicate, before anything of the next round is sent, once."""
        self._before_next_round.append(call)
        self._settle()

    def get_ready(self) -> None:
        """Do what has to be done before anything of a round is sent. What fails here fails on every rank, and leaves
        nothing to send.

        Ranks wait for each other here, so this is done at the end of backward: until then they may go through several
        modules in orders of their own.
        """
        while self._before_next_round:
            self._before_next_round[0]()
            del self._before_next_round[0]
        if not self.hook.is_agreed:
            self.hook.agree(self.collectives)
        self._settle()

    def look_for_retyped(self) -> bool:
        """Look for parameters that have become others on this rank, which have no gradient in buckets; return True if
        there are others than before."""
        found = self.members.look_for_retyped()
        if found:
            self._make_buckets()
        return found

    def differs(self) -> bool:
        """Return True if this rank has another hook or other buffers than were agreed on."""
        return self.hook.has_changed or self.buffers.changed()

    def agree_anew(self) -> list[ManagedParameter]:
        """Agree with all ranks on the hook and parameters; returns the new ones that any rank has a gradient of."""
        self.hook.agree(self.collectives)
        self._settle()
        proposal = self.members.compare(self.collectives)
        if self._compares_values:
            check_equal_values([(each.name, each.parameter) for each in proposal.new], self.collectives)
        self.members.accept(proposal)
        return proposal.with_gradient

    def renew(self) -> bool:
        """Go on with the parameters, hook and buffers that all ranks have now; return True if the parameters are
        others than before."""
        is_new = self.members.take_over()
        if is_new:
            self._plan_anew()
            self.plan_changes["the module has changed"] += 1
        self.buffers.renew()
        self._make_buckets()
        return is_new


_OWN_DTYPE = torch.float32


class ReportTransport:
    """Writes, sends and reads the reports of one module, as long as its buckets stay the same.

    On the CPU a report follows the gradients of the last bucket, or travels on its own if that bucket cannot carry it.
    On an accelerator the statuses, which only the host knows, go over the group's companion, so that the
    end of backward waits for the other hosts but never for the device; only small buffers follow the last bucket there.
    """

    def __init__(
        self,
        parameters: int,
        collectives: Collectives,
        buffers: BufferSync,
        behind: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """Lay out the report: on ``device``, behind gradients of dtype ``behind``, or on its own if that is None."""
        dtype = behind or _OWN_DTYPE
        packed = buffers.plan_packing(dtype)
        self._collectives = collectives
        self._buffers = buffers
        self.splits = device.type != "cpu" and collectives.device.type == "cpu"
        """True if small buffers follow the last bucket, and the statuses travel on their own."""
        self.has_buffers = packed > 0
        row_dtype = _OWN_DTYPE if self.splits else dtype
        in_row = 0 if self.splits else packed
        self._layout = ReportLayout(parameters, collectives.rank, collectives.world, in_row, row_dtype)
        self._packed = slice(0, packed) if self.splits else self._layout.packed_buffers
        self.numel = (packed if self.splits else self._layout.numel) if behind is not None else 0
        """The number of elements that follow the gradients of the last bucket."""
        travels_alone = self.splits or behind is None
        row_device = torch.device("cpu") if self.splits else device
        self.own_row = torch.zeros(self._layout.numel, dtype=row_dtype, device=row_device) if travels_alone else None
        """The part of the report that travels on its own at the end of the round, or None."""
        own_buffers = self.splits and behind is None and self.has_buffers
        self.own_buffers = torch.zeros(packed, dtype=dtype, device=device) if own_buffers else None
        """Small buffers, if they travel on their own, before :attr:`own_row`."""

    def write(self, row: Tensor, used: bytearray, late: list[int], status: Status) -> None:
        """Write this rank's report, and its buffers if they are in the same row."""
        self._layout.write(row, used, late, status)
        if self._layout.has_buffers:
            self.write_buffers(row[self._packed], status)

    def write_buffers(self, place: Tensor, status: Status) -> None:
        """Write this rank's small buffers; zeros if its status says that the module has changed."""
        place.zero_()
        if not status.changed:
            try:
                self._buffers.write(place)
            except Exception:
                if status.part not in (Part.FAILED, Part.SKIPS):
                    raise  # this rank's part fails, and the others are told; a failed or skipped batch sends zeros

    def send(self, row: Tensor, what: str, blocking: bool) -> Pending:
        """Start to sum the row that travels on its own; ``blocking``: the caller waits for it next."""
        return self._collectives.all_reduce(row, what, blocking=blocking)

    def read(self, row: Tensor) -> Report:
        """Return the reports of all ranks."""
        return self._layout.read(row[: self._layout.packed_buffers.start] if self._layout.has_buffers else row)

    def read_aborted(self, row: Tensor | None) -> Report | None:
        """Return the reports of a round aborted on this rank; None if it sent none, or with another layout."""
        return None if row is None or row.numel() != self._layout.numel else self.read(row)

    def take_buffers(self, row: Tensor) -> None:
        """Assign the small buffers received in ``row``, the one behind the last bucket, or in :attr:`own_buffers`."""
        place = row if self.own_buffers is None else self.own_buffers
        self._buffers.read(place[self._packed])
