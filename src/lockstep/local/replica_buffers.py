"""Buffers of replicas, and their parameters that are computed, sparse or have inner tensors: new tensors at each use.

At each use every replica starts from the network's values. It gets new tensors, never a write into one that a live
graph may have saved. A frozen parameter needs no copy on the network's device: replicas have the parameter itself.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.inner_tensors import copied, is_ordinary
from lockstep.local.checks import require_on
from lockstep.local.comm import broadcast_coalesced
from lockstep.local.contents import identical
from lockstep.local.functions import link
from lockstep.local.module_copy import ModuleCopy, TensorSlot


class ReplicaBuffers:
    """The buffer slots of ``network``, whose tensors are on ``source``, and those parameter slots among ``others``.

    The first of the ``copies`` has the network's own tensors there if ``first_shares`` and it is on their device.
    """

    def __init__(
        self,
        network: Module,
        others: list[TensorSlot],
        copies: Sequence[ModuleCopy],
        devices: Sequence[torch.device],
        *,
        source: torch.device,
        first_shares: bool,
        cap_bytes: int,
    ) -> None:
        self._network = network
        self._copies = copies
        self._devices = devices
        self._source = source
        self._first_shares = first_shares
        self._cap_bytes = cap_bytes
        modules = list(network.modules())
        buffers = [("_buffers", i, name) for i, module in enumerate(modules) for name, _ in module._buffers.items()]
        self._slots = [*buffers, *others]
        self._names = [name for _, _, name in self._slots]
        self._holders = [getattr(modules[index], kind) for kind, index, _ in self._slots]
        self._sort(self._now())

    def refresh(self, *, grad: bool) -> None:
        """Bind new tensors to the copies' slots, differentiable ones with ``grad``."""
        now = self._now()
        if not identical(now, self._found):
            self._sort(now)
        if not self._sources or not self._copies:
            return
        linking = [grad and t.requires_grad for t in self._sources]
        rows = self._plain_copies([t for t, link in zip(self._sources, linking, strict=True) if not link])
        if any(linking):
            self._link(rows, linking)
        for copy, row in zip(self._copies, rows, strict=True):
            copy.bind(self._slots, [None if i is None else row[i] for i in self._order])

    def _now(self) -> list[Tensor | None]:
        return list(map(operator.getitem, self._holders, self._names))

    def _sort(self, found: list[Tensor | None]) -> None:
        """Record the tensors in the slots, each once, and the slots that each is in."""
        self._found = found
        self._sources = list({id(t): t for t in found if t is not None}.values())
        # These are copied one by one, with class and attributes.
        self._alone = {id(t) for t in self._sources if not is_ordinary(t)}
        numbers = {id(t): i for i, t in enumerate(self._sources)}
        self._order = [None if t is None else numbers[id(t)] for t in found]
        if any(t.device != self._source for t in self._sources):
            require_on(self._network, self._source)

    def _plain_copies(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return new tensors for every copy; as in PyTorch, a first replica shares those on the network's device."""
        away = [device for device in self._devices if device != self._source]
        packed = [tensor for tensor in tensors if id(tensor) not in self._alone]
        arrived = iter(broadcast_coalesced(packed, away, self._cap_bytes) if away else ())
        rows: list[list[Tensor]] = []
        for number, device in enumerate(self._devices):
            if device == self._source:
                shares = number == 0 and self._first_shares
                rows.append([self._on_source(tensor, shares=shares) for tensor in tensors])
            else:
                sent = iter(next(arrived))
                rows.append([copied(t, device) if id(t) in self._alone else next(sent) for t in tensors])
        return rows

    def _on_source(self, tensor: Tensor, *, shares: bool) -> Tensor:
        if isinstance(tensor, Parameter) and tensor.is_leaf and not tensor.requires_grad:
            return tensor
        if shares:
            return tensor if id(tensor) in self._alone else tensor.detach()
        return copied(tensor, self._source)

    def _link(self, rows: list[list[Tensor]], linking: list[bool]) -> None:
        """Insert differentiable copies of the tensors that need a gradient between the plain copies of the others."""
        indices = [i for i, link in enumerate(linking) if link]
        tensors = [self._sources[i] for i in indices]
        copies = broadcast_coalesced(tensors, self._devices, self._cap_bytes)
        for place, index in enumerate(indices):  # each on its own: one that is not used gets no gradient, nor its hooks
            linked = link([row[place].detach() for row in copies], [0], [tensors[place]])
            for row, tensor in zip(rows, linked, strict=True):
                row.insert(index, tensor)
