"""Searches the graph of a backward pass for the leaves that it reaches, and for means over the ranks on the way."""

import itertools
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from lockstep._base.devices import is_accelerator
from lockstep._base.dtensors import local_part
from lockstep.distributed.comm.collectives import Collectives

_KEY = "lockstep.backward"

ENGINE_ARGUMENTS = (
    "tensors",
    "grad_tensors",
    "keep_graph",
    "create_graph",
    "inputs",
    "allow_unreachable",
    "accumulate_grad",
)
"""The names of the arguments of the autograd engine, in their order."""


# ---------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True)
class ReachableLeaves:
    """The leaves that a pass may accumulate gradients into."""

    leaves: frozenset[int] = frozenset()
    """The ids of the leaves found in the graph."""
    hidden: bool = False
    """True if there may be more: functions written in Python may run passes of their own, as checkpointing does."""
    marks: Mapping[int, Sequence[object]] = field(default_factory=dict)
    """By the id of the owner, the marks that :func:`mark_output` and :func:`mark_checkpoints` have set in the graph."""


def reach_of(given: dict[str, Any]) -> ReachableLeaves:
    """Return the leaves that a pass with these arguments may accumulate into."""
    if not given.get("accumulate_grad"):
        return ReachableLeaves()
    leaves, hidden = set(), False
    marks: dict[int, list[object]] = {}
    for node in _nodes(_edges(given["tensors"])):
        if _is_leaf(node):
            leaves.add(id(node.variable))
        for owner, mark in node.metadata.get(_KEY, ()):
            marks.setdefault(id(owner()), []).append(mark)
        hidden = hidden or isinstance(node, BackwardCFunction)
    chosen = given.get("inputs")
    if chosen:
        return ReachableLeaves(frozenset(leaves & _targets(chosen).keys()))
    return ReachableLeaves(frozenset(leaves), hidden, marks)


def devices_of_leaves(given: dict[str, Any]) -> set[torch.device]:
    """Return the accelerators that the leaves of a pass are on; the engine has a thread for each."""
    leaves = (node.variable for node in _nodes(_edges(given["tensors"])) if _is_leaf(node))
    return {leaf.device for leaf in leaves if is_accelerator(leaf.device)}


def mark_output(tensor: Tensor, owner: object, mark: object) -> None:
    """Mark the graph node of ``tensor``, so that :func:`reach_of` finds ``mark`` for ``owner``."""
    if tensor.grad_fn is not None:
        _mark(tensor.grad_fn, owner, mark)


def mark_checkpoints(owner: object, mark: object) -> None:
    """Mark the nodes of the reentrant checkpoints whose forward this thread is in, as :func:`mark_output` does: their
    backward runs the forward again, with a graph that is not there yet."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            _mark(frame.f_locals[frame.f_code.co_varnames[0]], owner, mark)  # the function's context
        frame = frame.f_back  # type: ignore[assignment]


def _mark(node: Any, owner: object, mark: object) -> None:
    node.metadata.setdefault(_KEY, []).append((weakref.ref(owner), mark))


# ----------------------------------------------------------------------------------------------- means

MEANS = "mean of tensors"
"""The name of these means in messages."""


class MeanInPass:
    """A mean over the ranks that the backward of a function takes.

    The function's context refers to it as ``in_pass``, so it lives as long as the graph through the function.
    """

    def __init__(self, collectives: Collectives, likes: Sequence[Tensor], joined: Tensor | None) -> None:
        self.collectives = collectives
        self.likes = likes
        """Tensors with the shapes and dtypes of the gradients to be averaged."""
        self.joined = joined
        """An extra leaf among the function's inputs, through which every rank can reach it, or None."""
        self.number = next(_numbers)
        """Increases in the order of creation, over all threads of the engine."""
        self.taken_in: object = None
        """The last pass in which the mean was taken."""
        _alive.add(self)

    def take_part(self) -> None:
        """Tell the other ranks, which take this mean, that the pass has failed here: send NaN."""
        nothing = [torch.full_like(local_part(like), nan) for like in self.likes]
        flags = nothing[0].new_full((1 + len(nothing),), nan)
        for _ in self.collectives.all_reduce_coalesced([*nothing, flags], MEANS):
            pass


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count()


def has_means() -> bool:
    """Return True if a backward pass of this process may take a mean over ranks; its time depends on the graph."""
    return bool(_alive)


def keep_means(layer: object) -> None:
    """Let :func:`has_means` return True as long as ``layer`` lives: a checkpoint runs its forward, which communicates,
    for the first time without a graph, and in backward again."""
    _alive.add(layer)


def joined_behind(given: dict[str, Any]) -> Sequence[Tensor]:
    """Return leaves to be added to the ``inputs`` of a pass, so that it reaches all means behind its outputs.

    On another rank these means may be on the way to the inputs.
    """
    found = map(_mean_of, _nodes(_edges(given["tensors"]))) if _alive else ()
    return [each.joined for each in found if each is not None and each.joined is not None]


def finish_means(given: dict[str, Any], this: object) -> None:
    """Take part in the remaining means of a failed pass, in the order in which it would have taken them.

    The other ranks take them before they hear of the failure.
    """
    for each in _unfinished(given, this):
        try:
            each.take_part()
        except Exception:
            logging.getLogger("lockstep").exception("what a failed backward pass owes could not be sent")
            return


def _unfinished(given: dict[str, Any], this: object) -> list[MeanInPass]:
    if not _alive:
        return []
    found = [node for node in _nodes(_edges(given["tensors"])) if _mean_of(node) is not None]
    chosen = given.get("inputs")
    if chosen and found:
        targets = _targets(chosen)
        found = [node for node in found if any(id(_target_of(each)) in targets for each in _nodes([node]))]
    means = [each for node in found if (each := _mean_of(node)) is not None and each.taken_in is not this]
    return sorted(means, key=lambda each: each.number, reverse=True)


def _mean_of(node: Any) -> MeanInPass | None:
    found = getattr(node, "in_pass", None) if isinstance(node, BackwardCFunction) else None
    return found if isinstance(found, MeanInPass) else None


# ----------------------------------------------------------------------------------------------- nodes


def _edges(outputs: Iterable[Any]) -> list[Any]:
    """Return the nodes of these outputs, which are tensors or gradient edges."""
    found = [each for each in outputs if not _is_tensor(each) or each.requires_grad]
    edges = (torch.autograd.graph.get_gradient_edge(each) if _is_tensor(each) else each for each in found)
    return [edge.node for edge in edges]


def _nodes(first: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of the graph behind these, and these."""
    pending = list(first)
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _targets(chosen: Iterable[Any]) -> dict[int, object]:
    """Return the leaves among ``inputs``, and the nodes of other tensors, by id.

    They are the values as well, to keep them alive: an id of a node's Python object is valid only as long as that
    lives.
    """
    found = [_target_of(node) for node in _edges(chosen)]
    return {id(each): each for each in found}


def _target_of(node: Any) -> object:
    return node.variable if _is_leaf(node) else node
