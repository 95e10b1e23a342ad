"""``batches()``: the same number of iterations on ranks with unequal numbers of batches.

A rank that has run out repeats its last batch until all ranks have run out. Its program does the same as the others:
forward, backward, the steps of the optimizer and the scheduler, and collectives of its own. So replicas stay equal. (An
optimizer that missed a step would have different moments from then on, and the replicas would drift apart.) The
repeated batch, a *padding batch*, counts nothing: parameters get no gradient from it, buffers are restored
(``reduction/rank_state.py``), and :func:`lockstep.mean` gives it no weight.

The ranks exchange the lengths of their loaders before the first batch. A rank whose loader has no length looks one
batch ahead, and every rank's report says in each round whether it has another batch.
"""

import copy
from collections.abc import Iterable, Iterator, MutableMapping, Sequence, Sized
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module
from torch.utils.data import DataLoader, IterableDataset

from lockstep._base.digests import text_digest
from lockstep._base.loader_workers import workers_protected
from lockstep._base.texts import IN_LOOP, LEFT_LOOP
from lockstep._base.tree import holds_tensors, open_node, tensors_in
from lockstep.distributed.comm.agreement import all_gather_object, check_same_on_all_ranks, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import state_of
from lockstep.distributed.comm.groups import Group, global_ranks
from lockstep.distributed.reduction.report.decisions import Decisions
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.errors import OptionError, StructureError
from lockstep.loop.balanced_sampler import BalancedBatches, counted
from lockstep.loop.divided_data import (
    first_rows,
    rows_digest,
    warn_of_prefetching,
    warn_of_same_rows,
    warn_of_state_ahead,
    warn_of_two_divisions,
)
from lockstep.loop.stop_and_skip import groups_of
from lockstep.phases import Phases

B = TypeVar("B")
_NOTHING: Any = object()
_NO_ROUNDS = 1000


def batches(
    loader: Iterable[B], *modules: Module, group: Group | None = None, padding: B | None = None
) -> "Batches[B]":
    """Return the batches of a loader, the same number on every rank: a rank that has run out repeats its last batch.

    All ranks run the loop's body equally often. A repeated batch is a *padding batch*: it changes no gradient and no
    buffer, and :func:`lockstep.mean` gives it no weight; :class:`lockstep.local.SyncBatchNorm`,
    :func:`lockstep.loop.gather_rows` and :func:`lockstep.loop.mean_over_ranks` leave its rank out. ``param.grad`` is
    the mean over the ranks that have batches left; with :func:`lockstep.accumulate` it is weighted. If the body sums
    losses or rows itself, it has to check ``is_padding``.

    Loops may be nested. A batch counts if its rank has a batch in each of the loops over its group. If a loader has no
    length on some rank, its loop must be the innermost.

    Use it for training. Under ``torch.no_grad()`` it yields the loader's batches unchanged, so that evaluation neither
    pads nor drops a sample.

    Args:
        loader: Any iterable of batches. Call ``batches`` again for each epoch.
        modules: The trained modules, if they are replicated over a group other than ``group``.
        group: The ranks; the default group if None.
        padding: A batch for a rank that has no batch at all.

    Communicates one all-reduce when called, an all-gather if lengths differ (or first batches did, in the loop before,
    of a ``DataLoader``), and nothing later. A loader without a length (``IterableDataset``) is read one batch ahead.
    If any rank has such a loader, another all-reduce and, if they differ, another all-gather tell which ranks have a
    first batch, and the loop must synchronise in some backward pass.

    Warns of a ``DataLoader`` that gives all ranks the same first batch, as soon as the next loop begins (without a
    length, at once), of :func:`lockstep.loop.shard` together with a ``DistributedSampler``, and of a loader without a
    length that has a ``state_dict()``, which is one batch ahead of the loop.

    The current batch is the one that was read last: what reads ahead, such as a prefetcher, belongs around the loader.
    What reads one batch ahead of ``batches`` is warned of, on a rank that runs out after three batches or more.

    Raises:
        OptionError: A rank has no batch and no ``padding`` while others have batches (on every rank). A loader gives
            fewer or more batches than its length, or has no length and writes each batch into the memory of the one
            before (the other ranks raise ``PeerError``). At a padding batch, backward reaches a module over another
            group that is not named (so do the other ranks of that group). The loop is inside of a loop whose loader has
            no length on some rank, or a ``BalancedSampler`` deals samples to ranks that the loop does not serve (on
            every rank).
        PeerError: A rank has skipped a batch alone, by ``continue`` without :func:`lockstep.loop.skip_batch` (on every
            rank, in the next backward).
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=group)
        >>> for x in lockstep.batches([torch.ones(3, 1), torch.ones(2, 1)], model):
        ...     model(x).mean().backward()

    Stands for: ``DistributedDataParallel.join``, and samplers that pad or drop.
    """
    return Batches(loader, groups_of(modules, group, "batches"), padding)


class Batches(Generic[B]):
    """The result of :func:`batches`. Its length, if it has one, is the same on all ranks."""

    def __init__(self, loader: Iterable[B], groups: Sequence[Group], padding: B | None) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise OptionError(
                f"batches() got {loader!r} of type {type(loader).__name__}; expected a loader, or another iterable"
            )
        self._loader = loader = counted(loader)
        self._schedulers = sorted((scheduler_of(each) for each in groups), key=lambda each: each.order)
        self._own = _length(loader)
        self._padding = padding if padding is not None or self._own else _repeat_last(loader)
        has_padding = self._padding is not None
        warn_of_two_divisions(loader)
        if isinstance(loader, BalancedBatches):
            loader.check_served(sorted({rank for group in groups for rank in global_ranks(group)}))
        before = [first_rows.pop(each.group, 0) for each in self._schedulers]
        self._rows = [
            _agree_on_lengths(self._own, has_padding, each.decisions, rows, loader)
            for each, rows in zip(self._schedulers, before, strict=True)
        ]
        self._lengths = [length for rows in self._rows for length, _ in rows]
        self._looks_ahead = min(self._lengths) < 0
        self._may_be_empty = any(padded for rows in self._rows for _, padded in rows)
        self._is_padding = False
        self._note_place("")

    def __len__(self) -> int:
        if self._looks_ahead:
            raise TypeError("the loader of some rank has no length, so that of all together is not known")
        return max(self._lengths)

    def __length_hint__(self) -> int:
        return NotImplemented if self._looks_ahead else max(self._lengths)

    @property
    def is_padding(self) -> bool:
        """True if the current batch counts nothing, because this rank has run out of batches in this loop or an outer
        one."""
        return self._is_padding

    @property
    def weight(self) -> float:
        """The weight of the batch: 1, or 0 if the rank has run out."""
        return 0.0 if self._is_padding else 1.0

    def __iter__(self) -> Iterator[B]:
        if not torch.is_grad_enabled():
            return self._start()
        return self._in_turn(self._in_order())

    def _start(self) -> Iterator[B]:
        """Iterate over the loader; its workers survive a signal that asks all processes to stop."""
        with workers_protected():
            return iter(self._loader)

    def _in_turn(self, given: Iterator[tuple[B, bool, bool, bool]]) -> Iterator[B]:
        decisions = [each.decisions for each in self._schedulers]
        number, rounds, is_ahead = -1, self._schedulers[0].rounds, True
        try:
            with ExitStack() as whole:
                loops = [whole.enter_context(each.loop(self._looks_ahead)) for each in decisions]
                whole.callback(self._note_padding, False)
                self._note_place(IN_LOOP)
                for number, (batch, is_padding, ends, uneven) in enumerate(given):
                    before, rounds = rounds, self._schedulers[0].rounds
                    # With batches read ahead, no round lies between the first two, and one between all others.
                    is_ahead = is_ahead and (rounds > before or loops[0].batch.skipped) == (number > 1)
                    if is_ahead and is_padding and number > 2:
                        warn_of_prefetching(global_ranks(decisions[0].group)[decisions[0].group.rank()])
                        is_ahead = False
                    if not (number or is_padding or self._looks_ahead):  # else ranks have told each other already
                        first_rows.update({each.group: rows_digest(self._loader, batch) for each in self._schedulers})
                    for each, loop, rows in zip(decisions, loops, self._rows, strict=True):
                        active = [rank for rank, (length, _) in enumerate(rows) if length > number] if uneven else None
                        each.next_batch(loop, ends, uneven, active)
                    self._note_padding(is_padding or any(each.is_padding for each in decisions))
                    with ExitStack() as stack:
                        for scheduler in self._schedulers if is_padding else ():
                            stack.enter_context(scheduler.padding_batch())
                        yield batch
        except GeneratorExit:
            of_all = "" if self._looks_ahead else f" of {len(self)}"
            self._note_place(f"{LEFT_LOOP} after {number + 1}{of_all} batches")
            raise
        self._note_place("")

    def _note_place(self, words: str) -> None:
        for each in self._schedulers:
            outer = IN_LOOP if each.decisions.batch else ""
            state = state_of(each.decisions.group)
            state.in_loop = words or outer
            state.has_no_rows = state.has_no_rows and bool(words)

    def _note_padding(self, is_padding: bool) -> None:
        self._is_padding = is_padding

    def _in_order(self) -> Iterator[tuple[B, bool, bool, bool]]:
        """Yield each batch, and True if it is padding, if it is the rank's last, and if some rank may have run out."""
        iterator = self._start()
        batch: Any = self._padding
        first: Any = next(iterator, _NOTHING) if self._own < 0 else _NOTHING
        if self._looks_ahead:
            own = self._own if self._own >= 0 else int(first is not _NOTHING)
            rows = rows_digest(self._loader, first)
            self._rows = [_agree_on_lengths(own, batch is not None, each.decisions, rows) for each in self._schedulers]
            if not any(length for each in self._rows for length, _ in each):
                return
        shortest, longest = min(self._lengths), max(self._lengths)
        own_batches = self._counted(iterator) if self._own >= 0 else self._one_ahead(first, iterator)
        for number, (given, last) in enumerate(own_batches):
            again = _copy(given) if last and (self._looks_ahead or self._own < longest) else _NOTHING
            yield given, False, last, self._may_be_empty if self._looks_ahead else number >= shortest
            batch = again
        for _ in self._until_all_have_ended() if self._looks_ahead else range(self._own, longest):
            again = _copy(batch)
            yield batch, True, True, True
            batch = again
        if self._own >= 0:
            self._check_length(next(iterator, _NOTHING) is _NOTHING, self._own + 1)

    def _check_length(self, holds: bool, number: int) -> None:
        if not holds:
            self._fail(f"the loader has a length of {self._own}, and has given {number} batches")

    def _counted(self, iterator: Iterator[B]) -> Iterator[tuple[B, bool]]:
        """Yield the batches of a loader with a length, and True for the last one.

        Reads no batch ahead: the loader of a ``ResumableSampler``, for example, counts the batches that it has given.
        """
        for number in range(self._own):
            batch: Any = next(iterator, _NOTHING)
            self._check_length(batch is not _NOTHING, number)
            yield batch, number == self._own - 1

    def _one_ahead(self, upcoming: Any, iterator: Iterator[B]) -> Iterator[tuple[B, bool]]:
        """Yield the first batch and the rest of a loader, and True for the last one; asks for one batch ahead."""
        if hasattr(self._loader, "state_dict"):
            warn_of_state_ahead(self._loader)
        while upcoming is not _NOTHING:
            batch, versions = upcoming, _versions(upcoming)
            upcoming = next(iterator, _NOTHING)
            if any(versions.get(place, version) != version for place, version in _versions(upcoming).items()):
                self._fail("the loader has no length, and writes each batch into the memory of the one before")
            yield batch, upcoming is _NOTHING

    def _until_all_have_ended(self) -> Iterator[None]:
        """Yield for each batch that some other rank may have after this rank's last."""
        decisions = self._schedulers[0].decisions
        if len(self._lengths) == 1:
            return
        waited = 0
        while not decisions.all_have_ended:
            rounds = [each.rounds for each in self._schedulers]
            yield
            waited = waited + 1 if rounds == [each.rounds for each in self._schedulers] else 0
            if waited == _NO_ROUNDS:
                self._fail(f"this rank has run out, and has gone through {waited} batches without a synchronisation")

    def _fail(self, reason: str) -> None:
        """Raise, and tell the other ranks in the backward that they are in."""
        for each in self._schedulers:
            each.fail()
        raise OptionError(f"batches(): {reason}; give a loader of the right length, or `padding`")


def _versions(batch: object) -> dict[int, int]:
    """Return the versions of the tensors of a batch, which change when these are written to, by their addresses."""
    try:
        return {
            each.data_ptr(): each._version for each in tensors_in(batch) if each.numel() and not each.is_inference()
        }
    except (StructureError, RuntimeError):  # such as of a sparse tensor, which has no address
        return {}


def _length(loader: object) -> int:
    """Return the number of batches that a loader will give; -1 if unknown."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return -1  # the length of such a loader is only an estimate
    left = getattr(loader, "batches_left", None)  # GlobalBatches, which may resume within an epoch
    if isinstance(left, int):
        return left
    if not isinstance(loader, Sized):
        return -1
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def _repeat_last(loader: object) -> Any:
    """Return the last batch of a resumed loader that had no batch left on this rank when the run stopped; else None.

    Such a loader (``ResumableSampler.batches()``) can give its last batch again, so that the run goes on unchanged.
    """
    repeat = getattr(loader, "repeat_last", None)
    return None if repeat is None else repeat()


def _agree_on_lengths(
    own: int, has_padding: bool, decisions: Decisions, rows_of_first: int, loader: object = None
) -> list[tuple[int, bool]]:
    """Exchange the length of each rank's loader, and, for loaders without one, if there is a first batch.

    Digests of first batches travel with them: of the one before, or, for loaders without a length, of this one.

    Requests to stop travel with them. Raises on every rank if some rank has no batch to iterate over, or if loaders
    that describe themselves (of a ``BalancedSampler``) differ.
    """
    collectives = Collectives(decisions.group, Phases())
    lines = loader.describe() if isinstance(loader, BalancedBatches) else []
    digest = text_digest(repr(lines)) if lines else 0
    own_row = [own, has_padding, digest, decisions.asks_to_stop(), rows_of_first]
    answers = all_gather_object(own_row, "batches()", collectives)
    if first_differing([each[2] for each in answers]) is not None:
        check_same_on_all_ranks(lines, collectives, what="batches()")
    decisions.hear_requests(any(each[3] for each in answers))
    if rows_of_first and len(answers) > 1 and all(each[4] == rows_of_first for each in answers):
        warn_of_same_rows(collectives.global_rank)
    rows: list[tuple[int, bool]] = [(length, padded) for length, padded, *_ in answers]
    for rank, (length, padded) in zip(collectives.global_ranks, rows, strict=True):
        if length == 0 and not padded and any(other > 0 for other, _ in rows):
            raise OptionError(
                f"rank {rank} has no batch at all, so there is none that it could go through while the others "
                "have some; give each rank a share, or a batch of the right form as batches(padding=...)"
            )
    return rows


def _copy(batch: Any) -> Any:
    """Return the batch in new containers, objects and tensors, since the loop may take apart or write to those that it
    gets."""
    try:
        if isinstance(batch, torch.Tensor):
            return batch if batch.grad_fn is not None else batch.detach().clone().requires_grad_(batch.requires_grad)
        node = open_node(batch)
        copied = batch if node is None else node.build([_copy(child) for child in node.children])
        if copied is batch and (isinstance(batch, MutableMapping) or holds_tensors(batch)):
            copied = copy.copy(batch)
        return copied
    except Exception:  # of a class that cannot be made anew, or copied
        return batch
