"""Compares modules and optimizers of all ranks: numbers of optimizers, parameters, buffers, and optimizers' state."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep._base.digests import Digests, text_digest
from lockstep.distributed.comm.agreement import Line, all_gather_object, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.equal_values import Gather, compare
from lockstep.distributed.reduction.module.optimizer_numbers import SAME_NUMBERS, difference_in_numbers, numbers_of
from lockstep.distributed.reduction.module.value_digests import comparable_state, told
from lockstep.distributed.replication.replication import (
    Replication,
    own_names,
    replications,
    replications_in,
)
from lockstep.errors import OutOfSyncError

Values = list[tuple[str, Tensor]]


def values_of(module: Module, of: str = "") -> Values:
    """Return the parameters and buffers of a module that are to be the same on all ranks, with their names.

    After a batch that has failed each rank has its own buffers, until the next one makes them equal.
    """
    own = own_names(module, module)
    failed = [name for name, each in replications_in(module) if each.has_local_buffers]
    local = {id(buffer) for name in failed for buffer in module.get_submodule(name).buffers()}
    named = [each for each in (*module.named_parameters(), *module.named_buffers()) if each[0] not in own]
    named = [each for each in named if id(each[1]) not in local]
    return [(f"{'parameter' if isinstance(each, Parameter) else 'buffer'} {name}{of}", each) for name, each in named]


def state_of(optimizer: Optimizer, names: Mapping[int, str]) -> Values:
    """Return what an optimizer keeps of the parameters that have ``names``, by ``id``, as far as it is compared."""
    kind = type(optimizer).__name__
    return [
        (f"{key} of parameter {names[id(parameter)]} in {kind}", each)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
        for key, each in comparable_state(optimizer, parameter)
    ]


def names_of_parameters(modules: Sequence[Module] = ()) -> dict[int, str]:
    """Return the names of the parameters of modules, and of all that are replicated, by ``id``."""
    names = {number: name for each in replications() for number, name in each.replicated_names().items()}
    return names | {id(each): name for module in modules for name, each in module.named_parameters()}


def check_alike(
    values: Values,
    optimizers: Sequence[Optimizer],
    collectives: Collectives,
    advice: str,
    *,
    gather: Gather | None = None,
) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a number of an optimizer or a value differs between ranks.

    Communicates what :func:`all_gather_object`, or ``gather`` in its place, does, twice, and once more if there is a
    difference.
    """
    gather = gather or partial(all_gather_object, collectives=collectives)
    lines = [line for each in optimizers for line in numbers_of(each, lambda group: True).lines()]
    if optimizers:
        rows = gather(lines, "numbers of optimizers")
        told_by = {rank: dict(map(tuple, row)) for rank, row in zip(collectives.global_ranks, rows, strict=True)}
        if difference := difference_in_numbers(told_by):
            raise OutOfSyncError(f"{difference}, so the replicas drift apart. {SAME_NUMBERS}. {advice}")
    found = compare(values, collectives, gather=gather)
    if found is not None:
        raise OutOfSyncError(f"{found}. {found.cause}. {advice}")


def check_same_layouts(values: Values, collectives: Collectives, what: str) -> None:
    """Raise :class:`AgreementError`, on every rank, if values have other names, shapes or dtypes on some rank."""
    lines = [Line(name.partition(" ")[2], describe_tensor(tensor, layout=False)) for name, tensor in values]
    check_same_on_all_ranks(lines, collectives, what=what)


def compared_in_save(objects: Mapping[str, object], apart_from: int = 0) -> tuple[Values, list[Optimizer]]:
    """Return the values that are to be alike, and the optimizers, of what a save has: the parameters of modules that
    are replicated, over whichever ranks, and the state and the numbers of the optimizers that step them.

    Buffers may differ until the next backward makes them equal. Left out are modules replicated over ``apart_from``
    ranks. One that is replicated over a single rank counts: other ranks may have another one of its kind.
    """
    started = [each for each in replications() if each.drift is not None]
    found = [each for each in started if _is_compared(each) or each.group.size() == 1]
    compared = [(_has_local(each), each.replicated_names()) for each in found if each.group.size() != apart_from]
    replicated = {number for _, own in compared for number in own}
    stateful = {number for is_local, own in compared if not is_local for number in own}
    names = {number: name for number, name in names_of_parameters().items() if number in stateful}
    values: Values = []
    optimizers: list[Optimizer] = []
    for name, each in objects.items():
        if isinstance(each, Module):
            values += [(f"parameter {key} of {name}", p) for key, p in each.named_parameters() if id(p) in replicated]
        elif isinstance(each, Optimizer) and any(id(p) in replicated for p in _parameters(each)):
            optimizers.append(each)
            values += state_of(each, names)
    return values, optimizers


class PartAtEnd(NamedTuple):
    """What is compared at once at the end of a session: the parameters of a module, or an optimizer that steps them."""

    key: int
    """The same for parts of the same names, shapes and dtypes."""
    watch: DriftWatch
    """Of its module."""
    values: Values
    optimizers: list[Optimizer]

    def digest(self) -> int:
        """Return a digest of its values and numbers; on an accelerator, waits for it."""
        lines = [numbers_of(each, lambda group: True).lines() for each in self.optimizers]
        values = Digests([tensor for _, tensor in self.values]).digest(torch.device("cpu"))
        return told([lines, [name for name, _ in self.values], int(values)])


def parts_at_end(ranks: int) -> list[PartAtEnd]:
    """Return what is to be alike on so many ranks at the end of their session, module by module.

    That is what :func:`compared_in_save` would return of all replicated modules and of the optimizers that have stepped
    them, but for what nothing has to be made equal again: a module's values if the last steps were on gradients of one
    rank alone, or this rank has written to them since, and what optimizers keep if ranks have made different numbers of
    steps.
    """
    parts: list[PartAtEnd] = []
    for each in replications():
        watch = each.drift
        if (
            watch is None
            or not _is_compared(each)
            or each.group.size() != ranks
            or (watch.has_local_steps and watch.is_first)
        ):
            continue
        if each.started is None or not each.started.is_alive:  # of an earlier session
            continue
        table = watch.table
        lines = [(name, describe_tensor(p, layout=False)) for name, p in zip(table.names, table.tensors, strict=True)]
        names = {id(p): name for name, p in zip(table.names, table.tensors, strict=True)}
        if any(p.is_meta for p in table.tensors) or watch.is_written_since_step:  # given away, or another checkpoint
            continue
        key = text_digest(repr(lines))
        parts.append(PartAtEnd(key, watch, [(f"parameter {names[id(p)]}", p) for p in table.tensors], []))
        for optimizer in () if watch.has_local_steps or watch.has_missed_steps else watch.optimizers:
            own = [names.get(id(p)) for p in _parameters(optimizer)]
            what = text_digest(repr([key, type(optimizer).__name__, own]))
            parts.append(PartAtEnd(what, watch, state_of(optimizer, names), [optimizer]))
    return parts


def _is_compared(replication: Replication) -> bool:
    watch = replication.drift
    return watch is not None and watch.compares and watch.is_alike


def _has_local(replication: Replication) -> bool:
    return replication.drift is not None and replication.drift.has_local_steps


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def group_of(modules: Sequence[Module], optimizers: Sequence[Optimizer]) -> object:
    """Return the group over which the first of these is replicated; None if none is."""
    for module in modules:
        for name, replication in replications_in(module):
            if not name:
                return replication.group
    wanted = {id(each) for optimizer in optimizers for each in _parameters(optimizer)}
    return next((each.group for each in replications() if not wanted.isdisjoint(each.replicated_names())), None)
