"""``gather_rows()``: the rows of all ranks on each of them, differentiable, for losses that compare rows."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from lockstep._base.compiler import outside_compiler
from lockstep._base.dtensors import local_part
from lockstep._base.inner_tensors import as_bytes, is_plain
from lockstep._base.tree import Tree
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import state_of
from lockstep.distributed.comm.groups import resolve_group
from lockstep.distributed.reduction.autograd.engine import current_pass
from lockstep.distributed.reduction.autograd.graph import MeanInPass
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import find_replication, replication_of
from lockstep.errors import AgreementError, OptionError, PeerError
from lockstep.loop.mean_over_ranks import lead_to, numbers_behind, padding_ranks
from lockstep.phases import Phases

_ROWS = "rows of all ranks, gather_rows()"


class GatheredRows(NamedTuple):
    """What :func:`gather_rows` returns."""

    rows: Any
    """A value like the one given, whose tensors have the rows of all ranks, in the order of the ranks."""
    own: slice
    """Which of these rows are this rank's."""


@outside_compiler
def gather_rows(value: Any, module: Module) -> GatheredRows:
    """Return the rows of all ranks, for a loss that compares rows of the whole batch; differentiable.

    Backward sums the gradients of all ranks for this rank's rows. So the gradients of a replicated module, which are
    means over the ranks, are those of one process with all rows, in both of these cases: each rank computes the whole
    loss; or each rank computes the part of its own rows, if the mean of the ranks' parts is the whole loss (with
    different numbers of rows: the sum over its own rows, times ranks, divided by all rows).

    A rank at a padding batch of :func:`lockstep.batches` has none of these rows: ``own`` is empty there, and gradients
    of its loss are dropped. So let a loss take its own rows from the result (``rows[own]``), and the number of ranks
    from ``len(gather_rows(torch.ones(1), module).rows)``.

    ``torch.autograd.grad`` takes no mean over the ranks: the gradient with respect to inputs, of a loss that each rank
    computes whole, is that of one process times the number of ranks. Divide it by that, as the recipe for gradient
    penalties in docs/whole_batch.md does.

    Args:
        value: A tensor, or nested tensors, whose first dimension counts rows: the same number in all of them. It may
            differ between ranks, and be 0. Everything else (dtypes, other dimensions, structure) is the same on every
            rank. Leaves that are not tensors stay as they are.
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`; its ranks take
            part. In one process without other ranks it may be any module.

    Returns:
        ``(rows, own)``: a value like the one given, and the slice of its rows that are this rank's, for labels. On one
        rank they are the value itself, and all rows. Tensors that need no gradient on any rank have no graph.

    Communicates one small all-reduce, which compares shapes and numbers of rows, a small all-gather of these if they
    differ, and one all-gather of the rows, padded to the longest. Each backward through the rows takes one all-to-all,
    so every rank must run it equally often; the gradient is differentiable again. Every rank must call this function
    equally often, too.

    Raises:
        AgreementError: Dtypes, shapes or structure differ between ranks. Raised on every rank.
        OptionError: A tensor has no rows, or another number than the first; tensors are on several devices, or are of a
            class of their own; there is none; or the module is replicated with shares, where each share is computed
            before the rows of the others are known.
        PeerError: A backward pass through the rows has failed on another rank (raised by that pass).
        NotReplicableError: There are several ranks, and the module is not replicated.
        CommunicationError: A rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(4, 2), process_group=group)
        >>> features, own = lockstep.loop.gather_rows(model(torch.ones(3, 4)), model)
        >>> features.shape, own
        (torch.Size([3, 2]), slice(0, 3, None))

    Stands for: ``torch.distributed.nn.functional.all_gather`` and ``torch.cat``, for which all ranks need equally many
    rows, and whose callers choose the factor of the gradient.
    """
    tree = Tree(value, "value")
    tensors = [(leaf.path, leaf.value) for leaf in tree.leaves if isinstance(leaf.value, Tensor)]
    collectives = _collectives_of(module)
    if collectives is None:
        _check(tensors)
        return GatheredRows(value, slice(0, len(tensors[0][1])))
    whole, own = _gather([path for path, _ in tensors], [tensor for _, tensor in tensors], collectives)
    found = iter(whole)
    rows = tree.build([next(found) if isinstance(leaf.value, Tensor) else leaf.value for leaf in tree.leaves])
    return GatheredRows(rows, own)


def _collectives_of(module: Module) -> Collectives | None:
    """Return the collectives of a module's ranks; None if there is only this one."""
    replication = find_replication(module)
    if replication is None:
        group = resolve_group(None)
        if group is None or group.size() == 1:
            return None
        replication = replication_of(module, "gather_rows")  # raises
    if not isinstance(replication, ReducerReplication):
        raise OptionError(
            "gather_rows() got a module that is replicated with shares: each share runs its backward before the rows "
            "of the other shares are known. Replicate it without shares= for a loss that compares rows of the whole "
            "batch"
        )
    group = replication.group if replication.group is not None else resolve_group(None)
    return None if group is None or group.size() == 1 else Collectives(group, Phases())


def _check(tensors: Sequence[tuple[str, Tensor]]) -> None:
    if not tensors:
        raise OptionError("gather_rows() got no tensor; give it a tensor, or nested tensors, with the rows first")
    first, like = tensors[0]
    for path, tensor in tensors:
        if tensor.dim() == 0:
            raise OptionError(f"gather_rows() got {path} without dimensions; expected a tensor with the rows first")
        if len(tensor) != len(like):
            raise OptionError(
                f"gather_rows() got {len(like)} rows in {first} and {len(tensor)} in {path}; give tensors with the "
                "same rows"
            )
        if tensor.device != like.device:
            raise OptionError(
                f"gather_rows() got {first} on {like.device} and {path} on {tensor.device}; move them to one device"
            )
        if tensor.layout != torch.strided or not is_plain(tensor) or local_part(tensor) is not tensor:
            raise OptionError(
                f"gather_rows() got {path}, a {type(tensor).__name__} of layout {tensor.layout}; expected a dense, "
                "plain tensor"
            )


def _gather(paths: Sequence[str], tensors: Sequence[Tensor], collectives: Collectives) -> tuple[list[Tensor], slice]:
    lines = [Line("the number of tensors given to gather_rows()", str(len(tensors)))]
    lines += [Line(f"{path} given to gather_rows()", _described(t)) for path, t in zip(paths, tensors, strict=True)]
    has_graph = [torch.is_grad_enabled() and each.requires_grad for each in tensors]
    modules = scheduler_of(collectives.group).modules.numbered()
    behind = numbers_behind([t for t, each in zip(tensors, has_graph, strict=True) if each], modules)
    count = len(tensors[0]) if tensors and tensors[0].dim() else 0
    decisions = decisions_of(collectives.group)
    numbers = [_valid(paths, tensors), decisions.counts_nothing, count, *has_graph, *behind]
    answers = check_same_on_all_ranks(lines, collectives, numbers, what="gather_rows()")
    _check(list(zip(paths, tensors, strict=True)))
    _check_others([bool(row[0]) for row in answers], collectives)
    padding = padding_ranks([row[1] for row in answers])
    counts = [0 if pads else row[2] for row, pads in zip(answers, padding, strict=True)]
    flags = [any(row[3 + n] for row in answers) for n in range(len(tensors))]
    rows = _Rows(collectives, counts, [tuple(each.shape[1:]) for each in tensors], [each.dtype for each in tensors])
    if padding[collectives.rank]:
        rows.counts_nothing, tensors = True, [each[:0] for each in tensors]
        state_of(collectives.group).has_no_rows = decisions.is_padding
    joined = torch.empty(0, requires_grad=True) if any(flags) else None
    whole = list(_GatherRows.apply(rows, joined, tuple(flags), None, *tensors))
    for number in sorted({number for row in answers for number in row[3 + len(tensors) :]} & modules.keys()):
        lead_to(modules[number], whole[flags.index(True)])
    begin = rows.begins[collectives.rank]
    return whole, slice(begin, begin + rows.own_count)


def gather_row(count: int, row: Tensor, collectives: Collectives, what: str) -> tuple[list[int], Tensor]:
    """Return the count and the row of each rank, in one all-gather; the rows are differentiable, as in
    :func:`gather_rows`. They have the same length and dtype on every rank. The count of a rank at a padding batch is 0.

    Raises :class:`AgreementError` on every rank if the graph is recorded on some ranks only, whose backward would wait
    for the others. Messages name ``what``.
    """
    records = torch.is_grad_enabled()
    pads = decisions_of(collectives.group).counts_nothing
    head = torch.tensor([[count, records, records and row.requires_grad, pads]], device=row.device)
    ones, shape = [1] * collectives.world, tuple(row.shape)
    both = _Rows(collectives, ones, [(4,), shape], [head.dtype, row.dtype], what)
    heads, values = both.gather([head, row.detach()[None]])
    counts, recording, flags, padding = heads.t().tolist()
    if len(set(recording)) > 1:
        ranks = collectives.global_ranks
        raise AgreementError(
            f"{what}: rank {ranks[recording.index(0)]} runs its forward under torch.no_grad(), rank "
            f"{ranks[recording.index(1)]} does not; call the module in the same way on every rank"
        )
    joined = torch.empty(0, requires_grad=True) if any(flags) else None
    rows, padding = _Rows(collectives, ones, [shape], [row.dtype], what), padding_ranks(padding)
    rows.counts_nothing = padding[collectives.rank]
    (whole,) = _GatherRows.apply(rows, joined, (any(flags),), [values], row[None])
    return [0 if pads else count for count, pads in zip(counts, padding, strict=True)], whole


def _valid(paths: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    try:
        _check(list(zip(paths, tensors, strict=True)))
    except OptionError:
        return False
    return True


def _check_others(valid: Sequence[bool], collectives: Collectives) -> None:
    if not all(valid):
        rank = collectives.global_ranks[valid.index(False)]
        raise OptionError(f"gather_rows() got tensors on rank {rank} whose rows cannot be gathered; see its error")


def _described(tensor: Tensor) -> str:
    shape = ("rows", *tensor.shape[1:]) if tensor.dim() else ()
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape ({', '.join(map(str, shape))})"


# ------------------------------------------------------------------------------------------------ what travels


class _Rows:
    """Moves rows, as bytes, between ranks that have different numbers of them."""

    def __init__(
        self,
        collectives: Collectives,
        counts: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        what: str = _ROWS,
    ) -> None:
        self.collectives = collectives
        self.counts = counts
        self.shapes = shapes
        self.dtypes = dtypes
        self.what = what
        self.counts_nothing = False
        """True if the gradients of this rank are dropped: it is at a padding batch."""
        self.own_count = counts[collectives.rank]
        self.begins = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        self.row_bytes = [dtype.itemsize * prod(shape) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def gather(self, tensors: Sequence[Tensor], failed: bool = False) -> list[Tensor]:
        """Return the rows of all ranks of each tensor.

        ``failed``: take part only, as the pass has failed on this rank; the others raise :class:`PeerError`.
        """
        longest = max(self.counts)
        starts = [1 + longest * sum(self.row_bytes[:n]) for n in range(len(self.dtypes) + 1)]
        flat = tensors[0].new_zeros(len(self.counts), starts[-1], dtype=torch.uint8)
        own = flat[self.collectives.rank]
        own[0] = failed
        for start, tensor in zip(starts, tensors, strict=False):
            part = as_bytes(tensor)
            own[start : start + len(part)] = part
        self.collectives.all_gather_flat(flat.view(-1), own, self.what).wait()
        if not failed:
            self._check_failed(flat[:, 0].tolist())
        found = []
        for n, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            sizes = [count * self.row_bytes[n] for count in self.counts]
            parts = [flat[rank, starts[n] : starts[n] + size] for rank, size in enumerate(sizes)]
            rows = flat.new_empty(sum(self.counts), *shape, dtype=dtype)  # no view: a program may write to it
            torch.cat(parts, out=as_bytes(rows))
            found.append(rows)
        return found

    def sum_own(self, grads: Sequence[Tensor | None], like: Tensor, failed: bool = False) -> list[Tensor | None]:
        """Return the sums over the ranks, in their order, of the gradients of this rank's rows.

        A gradient that is None on all ranks stays None. ``failed`` is as in :meth:`gather`.
        """
        if self.counts_nothing:
            grads = [None] * len(grads)
        heads, bodies = self._exchange(failed, grads, like)
        if not failed:
            self._check_failed([head[0] for head in heads])
        found: list[Tensor | None] = []
        for n, dtype in enumerate(self.dtypes):
            start = self.own_count * sum(self.row_bytes[:n])
            parts = [
                body[start : start + self.own_count * self.row_bytes[n]].clone().view(dtype)
                for head, body in zip(heads, bodies, strict=True)
                if head[1 + n]
            ]
            found.append(_sum(parts).view(self.own_count, *self.shapes[n]) if parts else None)
        return found

    def _check_failed(self, failed: Sequence[int]) -> None:
        if any(failed):
            ranks = self.collectives.global_ranks
            raise PeerError(
                f"rank {self.collectives.global_rank}: backward failed on rank {ranks[failed.index(1)]} before it came "
                f"to the {self.what} that this rank's goes through; that rank's own error says why. No gradient has "
                "been handed out"
            )

    def _exchange(
        self, failed: bool, grads: Sequence[Tensor | None], like: Tensor
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Send to each rank a head (whether the pass has failed; which gradients there are) and its rows' gradients."""
        head = torch.tensor([failed, *(grad is not None for grad in grads)], dtype=torch.uint8, device=like.device)
        sent, sizes = [], []
        for rank, count in enumerate(self.counts):
            parts = [head]
            for n, grad in enumerate(grads):
                if grad is None:
                    parts.append(head.new_zeros(count * self.row_bytes[n]))
                else:
                    parts.append(as_bytes(grad[self.begins[rank] : self.begins[rank + 1]].to(self.dtypes[n])))
            sizes.append(sum(map(len, parts)))
            sent += parts
        length = len(head) + self.own_count * sum(self.row_bytes)
        flat = head.new_empty(len(self.counts) * length)
        received = [length] * len(self.counts)
        self.collectives.all_to_all(flat, torch.cat(sent), received, sizes, f"gradients of {self.what}").wait()
        pieces = flat.view(len(self.counts), length)
        return pieces[:, : len(head)].tolist(), list(pieces[:, len(head) :])


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of parts in their order; of half precision in float32, rounded once."""
    dtype = parts[0].dtype
    if dtype not in (torch.float16, torch.bfloat16):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total
    return _sum([part.float() for part in parts]).to(dtype)


# -------------------------------------------------------------------------------------- through autograd


class _RowsInPass(MeanInPass):
    """An exchange of gradients that the backward of a function takes."""

    def __init__(self, rows: _Rows, joined: Tensor | None, tell: Callable[[], object]) -> None:
        super().__init__(rows.collectives, (), joined)
        self._tell = tell

    def take_part(self) -> None:
        """Tell the other ranks, which wait for this rank's gradients, that the pass has failed here."""
        self._tell()


class _GatherRows(Function):
    """The rows of all ranks; the backward is :class:`_SumRows`.

    ``joined`` is an empty leaf that gives the function a graph on every rank if it has one on any. ``gathered`` are the
    rows, if they have been gathered before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: _Rows,
        joined: Tensor | None,
        flags: tuple[bool, ...],
        gathered: list[Tensor] | None,
        *tensors: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        whole = rows.gather(tensors) if gathered is None else gathered
        like = tensors[0].new_empty(0)
        ctx.rows, ctx.flags, ctx.like = rows, flags, like
        ctx.in_pass = _RowsInPass(rows, joined, lambda: rows.sum_own([None] * len(flags), like, failed=True))
        ctx.mark_non_differentiable(*(each for each, flag in zip(whole, flags, strict=True) if not flag))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Sum the gradients of this rank's rows over the ranks; differentiable, if the pass is."""
        ctx.in_pass.taken_in = current_pass()
        joined = ctx.in_pass.joined
        found = _SumRows.apply(ctx.rows, ctx.like, joined if torch.is_grad_enabled() else None, ctx.flags, *grads)
        return None, None if joined is None else torch.empty_like(joined), None, None, *found


class _SumRows(Function):
    """The sums over the ranks of the gradients of this rank's rows; the backward gathers rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: _Rows, like: Tensor, joined: Tensor | None, flags: tuple[bool, ...], *grads: Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.like, ctx.flags = rows, like, flags
        ctx.given = [grad is not None for grad in grads]
        ctx.in_pass = _RowsInPass(rows, joined, lambda: rows.gather([like.new_empty(0)], failed=True))
        return tuple(rows.sum_own(grads, like))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gather the gradients of all ranks' rows; None counts as zero."""
        rows: _Rows = ctx.rows
        ctx.in_pass.taken_in = current_pass()
        joined = ctx.in_pass.joined
        full = [
            ctx.like.new_zeros((rows.own_count, *shape), dtype=dtype) if grad is None else grad
            for grad, shape, dtype in zip(grads, rows.shapes, rows.dtypes, strict=True)
        ]
        whole = _GatherRows.apply(rows, joined if torch.is_grad_enabled() else None, ctx.flags, None, *full)
        found = [each if given else None for each, given in zip(whole, ctx.given, strict=True)]
        to_joined = None if joined is None else torch.empty_like(joined)
        return None, None, to_joined, None, *found
