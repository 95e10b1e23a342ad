"""Buckets: gradients are taken from their parameters, sent as one tensor, and copied out again.

A gradient lives in its bucket. Between rounds ``parameter.grad`` is a view of the bucket's flat tensor, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in; a gradient that
autograd has allocated, after ``zero_grad()``, is copied in once. While a bucket is being sent its parameters have no
gradient, so that a late one cannot be added to memory that is being sent.

A :class:`FlatBucket` has many gradients, side by side. They are copied in together when all have come. A large
gradient (:class:`SingleBucket`) and a sparse one (:class:`SparseBucket`) are reduced where autograd has put them.
"""

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep._base.buckets import plan_buckets
from lockstep._base.devices import is_accelerator
from lockstep._base.dtensors import is_dtensor, like_parameter, local_part
from lockstep._base.inner_tensors import is_plain
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.rows import SumOfRows
from lockstep.distributed.reduction.autograd.gradients import Empty, GradientMemory, GradientSnapshot
from lockstep.distributed.reduction.buckets.plan import AdaptivePlan, Kind, PlannedBucket, travels_in_half
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter
from lockstep.errors import PeerError

_dtype_of, _device_of, _grad_of = attrgetter("dtype"), attrgetter("device"), attrgetter("grad")


NO_ROW = torch.empty(0, device="cpu")


def set_grads(parameters: Iterable[Parameter], grads: Iterable[Tensor | None]) -> None:
    """Assign the gradients of parameters, in a loop in C: every step does it for each parameter."""
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)


class CopiedIn(NamedTuple):
    """What a bucket has taken from its parameters."""

    flat: Tensor
    """What is to be summed."""
    factor: float = 1.0
    """The factor by which it is to be multiplied before the sum."""
    undefined: Sequence[int] = ()
    """Parameters, by number, that have no gradient, whether or not their hooks have run."""
    row: Tensor = NO_ROW
    """The elements behind the gradients that carry the report; empty if this bucket does not carry it."""


class GradientBucket(ABC):
    """One bucket of the plan, in use; subclasses differ in where the gradients lie while they are sent."""

    def __init__(
        self,
        index: int,
        planned: PlannedBucket,
        members: Sequence[ManagedParameter],
        waits: bool,
        half: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.planned = planned
        self.half = half
        """The half precision in which the gradients travel; None for their own dtype."""
        self.members = list(members)
        self.waits_for_end = waits
        """True if it is launched only after backward."""
        self._parameters = [member.parameter for member in members]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._devices = [parameter.device for parameter in self._parameters] if torch.accelerator.is_available() else ()
        self.has_stream = is_accelerator(planned.layout.device)
        """True if its gradients are accumulated on streams: it is on an accelerator."""
        self._stream: torch.Stream | None = None  # the one of all gradients, once it is known
        self.is_full = False
        """True if it was noticed, while backward runs, that all gradients have come."""
        self._scale = 1.0
        self._reduces_copies = False
        self._unused: list[tuple[ManagedParameter, Tensor, Tensor | None]] = []

    def _check_unchanged(self) -> None:
        """Raise :class:`LayoutError` if a parameter has another dtype or device than planned. Later only this rank
        would notice that the gradient does not fit, and could not tell the others any more."""
        parameters = self._parameters
        moved = self._devices and list(map(_device_of, parameters)) != self._devices
        if moved or list(map(_dtype_of, parameters)) != self._dtypes:
            for member in self.members:
                member.check_parameter()

    @property
    def has_gradients(self) -> bool:
        """Return True if any of its parameters has a gradient now."""
        return any(map(is_not, map(_grad_of, self._parameters), repeat(None)))

    def open(self, scale: float) -> None:
        """Begin a round, in which gradients are multiplied by ``scale`` before they are summed, except those that
        travel in half precision: they are divided after they have been summed (``comm/half_precision.py``)."""
        self._scale = scale if self.half is None else 1.0
        self._unused.clear()
        self._reduces_copies = False
        self.is_full = False

    def has_given(self, grads: Sequence[Tensor | None]) -> bool:
        """Return True if ``grads``, those of all parameters by number, are those that this bucket has given them in its
        own memory."""
        return False

    def reduce_copies(self) -> None:
        """Reduce copies of this round's gradients, because the program keeps a gradient: after a failure, messages
        could still be written into its memory."""
        self._reduces_copies = True

    def note_gradients(self, snapshot: GradientSnapshot) -> int | None:
        """Note that the bucket is full if all gradients have come since the ``snapshot``; else return the parameter, by
        number, that is expected last of those without one."""
        missing = snapshot.missing(self.planned.indices, list(map(_grad_of, self._parameters)))
        self.is_full = not missing
        return missing[-1] if missing else None

    def is_on_current_stream(self) -> bool:
        """Return True if the current stream is the one on which autograd accumulates all of its gradients: only there
        may they be taken before the pass has ended."""
        if self._stream is None:
            first = self.members[0].stream
            if first is None or any(member.stream != first for member in self.members):
                return False
            self._stream = first
        return bool(torch.accelerator.current_stream(self._stream.device) == self._stream)

    @abstractmethod
    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """Take the gradients from the parameters.

        ``used``: for each parameter, True if it has got a gradient since the last round; None: all have. The ``.grad``
        of the others is reduced, too, but they get it back unchanged if no other rank has used the parameter either.
        """

    @abstractmethod
    def accept(self, summed: Tensor) -> None:
        """Set the tensor that :meth:`copy_in` returned to the result of a communication hook."""

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply all reduced gradients."""

    def copy_out(self, used: Sequence[bool] | None) -> None:
        """Give the parameters their reduced gradients; a parameter that no rank used gets back its earlier ``.grad``.

        ``used``: for each parameter, True if any rank has used it; None: all have been used.
        """
        for position, member in enumerate(self.members):
            if used is None or used[member.index]:
                member.parameter.grad = self._gradient(position)
        for member, grad, values in self._unused:
            if not (used is None or used[member.index]):
                if values is not None:
                    local_part(grad).copy_(values)
                member.parameter.grad = grad
        self._unused.clear()

    @abstractmethod
    def _gradient(self, position: int) -> Tensor:
        """Return the reduced gradient of the parameter at that position."""

    def _keep_unused(self, member: ManagedParameter, grad: Tensor, inside: bool) -> None:
        """Keep the gradient of a parameter that this rank did not use, in case no rank did."""
        # The gradient of another rank would not fit, and it is too late to tell the others then:
        # test_a_layer_that_changes_on_a_rank_that_does_not_use_it.
        member.check_parameter()
        self._unused.append((member, grad, local_part(grad).clone() if inside else None))

    def zeros(self) -> CopiedIn:
        """Return what is sent in place of what :meth:`copy_in` returns, without any gradient."""
        return CopiedIn(self.members[0].zeros().flatten())


class SingleBucket(GradientBucket):
    """One large gradient, reduced where it is."""

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        self._check_unchanged()
        (member,) = self.members
        (slot,) = self.planned.layout.slots
        grad = member.parameter.grad
        if grad is None:
            member.check_parameter()
            taken = member.zeros()
        else:
            taken = member.take(grad)
            is_unused = used is not None and not used[member.index]
            if is_unused:
                self._keep_unused(member, grad, inside=False)
            is_other = grad.requires_grad or taken.is_sparse or taken.stride() != slot.stride
            if self._reduces_copies or is_unused or is_other:
                taken = member.zeros().copy_(taken.to_dense() if taken.is_sparse else taken)
            elif not is_dtensor(grad):
                taken = grad  # the parameter gets back the same tensor
        self._result = taken
        member.parameter.grad = None
        return CopiedIn(flattened(taken), self._scale, _undefined(member, grad))

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(flattened(self._result), summed)

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._result.mul_(factor)

    def copy_out(self, used: Sequence[bool] | None) -> None:
        """See :meth:`GradientBucket.copy_out`; the bucket no longer refers to the gradient."""
        super().copy_out(used)
        del self._result

    def _gradient(self, position: int) -> Tensor:
        return like_parameter(self._result, self.members[0].parameter)


class SparseBucket(GradientBucket):
    """One sparse gradient; ranks may have different rows."""

    is_dense = False
    """True if the gradient is dense this time, since a dense one was added to it; a hook gets it as a sparse one."""

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        (member,) = self.members
        member.check_parameter()
        grad = member.parameter.grad
        taken = member.zeros() if grad is None else member.take(grad)
        if grad is not None and used is not None and not used[member.index]:
            self._keep_unused(member, grad, inside=False)
        member.parameter.grad = None
        self.is_dense, self._result = not taken.is_sparse, with_rows(taken) * self._scale
        return CopiedIn(self._result, 1.0, _undefined(member, grad))

    def zeros(self) -> CopiedIn:
        """See :meth:`GradientBucket.zeros`."""
        return CopiedIn(self.members[0].zeros())

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        self._result = summed

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._result = self._result * factor

    def copy_out(self, used: Sequence[bool] | None) -> None:
        """See :meth:`GradientBucket.copy_out`; the bucket no longer refers to the gradient."""
        super().copy_out(used)
        del self._result

    def _gradient(self, position: int) -> Tensor:
        return self._result


def with_rows(grad: Tensor) -> Tensor:
    """Return a gradient as a coalesced one with a single sparse dimension."""
    rows = grad.is_sparse and grad.sparse_dim() == 1
    return (grad if rows else grad.to_dense().to_sparse(1)).coalesce()


def _undefined(member: ManagedParameter, grad: Tensor | None) -> Sequence[int]:
    """See :attr:`CopiedIn.undefined`, of a bucket with one parameter."""
    return (member.index,) if grad is None else ()


def flattened(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def accept_into(gradients: Tensor, summed: Tensor) -> None:
    """Copy what a hook returned, unless it is what it was given."""
    if summed.data_ptr() != gradients.data_ptr() or summed.dtype != gradients.dtype:
        gradients.copy_(summed.view_as(gradients))


class FlatBucket(GradientBucket):
    """Gradients that live side by side in one flat tensor."""

    def __init__(
        self,
        index: int,
        planned: PlannedBucket,
        members: Sequence[ManagedParameter],
        waits: bool,
        extra: int,
        empty: Empty,
        half: torch.dtype | None,
    ) -> None:
        """``extra`` elements behind the gradients are for the report; ``empty`` gives the memory."""
        self._plain = all(is_plain(member.parameter) for member in members)
        super().__init__(index, planned, members, waits, half)
        self._extra = extra
        self._indices = planned.indices
        self._memory = GradientMemory(planned.layout, self._parameters, extra, empty)

    @property
    def storage(self) -> int:
        """The number of the storage that the bucket has at present."""
        return int(self._memory.now.flat.untyped_storage()._cdata)

    def has_given(self, grads: Sequence[Tensor | None]) -> bool:
        """See :meth:`GradientBucket.has_given`."""
        given = self._memory.now.grads
        return bool(given) and all(map(operator.is_, map(grads.__getitem__, self._indices), given))

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`; the report's row, behind the gradients, is not scaled."""
        self._check_unchanged()
        grads: list[Tensor | None] = list(map(_grad_of, self._parameters))
        memory = self._memory
        inside = memory.claim(grads)
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._keep_all_unused(grads, inside, used)
        set_grads(self._parameters, repeat(None))
        undefined: list[int] = []
        if True not in inside and type(None) not in map(type, grads):
            self._copy(memory.now.views, grads, range(len(grads)))  # type: ignore[arg-type]  # None is not among them
        else:
            undefined = self._copy_some(grads, inside, range(len(grads)))
        factor = self._scale
        if self._extra and factor != 1:  # the report is not to be scaled
            memory.now.gradients.mul_(factor)
            factor = 1.0
        return CopiedIn(memory.now.flat, factor, undefined, memory.now.row)

    def _copy_some(self, grads: Sequence[Tensor | None], inside: Sequence[bool], positions: Sequence[int]) -> list[int]:
        """Copy the gradients at ``positions``, unless they are in place already, and clear the places of missing ones;
        return the numbers of the parameters that have no gradient."""
        views = self._memory.now.views
        given = [(i, grad) for i in positions if (grad := grads[i]) is not None and not inside[i]]
        self._copy([views[i] for i, _ in given], [grad for _, grad in given], [i for i, _ in given])
        empty = [i for i in positions if grads[i] is None]
        if empty:
            for i in empty:
                # Without a gradient nothing else shows it: test_a_layer_that_changes_on_a_rank_that_does_not_use_it.
                self.members[i].check_parameter()
            torch._foreach_zero_([views[i] for i in empty])
        return [self._indices[i] for i in empty]

    def _copy(self, views: list[Tensor], grads: list[Tensor], positions: Sequence[int]) -> None:
        """Copy gradients into their views; raise if one is sparse or has another shape than planned."""
        if not grads:
            return
        if self._plain:
            try:
                torch._foreach_copy_(views, grads)
                return
            except RuntimeError:  # a sparse gradient, or one of another shape
                pass
        taken = [self.members[i].take(grad) for i, grad in zip(positions, grads, strict=True)]
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in taken])

    def _keep_all_unused(self, grads: Sequence[Tensor | None], inside: Sequence[bool], used: Sequence[int]) -> None:
        for member, grad, is_inside in zip(self.members, grads, inside, strict=True):
            if grad is not None and not used[member.index]:
                self._keep_unused(member, grad, is_inside)

    def zeros(self) -> CopiedIn:
        """See :meth:`GradientBucket.zeros`."""
        flat = self._memory.zeros()
        return CopiedIn(flat, row=flat[self.planned.layout.numel :])

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(self._memory.now.gradients, summed)

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._memory.now.gradients.mul_(factor)

    def copy_out(self, used: Sequence[bool] | None) -> None:
        """See :meth:`GradientBucket.copy_out`."""
        if used is not None and not all(map(used.__getitem__, self._indices)):
            super().copy_out(used)
        else:
            try:
                set_grads(self._parameters, self._memory.now.grads)
            except RuntimeError:
                for member in self.members:
                    member.check(member.parameter)
                raise
            self._unused.clear()
        if not self._memory.is_kept:
            self._memory.release()

    def _gradient(self, position: int) -> Tensor:
        return self._memory.now.grads[position]


class BucketsInUse:
    """The buckets of a plan, in launch order and by parameter."""

    def __init__(
        self,
        plan: AdaptivePlan,
        parameters: Sequence[ManagedParameter],
        report_numel: int,
        empty: Empty,
        half: torch.dtype | None = None,
    ) -> None:
        """Make the buckets of ``plan``.

        ``report_numel``: elements that the report takes behind the last bucket; 0 if it travels on its own; ``half``:
        the half precision in which float32 gradients travel, or None.
        """
        planned = plan.current.buckets
        self.in_order: list[GradientBucket] = []
        """All buckets, in launch order."""
        self.of: list[GradientBucket | None] = [None] * len(parameters)
        """The bucket of each parameter; None for a parameter without one."""
        for number, each in enumerate(planned):
            extra = report_numel if number == len(planned) - 1 else 0
            members = [parameters[index] for index in each.indices]
            waits = bool(extra) or plan.waits_for_end(each)
            bucket = make_bucket(number, each, members, waits, extra, empty, half)
            self.in_order.append(bucket)
            for index in each.indices:
                self.of[index] = bucket
        waiting = (number for number, bucket in enumerate(self.in_order) if bucket.waits_for_end)
        self.early = next(waiting, len(self.in_order))
        """The number of buckets before the first one that waits for the end of backward."""
        self.labels = [f"bucket {number + 1} of {len(planned)}" for number in range(len(planned))]
        """The name of each bucket in messages and profiles."""
        self.report_bucket = self.in_order[-1] if report_numel else None
        """The bucket that carries the report behind its gradients, or None."""
        self.unbucketed = [index for index, bucket in enumerate(self.of) if bucket is None]
        """The parameters that have no bucket."""
        self.all_used = bytes((1,)) * len(parameters)
        """One byte for each parameter, all set: compared with the flags of used parameters."""

    def not_given(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the numbers of parameters whose gradients, of ``grads``, may not be those that their bucket has given
        them."""
        others = [*self.unbucketed, *range(len(self.of), len(grads))]
        for bucket in self.in_order:
            if not bucket.has_given(grads):
                others += bucket.planned.indices
        return others

    def storages(self) -> set[int]:
        """Return the numbers of the storages that the buckets have at present."""
        return {bucket.storage for bucket in self.in_order if isinstance(bucket, FlatBucket)}


def make_bucket(
    index: int,
    planned: PlannedBucket,
    members: Sequence[ManagedParameter],
    waits: bool,
    extra: int,
    empty: Empty,
    half: torch.dtype | None = None,
) -> GradientBucket:
    """Return the bucket in use for a planned one.

    ``waits``: it is launched only after backward; ``extra``: elements behind the gradients that carry the report;
    ``empty``: allocates the memory of a flat bucket; ``half``: the half precision in which float32 gradients travel, or
    None.
    """
    if planned.kind is Kind.SPARSE:
        return SparseBucket(index, planned, members, waits)
    half = half if travels_in_half(planned.layout.dtype, half) else None
    if planned.kind is Kind.SINGLE:
        return SingleBucket(index, planned, members, waits, half)
    return FlatBucket(index, planned, members, waits, extra, empty, half)


# ------------------------------------------- gradients that missed their bucket, or have none


class LateGradient:
    """A reduced gradient, to be added to the one from the parameter's bucket, if it has one."""

    def __init__(self, member: ManagedParameter, value: Tensor) -> None:
        self._member = member
        self.value = value

    def accept(self, summed: Tensor) -> None:
        """Take the sum over the ranks in place of this rank's value."""
        self.value = summed

    def copy_out(self, factor: float) -> None:
        """Add it, times ``factor``, to the parameter's ``.grad``."""
        parameter, value = self._member.parameter, self.value
        grad = like_parameter(value.mul_(factor) if factor != 1 else value, parameter)
        if parameter.grad is None:
            parameter.grad = grad
        elif parameter.grad.is_sparse and not grad.is_sparse:
            parameter.grad = grad.add_(parameter.grad)
        else:
            parameter.grad.add_(grad)


def reduce_late(members: Sequence[ManagedParameter], collectives: Collectives, divisor: float) -> list[LateGradient]:
    """Take these parameters' gradients away and return their means over the ranks; a missing gradient counts as zero.

    Every rank passes the same parameters. Communicates one all-reduce of a flag for each rank, then one all-reduce for
    each dtype and device, and the rows of each sparse gradient. If a rank cannot put its gradients together, it raises
    its own error, and the others raise :class:`PeerError`.
    """
    grads = {}
    for member in members:
        grad = member.parameter.grad
        if grad is not None:
            grads[id(member.parameter)] = grad
            member.parameter.grad = None
    flats: list[Tensor] = []
    results: list[LateGradient] = []
    rows: list[tuple[Tensor, bool, str, Callable[[Tensor], object]]] = []
    failure: Exception | None = None
    try:
        for member in members:
            # Check parameters without a gradient as well, since they get one:
            # test_a_frozen_layer_that_is_retyped_on_one_rank_and_trained_on_another.
            member.check_parameter()
        for flat, parts in _dense(members, grads):
            flats.append(flat.div_(divisor))
            results += parts
        for member in members:
            if member.sparse:
                late = grads.get(id(member.parameter))
                value = member.zeros() if late is None else member.take(late)
                results.append(LateGradient(member, with_rows(value) / divisor))
                name = f"late gradient of {member.name}"
                rows.append((results[-1].value, not value.is_sparse, name, results[-1].accept))
    except Exception as error:
        failure = error
    _check_all(failure, collectives)
    for flat in flats:
        collectives.all_reduce(flat, "late gradients").wait()
    for each in rows:
        both = SumOfRows(collectives, *each)
        both.wait()
        both.gather()
        both.finish()
    return results


def _dense(
    members: Sequence[ManagedParameter], grads: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, list[LateGradient]]]:
    """Yield one flat tensor of gradients for each dtype and device, and the late gradients that are views of it."""
    dense = [member for member in members if not member.sparse]
    for bucket in plan_buckets([member.spec for member in dense]).buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        # .data gives each view its own version counter, which views otherwise share: see gradients.py.
        parts = [
            LateGradient(dense[slot.index], view.data)
            for slot, view in zip(bucket.slots, bucket.views(flat), strict=True)
        ]
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            member = dense[slot.index]
            grad = grads.get(id(member.parameter))
            if grad is not None:
                taken = member.take(grad)
                view.copy_(taken.to_dense() if taken.is_sparse else taken)
        yield flat, parts


def _check_all(failure: Exception | None, collectives: Collectives) -> None:
    """Raise on every rank if any rank has a failure."""
    own = [0, 0] if failure is None else [1, collectives.rank]
    failed = torch.tensor(own, dtype=torch.int64).to(collectives.device)
    collectives.all_reduce(failed, "whether each rank has its late gradients").wait()
    if failure is not None:
        raise failure
    count, numbers = failed.tolist()
    if count:
        where = f"rank {collectives.global_ranks[numbers]}" if count == 1 else f"each of {count} ranks"
        raise PeerError(
            f"rank {collectives.global_rank}: {where} could not put together its late gradients; the error "
            "there says why. No gradient has been handed out; every rank can go on with the next batch after "
            "zero_grad()"
        )
