"""The parameters in the slots of replicas, and the gradients that come back from them.

A copy's parameters are made once, around values that are kept up to date (:mod:`~lockstep.local.parameters`). There are
two sets of them, of which one is bound to the slots: *linked* ones, whose graph leads to the network's parameters, and
*leaves*, which keep a training step's gradients until they are collected.
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
from lockstep.local.tensor_state import Change, Layouts, TensorSnapshot, addresses


class ReplicaParameters:
    """The parameters of ``copies`` on ``devices``, for those of a network's ``modules``.

    With ``detach`` no gradient leads from them to the network's. Slots with tensors for which that cannot be done once
    and for all are left to others: :attr:`recopied`.
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
        self._copies, self._devices, self._detach, self._cap_bytes = copies, devices, detach, cap_bytes
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
        """Which parameters persist, with the module that owns each, and which slots get new tensors each time."""
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
        """Take the network's parameters as they are now, but for their values; False if they are other ones."""
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
        """Bring the values up to date: of all parameters, or of those that are others than were sent.

        A copy whose forward gave a parameter other data (``p.data = ...``), which no transfer would reach, gets new
        ones; a look that is not ``thorough`` takes it that other data is elsewhere.
        """
        hooked = _hooked(self._parameters) if everything else self._hooked  # they are called in backward
        if hooked != self._hooked or (self._bound is not None and self._bound.strayed(thorough=thorough)):
            self._hooked = hooked
            self._unbind()
        if self._values.travel:  # else nobody asks what was written
            self._values.transfer(self._then.written(), everything=everything)

    def _place_values(self) -> None:
        self._then = TensorSnapshot(self._parameters)
        self._values = ParameterValues(self._parameters, self._devices, self._cap_bytes)
        self._unbind()

    # Slots #

    def bind(self, *, leaves: bool) -> bool:
        """Put linked tensors, or leaves without gradients, into the copies' slots; False if they are there already."""
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
        """Whether what is in the copies' slots is of use."""
        return self._bound is not None

    def _unbind(self) -> None:
        self._leaves = self._linked = self._bound = None

    def _leaf_rows(self) -> "_Rows":
        if self._leaves is None:
            self._leaves = _Rows([self._new(device, requires_grad=True) for device in self._devices])
        for leaf in chain(*self._leaves.rows):
            leaf.grad = None  # of a step that failed halfway
        return self._leaves

    def _linked_rows(self) -> "_Rows":
        """Parameters for every copy, differentiable, linked bucket by bucket, late layers first."""
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
        """The network's parameters that have gradients, and the sums of those, in replica order.

        They are taken off the copies' leaves, and out of ``captured``, which may have some of the network's own
        parameters and of the leaves.
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
    """Parameters of all copies, a row for each, and where they were when they were made."""

    def __init__(self, rows: list[list[Tensor]]) -> None:
        self.rows = rows
        self._tensors = list(chain(*rows))
        self._addresses, self._layouts = addresses(self._tensors), Layouts(self._tensors)

    def strayed(self, *, thorough: bool) -> bool:
        """Whether any has other data now; if not ``thorough``, data elsewhere."""
        return addresses(self._tensors) != self._addresses or (thorough and self._layouts.changed())


def _hooked(parameters: Sequence[Tensor]) -> list[int]:
    """The numbers of those with gradient hooks. Each is linked alone: a node that runs calls the hooks of all its
    parameters, with None for those that got no gradient."""
    return [i for i, parameter in enumerate(parameters) if parameter._backward_hooks]


def _persists(tensor: Tensor) -> bool:
    """Whether copies of a parameter can be linked once and for all: it is a leaf, dense, and a plain tensor."""
    return tensor.is_leaf and tensor.layout == torch.strided and type(tensor) in (Parameter, Tensor)
