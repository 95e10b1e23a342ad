"""The state that all ranks have alike: parameters, hook, buffers, the plan, its buckets, and where reports travel.

Whatever changes here changes on every rank in the same round: because all have the same report, or because they have
compared what they have.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep._base.devices import is_accelerator
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives, plain_memory
from lockstep.distributed.reduction.buckets.comm_hooks import Hook, HookInUse
from lockstep.distributed.reduction.buckets.gradient_buckets import BucketsInUse
from lockstep.distributed.reduction.buckets.plan import AdaptivePlan, travels_in_half
from lockstep.distributed.reduction.module.buffer_sync import BufferSync
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.equal_values import check_equal_values
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter
from lockstep.distributed.reduction.module.parameters import ParameterSet
from lockstep.distributed.reduction.replicated_modules import ReplicatedModules
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.distributed.reduction.report.verdict import Verdict
from lockstep.distributed.reduction.report_transport import ReportTransport


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
        """``half``: the half precision in which gradients travel; None for their own dtype; ``compares_values``:
        replicas are to be alike."""
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
        # True if buffers are those of another rank than the first, which had run out of batches.
        self._buffer_source_moved = False
        self._before_next_round: list[Callable[[], object]] = []
        self.drift = DriftWatch(
            lambda: [(each.name, each.parameter) for each in members.parameters], collectives, compares=compares_values
        )
        """Compares what optimizers leave."""
        self._has_warned = False
        self.plan_changes: Counter[str] = Counter()
        """Why buckets were made anew, and how often."""
        self._plan_anew()

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self.members.parameters

    def warn_once(self, message: str) -> None:
        """Warn of what may be wrong with this module's rounds, as all ranks do."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=2)

    @property
    def is_planned(self) -> bool:
        """True if the plan has been made anew after the first round."""
        return not self.plan.observes

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
        self.make_buckets()

    def make_buckets(self) -> None:
        """Make the buckets and the report's layout anew, for what is planned and agreed on now."""
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
        self.drift.parameters_changed()

    def adapt(self, verdict: Verdict) -> None:
        """Let the plan follow what the ranks have used. Communicates one broadcast, the first time."""
        if self.plan.observes:
            order = torch.tensor(self.plan.observed_order, dtype=torch.int64, device=self.collectives.device)
            self.collectives.broadcast(order, "order of gradients").wait()
            self.plan.rebuild(index for index in order.tolist() if verdict.uses(index))
            self.plan_changes["the order of gradients is known"] += 1
        elif self.plan.adapt(verdict.late):
            self.plan_changes["gradients came that no bucket waited for"] += 1
        else:
            return
        self.make_buckets()

    def begin_round(self, active: Sequence[int] | None) -> bool:
        """Begin a round with the buffers of the ``active`` ranks of the group, of all if None; return True if this rank
        has another hook or other buffers than were agreed on."""
        if active is not None or self._buffer_source_moved:  # else ``join()`` may have chosen others
            self.buffers.set_active(active)
            self._buffer_source_moved = active is not None
        return self.hook.has_changed or self.buffers.changed()

    def restore(self, rounds: int, plan: str) -> None:
        """Go on where an earlier run was, after so many rounds and with its plan; all ranks must."""
        self.rounds = self.drift.round = rounds
        before = self.plan.current
        self.plan.restore(plan)
        if self.plan.current != before:
            self.make_buckets()
            self.do_before_next_round(lambda: check_same_on_all_ranks([Line("plan", plan)], self.collectives))

    def register_hook(self, hook: Hook) -> None:
        """Use a communication hook; the report travels on its own from now on.

        After the first round, it takes part when all ranks have it: that is agreed on at the end of the next one.
        """
        if self.hook.register(hook):
            self.make_buckets()
        self.drift.is_alike = self.hook.gives_the_same

    def set_participants(self, ranks: Sequence[int], divide_by: float) -> None:
        """Inside ``join()``: which ranks have batches. The first one's buffers count; sums are divided by
        ``divide_by``."""
        self.buffers.set_active(ranks)
        self.gradient_divide_factor = float(divide_by)

    # ------------------------------------------------------------------------------ agreeing with all ranks

    def do_before_next_round(self, call: Callable[[], object]) -> None:
        """Call ``call``, which may communicate, before anything of the next round is sent, once."""
        self._before_next_round.append(call)

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
            self._agree_on_hook()

    def _agree_on_hook(self) -> None:
        self.hook.agree(self.collectives)
        self.drift.is_alike = self.hook.gives_the_same

    def agree_anew(self) -> list[ManagedParameter]:
        """Agree with all ranks on the hook and parameters; returns the new ones that any rank has a gradient of."""
        self._agree_on_hook()
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
        self.make_buckets()
        return is_new
