"""The parameters in the slots of replicas, and their gradients.

A copy's parameters are made once, around values that are kept up to date (:mod:`~lockstep.local.parameters`). There are
two sets of them, one of which is bound to the slots: *linked* parameters, whose graph leads to the network's
parameters, and *leaves*, which keep a training step's gradients until they are collected.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.buckets import TensorSpec, plan_buckets
from lockstep.local.functions import link
from lockstep.local.gradient_sums import Gradients, summed
from lockstep.local.module_copy import ModuleCopy
from lockstep.local.parameters import ParameterValues
from lockstep.tensor_state import Change, Layouts, TensorSnapshot, addresses


class ReplicaParameters:
    """The parameters of ``copies`` on ``devices``; ``modules`` are the network's.

    With ``detach``, no gradient flows from them to the network's. Slots with tensors that cannot be linked once and for
    all are listed in :attr:`recopied` and left to :class:`~lockstep.local.replica_buffers.ReplicaBuffers`.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        copies: Sequence[ModuleCopy],
        devices: Sequence[torch.device],
        *,
        detach: bool,
        cap_bytes: int,
    ) -> None:
        self._copies = copies
        self._devices = devices
        self._detach = detach
        self._cap_bytes = cap_bytes
        self._parameters: list[Tensor] = []
        self._owners: list[int] = []
        self._slots: dict[tuple[int, str], int | None] = {}
        self.recopied: list[tuple[int, str]] = []
        self._sort(modules)
        self._hooked = _hooked(self._parameters)
        self._linked: _Rows | None = None
        self._leaves: _Rows | None = None
        self._bound: _Rows | None = None
        self._place_values()

    def _sort(self, modules: Sequence[Module]) -> None:
        """Find the parameters that persist, with the module of each, and the slots that get new tensors each time."""
        numbers: dict[int, int] = {}
        for index, module in enumerate(modules):
            for name, tensor in module._parameters.items():
                if tensor is not None and not _persists(tensor):
                    self.recopied.append((index, name))
                    continue
                if tensor is not None and id(tensor) not in numbers:
                    self._parameters.append(tensor)
                    self._owners.append(index)
                self._slots[index, name] = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))

    # Values #

    def follow_network(self, *, gradients: bool) -> bool:
        """Follow all changes of the network's parameters except their values; False if new copies are needed."""
        change = self._then.change(gradients=gradients)
        if change is Change.KINDS:
            return False
        if change is Change.PLACES:  # RNN.flatten_parameters, p.data = ...
            self._place_values()
        elif change is Change.REQUIREMENTS:
            self._then.take_requirements()
            self._unbind()
        return True

    def refresh(self, *, everything: bool, thorough: bool) -> None:
        """Update the values of all parameters (``everything``), or of those that differ from what was sent last.

        If a copy's forward gave a parameter other data (``p.data = ...``), which no transfer would reach, all copies
        get new parameters; unless ``thorough``, only data at another address counts as other data.
        """
        hooked = _hooked(self._parameters) if everything else self._hooked  # hooks are called in backward only
        if hooked != self._hooked or (self._bound is not None and self._bound.strayed(thorough=thorough)):
            self._hooked = hooked
            self._unbind()
        if self._values.travel:  # else the list of written values is not needed
            self._values.transfer(self._then.written(), everything=everything)

    def _place_values(self) -> None:
        self._then = TensorSnapshot(self._parameters)
        self._values = ParameterValues(self._parameters, self._devices, self._cap_bytes)
        self._unbind()

    # Slots #

    def bind(self, *, leaves: bool) -> bool:
        """Bind linked tensors, or leaves without gradients, to the copies' slots; return False if they already are."""
        wanted = self._leaf_rows() if leaves else self._linked_rows()
        if self._bound is wanted:
            return False
        self._bound = wanted
        for copy, tensors in zip(self._copies, wanted.rows, strict=True):
            in_slots = [None if i is None else tensors[i] for i in self._slots.values()]
            copy.bind("_parameters", list(self._slots), in_slots)
        return True

    @property
    def bound(self) -> bool:
        """True if the tensors in the copies' slots are valid."""
        return self._bound is not None

    def _unbind(self) -> None:
        self._leaves = self._linked = self._bound = None

    def _leaf_rows(self) -> "_Rows":
        if self._leaves is None:
            self._leaves = _Rows([self._new(device, requires_grad=True) for device in self._devices])
        for leaf in chain(*self._leaves.rows):
            leaf.grad = None  # left by a step that failed halfway
        return self._leaves

    def _linked_rows(self) -> "_Rows":
        """Return differentiable parameters for every copy, linked bucket by bucket, late layers first."""
        if self._linked is not None:
            return self._linked
        rows = [self._new(device, requires_grad=False) for device in self._devices]
        needing = [i for i, p in enumerate(self._parameters) if p.requires_grad and not self._detach]
        backwards = needing[::-1]
        alone = set(self._hooked)
        together = [i for i in backwards if i not in alone]
        plan = plan_buckets([TensorSpec.of(self._parameters[i]) for i in together], self._cap_bytes)
        groups = [[together[slot.index] for slot in bucket.slots] for bucket in plan.buckets]
        for members in [*groups, *([i] for i in self._hooked if i in backwards)] if rows else ():
            link(
                [row[i] for row in rows for i in members],
                [self._owners[i] for i in members],
                [self._parameters[i] for i in members],
            )
        self._linked = _Rows(rows)
        return self._linked

    def _new(self, device: torch.device, *, requires_grad: bool) -> list[Tensor]:
        pairs = zip(self._values.on(device), self._parameters, strict=True)
        return [Parameter(value, requires_grad and p.requires_grad) for value, p in pairs]

    # Gradients #

    def take_gradients(self, captured: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Return the network's parameters that have gradients, and their sums in replica order.

        The gradients are taken from the copies' leaves, and out of ``captured``, which may contain gradients of the
        network's own parameters and of the leaves.
        """
        rows: list[list[Tensor | None]] = [[captured.pop(id(p), (p, None))[1] for p in self._parameters]]
        owned = [False]
        for leaves in self._leaves.rows if self._leaves is not None else ():
            owned.append(not any(id(leaf) in captured for leaf in leaves))
            rows.append([])
            for parameter, leaf in zip(self._parameters, leaves, strict=True):
                grad = leaf.grad if owned[-1] else captured.pop(id(leaf), (leaf, None))[1]
                rows[-1].append(grad if grad is None else grad.to(parameter.device))
                leaf.grad = None
        totals = summed(rows, owned)
        reached = [i for i, total in enumerate(totals) if total is not None]
        return [self._parameters[i] for i in reached], [total for total in totals if total is not None]


class _Rows:
    """Parameters of all copies, one row for each copy, with their addresses and layouts when they were made."""

    def __init__(self, rows: list[list[Tensor]]) -> None:
        self.rows = rows
        self._tensors = list(chain(*rows))
        self._addresses = addresses(self._tensors)
        self._layouts = Layouts(self._tensors)

    def strayed(self, *, thorough: bool) -> bool:
        """Return True if any parameter has other data now; unless ``thorough``, only other addresses count."""
        return addresses(self._tensors) != self._addresses or (thorough and self._layouts.changed())


def _hooked(parameters: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the parameters with gradient hooks. Each is linked alone: a node that runs calls the hooks
    of all its parameters, with None for those that got no gradient."""
    return [i for i, parameter in enumerate(parameters) if parameter._backward_hooks]


def _persists(tensor: Tensor) -> bool:
    """Return True if copies of a parameter can be linked once and for all: it is a leaf, dense, and a plain tensor."""
    return tensor.is_leaf and tensor.layout == torch.strided and type(tensor) in (Parameter, Tensor)
