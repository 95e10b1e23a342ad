"""The graph of a backward pass, searched when the pass has failed: what it was to come to, and what it owes."""

import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_KEY = "lockstep.backward"

Arguments = tuple[Sequence[Any], dict[str, Any]]
"""What the engine's entry is given, by position and by name."""
_NAMES = ("tensors", "grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad")


def named(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments by name."""
    return dict(zip(_NAMES, args, strict=False)) | kwargs


# ---------------------------------------------------------------------------------------------- leaves


@dataclass(frozen=True)
class Reach:
    """Which leaves a pass accumulates gradients into."""

    leaves: frozenset[int] = frozenset()
    """Their identities, as far as the graph shows them."""
    hidden: bool = False
    """Whether there may be more: functions written in Python may run passes of their own, as checkpointing does."""
    marks: Mapping[int, Sequence[object]] = field(default_factory=dict)
    """What :func:`mark_output` was called with for outputs that the pass was to go through, by the identity of the
    owner."""
    elsewhere: frozenset[int] = frozenset()
    """Replicated modules, by identity, into which it may accumulate on another rank: see
    :meth:`CollectiveInPass.leads_to`."""


def reach_of(given: dict[str, Any]) -> Reach:
    """What the pass that was begun with these arguments was to accumulate into."""
    if not given.get("accumulate_grad"):
        return Reach()
    leaves, hidden = set(), False
    elsewhere: set[int] = set()
    marks: dict[int, list[object]] = {}
    for node in _nodes(_edges(given["tensors"])):
        if _is_leaf(node):
            leaves.add(id(node.variable))
        for owner, mark in node.metadata.get(_KEY, ()):
            marks.setdefault(id(owner()), []).append(mark)
        hidden = hidden or isinstance(node, BackwardCFunction)
        collective = _collective_of(node)
        if collective is not None:
            elsewhere.update(map(id, collective.leads_to()))
    chosen = given.get("inputs")
    if chosen:
        return Reach(frozenset(leaves & _targets(chosen).keys()))
    return Reach(frozenset(leaves), hidden, marks, frozenset(elsewhere))


def devices_of_leaves(given: dict[str, Any]) -> set[torch.device]:
    """The accelerators on which the leaves of a pass lie: for each the engine has a thread."""
    leaves = (node.variable for node in _nodes(_edges(given["tensors"])) if _is_leaf(node))
    return {leaf.device for leaf in leaves if leaf.device.type not in ("cpu", "meta")}


def mark_output(tensor: torch.Tensor, owner: object, mark: object) -> None:
    """Let the graph behind ``tensor`` tell that a pass through it concerns ``owner``, and how: ``mark``."""
    if tensor.grad_fn is not None:
        metadata: dict[object, Any] = tensor.grad_fn.metadata  # type: ignore[assignment]  # a property
        metadata.setdefault(_KEY, []).append((weakref.ref(owner), mark))


# ----------------------------------------------------------------------------------------- collectives


class CollectiveInPass(ABC):
    """A function whose backward is a collective: its context has this as ``in_pass``.

    ``joined`` is a leaf among its inputs, by which it can be reached on every rank.
    """

    def __init__(self, joined: torch.Tensor | None) -> None:
        self.joined = joined
        self.number = next(_numbers)
        """Those that are made later have higher ones, whichever thread of the engine makes them."""
        self._run_in: object = None
        _alive.add(self)

    def runs_in(self, this: object) -> None:
        """The collective is about to run, in that pass."""
        self._run_in = this

    def has_run_in(self, this: object) -> bool:
        """Whether it has run in that pass, the last that it has run in."""
        return self._run_in is this

    @abstractmethod
    def leads_to(self) -> list[object]:
        """The replicated modules to whose parameters a pass through it may come, on some rank."""

    @abstractmethod
    def take_part(self) -> None:
        """Run it without a contribution, since the other ranks do."""


_alive: weakref.WeakSet[CollectiveInPass] = weakref.WeakSet()
_numbers = itertools.count()


def unfinished_collectives(given: dict[str, Any], this: object) -> list[CollectiveInPass]:
    """The collectives that a pass, which has failed, was to come to, in the order in which it would have."""
    if not _alive:
        return []
    found = [node for node in _nodes(_edges(given["tensors"])) if _collective_of(node) is not None]
    chosen = given.get("inputs")
    if chosen and found:
        targets = _targets(chosen)
        found = [node for node in found if any(id(_target_of(each)) in targets for each in _nodes([node]))]
    collectives = [each for node in found if (each := _collective_of(node)) is not None]
    collectives.sort(key=lambda each: each.number, reverse=True)
    return [each for each in collectives if not each.has_run_in(this)]


def joined_behind(given: dict[str, Any]) -> list[torch.Tensor]:
    """What a pass with ``inputs`` has to have among those, too, so that it comes to all collectives behind its outputs:
    on another rank they may be on the way to the inputs."""
    found = collectives_behind(given["tensors"]) if given.get("inputs") else []
    return [each.joined for each in found if each.joined is not None]


def collectives_behind(outputs: Iterable[Any]) -> list[CollectiveInPass]:
    """The collectives that a pass through these outputs comes to, if it has no ``inputs``."""
    if not _alive:
        return []
    return [each for node in _nodes(_edges(outputs)) if (each := _collective_of(node)) is not None]


def take_part(collectives: Iterable[CollectiveInPass]) -> None:
    """Let each run as on the other ranks, which wait for it before they hear that this pass has failed."""
    for each in collectives:
        try:
            each.take_part()
        except Exception:
            logging.getLogger("lockstep").exception("what a failed backward pass owes could not be sent")
            return


def _collective_of(node: Any) -> CollectiveInPass | None:
    found = getattr(node, "in_pass", None) if isinstance(node, BackwardCFunction) else None
    return found if isinstance(found, CollectiveInPass) else None


# ----------------------------------------------------------------------------------------------- nodes


def _edges(outputs: Iterable[Any]) -> list[Any]:
    """The nodes that these outputs are of, given as they are or by their gradient edges."""
    found = [each for each in outputs if not _is_tensor(each) or each.requires_grad]
    edges = (torch.autograd.graph.get_gradient_edge(each) if _is_tensor(each) else each for each in found)
    return [edge.node for edge in edges]


def _nodes(first: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph behind these."""
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
    return isinstance(value, torch.Tensor)


def _targets(chosen: Iterable[Any]) -> dict[int, object]:
    """By identity: the leaves among ``inputs``, and the nodes of what is no leaf. Python's objects for nodes come and
    go, so identities are theirs only while they are kept."""
    found = [_target_of(node) for node in _edges(chosen)]
    return {id(each): each for each in found}


def _target_of(node: Any) -> object:
    return node.variable if _is_leaf(node) else node
