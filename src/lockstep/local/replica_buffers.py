"""Buffers of replicas, and their parameters that are computed, sparse or of a subclass: new tensors at each use.

At each use every replica starts from the network's values. It gets new tensors, never a write into one that a live
graph may have saved. Only if no gradient is wanted and everything is on the CPU may the tensors of the last use serve
again: those that still have the same bits as the network's (:class:`_Mirror`).
"""

import operator
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.devices import CPU
from lockstep.local.comm import broadcast_coalesced
from lockstep.local.contents import identical
from lockstep.local.functions import link
from lockstep.local.module_copy import ModuleCopy
from lockstep.tensor_state import Layouts, addresses, layouts


class ReplicaBuffers:
    """The buffer slots of ``network``, and those parameter slots that are among ``others``.

    The first of the ``copies`` has the network's own tensors there if ``first_shares`` and it is on their device.
    ``check`` raises an error naming a tensor that is not on the ``source`` device.
    """

    def __init__(
        self,
        network: Module,
        others: list[tuple[int, str]],
        copies: Sequence[ModuleCopy],
        devices: Sequence[torch.device],
        *,
        source: torch.device,
        first_shares: bool,
        cap_bytes: int,
        check: Callable[[torch.device], None],
    ) -> None:
        self._copies = copies
        self._devices = devices
        self._source = source
        self._check = check
        self._first_shares = first_shares
        self._cap_bytes = cap_bytes
        modules = list(network.modules())
        buffers = [(index, name) for index, module in enumerate(modules) for name, _ in module._buffers.items()]
        self._slots = {"_buffers": (0, buffers), "_parameters": (len(buffers), others)}
        slots = [(kind, index, name) for kind, (_, there) in self._slots.items() for index, name in there]
        self._names = [name for _, _, name in slots]
        self._holders = [getattr(modules[index], kind) for kind, index, _ in slots]
        self._in_copies = [[copy.holder(kind, index) for kind, index, _ in slots] for copy in copies]
        self._bound: list[list[Tensor | None]] = []
        self._mirror: _Mirror | None = None
        self._shared: tuple[list[Tensor], list[Tensor]] = [], []
        self._laid_out = layouts([])
        self._sort(self._now())

    def refresh(self, *, grad: bool, always: bool) -> set[int]:
        """Bind new tensors to the copies' slots; unless ``always``, only if the network's values are not there already.

        Returns the ids of the network's tensors that have entered or left a slot since the last call.
        """
        exchanged: set[int] = set()
        if not self._still_found():
            before = self._sources
            self._sort(self._now())
            exchanged = set(map(id, before)) ^ set(map(id, self._sources))
        elif not always and self._mirror is not None and self._mirror.current() and self._still_bound():
            return exchanged
        if not self._sources or not self._copies:
            return exchanged
        linking = [grad and t.requires_grad for t in self._sources]
        rows = self._plain_copies([t for t, link in zip(self._sources, linking, strict=True) if not link], always)
        if any(linking):
            self._link(rows, linking)
        self._bind(rows)
        return exchanged

    def _now(self) -> list[Tensor | None]:
        return list(map(operator.getitem, self._holders, self._names))

    def _still_found(self) -> bool:
        return identical(self._now(), self._found)

    def _still_bound(self) -> bool:
        """Return True if no forward of a replica has put another tensor into a slot."""
        now = chain.from_iterable(map(operator.getitem, holders, self._names) for holders in self._in_copies)
        return all(map(operator.is_, now, chain.from_iterable(self._bound)))

    def _sort(self, found: list[Tensor | None]) -> None:
        """Record the tensors in the slots, each once, and the slots that each is in."""
        self._found = found
        self._sources = list({id(t): t for t in found if t is not None}.values())
        numbers = {id(t): i for i, t in enumerate(self._sources)}
        self._order = [None if t is None else numbers[id(t)] for t in found]
        if any(t.device != self._source for t in self._sources):
            self._check(self._source)

    def _bind(self, rows: list[list[Tensor]]) -> None:
        self._bound = []
        for copy, row in zip(self._copies, rows, strict=True):
            tensors = [None if i is None else row[i] for i in self._order]
            for kind, (start, slots) in self._slots.items():
                copy.bind(kind, slots, tensors[start : start + len(slots)])
            self._bound.append(tensors)

    def _link(self, rows: list[list[Tensor]], linking: list[bool]) -> None:
        """Insert differentiable copies of the tensors that need a gradient between the plain copies of the others."""
        indices = [i for i, link in enumerate(linking) if link]
        tensors = [self._sources[i] for i in indices]
        copies = broadcast_coalesced(tensors, self._devices, self._cap_bytes)
        for place, index in enumerate(indices):  # each on its own: one that is not used gets no gradient, nor its hooks
            linked = link([row[place].detach() for row in copies], [0], [tensors[place]])
            for row, tensor in zip(rows, linked, strict=True):
                row.insert(index, tensor)

    def _plain_copies(self, tensors: list[Tensor], always: bool) -> list[list[Tensor]]:
        """Return new tensors for every copy; as in PyTorch, a first replica shares those on the network's device."""
        sharing = [n == 0 and self._first_shares and d == self._source for n, d in enumerate(self._devices)]
        self._mirror = None
        if not always and all(device == CPU for device in self._devices) and all(map(_is_plain, tensors)):
            self._mirror = _Mirror(tensors, sharing.count(False))
        away = [device for device in self._devices if device != self._source]
        arrived = iter(broadcast_coalesced(tensors, away, self._cap_bytes) if away and tensors else [[]] * len(away))
        mirrored = iter(self._mirror.rows if self._mirror is not None else ())
        rows: list[list[Tensor]] = []
        for device, shares in zip(self._devices, sharing, strict=True):
            if device != self._source:
                rows.append(list(next(arrived)))
            elif shares:
                rows.append(self._own_tensors(tensors))
            else:
                rows.append(_clones(tensors) if self._mirror is None else next(mirrored))
        return rows

    def _own_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the network's tensors for a replica: the same objects as last time, unless their data has moved."""
        originals, shared = self._shared
        laid_out = layouts(tensors)
        if not identical(tensors, originals) or addresses(shared) != addresses(originals) or laid_out != self._laid_out:
            self._shared = (tensors, [t.detach() for t in tensors])
            self._laid_out = laid_out
        return list(self._shared[1])


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor's values are all its bits, and they are in the CPU's memory."""
    kinds = (Tensor, Parameter, torch.nn.Buffer)
    return type(tensor) in kinds and tensor.layout == torch.strided and tensor.device == CPU and not tensor.is_quantized


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor, with memory of its own."""
    together = getattr(torch, "_foreach_clone", None)  # not in every version of PyTorch
    if together is None or not tensors or not {Tensor, Parameter, torch.nn.Buffer}.issuperset(map(type, tensors)):
        return [t.clone() for t in tensors]
    return list(together(tensors))


class _Mirror:
    """The values of CPU tensors in flat memory, one piece for each dtype, ``count`` times; :attr:`rows` are views."""

    def __init__(self, tensors: list[Tensor], count: int) -> None:
        self._tensors = tensors
        self._sizes = list(map(Tensor.numel, tensors))
        self._layouts = Layouts(tensors)
        self._groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            self._groups.setdefault((tensor.dtype, tensor.dim() == 1), []).append(index)
        self._grouped = [
            (torch.cat if flat else torch._utils._flatten_dense_tensors, [tensors[i] for i in indices])
            for (_, flat), indices in self._groups.items()
        ]
        now = self._pack()
        copies = [[flat.clone() for flat in now] for _ in range(count)]
        self._bits = [[flat.view(torch.uint8) for flat in flats] for flats in copies]
        self.rows = [self._views(flats) for flats in copies]

    def current(self) -> bool:
        """Return True if every copy still has exactly the bits of the tensors."""
        if self._layouts.changed():
            return False
        now = [flat.view(torch.uint8) for flat in self._pack()]
        return all(all(map(torch.equal, bits, now)) for bits in self._bits)

    def _pack(self) -> list[Tensor]:
        return [pack(group) for pack, group in self._grouped]

    def _views(self, flats: list[Tensor]) -> list[Tensor]:
        views = [torch.empty(0)] * len(self._tensors)
        for indices, flat in zip(self._groups.values(), flats, strict=True):
            for index, part in zip(indices, flat.split([self._sizes[i] for i in indices]), strict=True):
                views[index] = part.view(self._tensors[index].shape).data  # with a version counter of its own
        return views
