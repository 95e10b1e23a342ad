"""Buffers of replicas, and their parameters that are computed, sparse or have inner tensors: new tensors at each use.

At each use every replica starts from the network's values. It gets new tensors, never a write into one that a live
graph may have saved. A frozen parameter needs no copy on the network's device: replicas have the parameter itself.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress

import torch
from torch import Tensor
from torch.nn import Module

from lockstep._base.inner_tensors import copied, is_ordinary
from lockstep._base.tensor_state import Layouts
from lockstep.errors import NotReplicableError
from lockstep.local.checks import require_on
from lockstep.local.comm import broadcast_coalesced
from lockstep.local.contents import identical
from lockstep.local.functions import link
from lockstep.local.module_copy import ModuleCopy, TensorSlot, put


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
        self._devices = devices
        self._source = source
        self._first_shares = first_shares
        self._cap_bytes = cap_bytes
        modules = list(network.modules())
        buffers = [("_buffers", i, name) for i, module in enumerate(modules) for name, _ in module._buffers.items()]
        self._slots = [*buffers, *others]
        self._names = [name for _, _, name in self._slots]
        self._holders = [getattr(modules[index], kind) for kind, index, _ in self._slots]
        self._targets = [copy.holders(self._slots) for copy in copies]
        self._given: list[list[Tensor | None]] = []  # to each copy, until forward has used them
        self._sort(self._now())

    def refresh(self, *, grad: bool) -> None:
        """Bind new tensors to the copies' slots, differentiable ones with ``grad``."""
        now = self._now()
        if not identical(now, self._found) or self._layouts.changed():
            self._sort(now)
        linking = self._requiring if grad else []
        plain = [t for t in self._sources if not t.requires_grad] if linking else self._sources
        rows: Iterable[Iterable[Tensor]] = self._plain_copies(plain)
        if linking:
            rows = self._linked([list(row) for row in rows], linking)
        self._given = []  # so that earlier ones go one by one
        for holders, row in zip(self._targets, rows, strict=True):
            put(holders, self._names, row if len(self._sources) == len(now) else self._for_slots(list(row)))
        unshared = self._targets[1 if self._shares(0) else 0 :]
        self._given = [list(map(operator.getitem, holders, self._names)) for holders in unshared]

    def _for_slots(self, row: list[Tensor]) -> list[Tensor | None]:
        return [None if i is None else row[i] for i in self._order]

    def check_sizes(self) -> None:
        """Raise :class:`~lockstep.errors.NotReplicableError` if forward has made a buffer of a replica larger in place.

        Buffers of a replica may share memory, so it may have written into others. Call this after forward.
        """
        given, self._given = self._given, []
        for row in given:
            if list(map(_numel, row)) != self._numels:
                self._check_sizes(row)

    def _check_sizes(self, given: list[Tensor | None]) -> None:
        storages = Counter(_storage(t) for t in given if t is not None)
        for name, tensor, numel in zip(self._names, given, self._numels, strict=True):
            if tensor is not None and tensor.numel() > numel and storages[_storage(tensor)] > 1:
                raise NotReplicableError(
                    f"forward has resized buffer {name} of a replica in place, from {numel} elements to "
                    f"{tensor.numel()}: it may have written into other buffers, which share its memory. Let the buffer "
                    "have its size before the module is replicated (run the module itself on one batch), or assign a "
                    "new tensor"
                )

    def _shares(self, number: int) -> bool:
        return number == 0 and self._first_shares and self._devices[:1] == [self._source]

    def _now(self) -> list[Tensor | None]:
        return list(map(operator.getitem, self._holders, self._names))

    def _sort(self, found: list[Tensor | None]) -> None:
        """Record the tensors in the slots, each once, and the slots that each is in."""
        self._sources = list({id(t): t for t in found if t is not None}.values())
        # These are copied one by one, with class and attributes.
        self._alone = {id(t) for t in self._sources if type(t) is not Tensor or not is_ordinary(t)}
        slots = zip(self._slots, found, strict=True)
        self._in_parameter_slots = {id(t) for (kind, *_), t in slots if kind == "_parameters" and t is not None}
        numbers = {id(t): i for i, t in enumerate(self._sources)}
        self._order = [None if t is None else numbers[id(t)] for t in found]
        if any(t.device != self._source for t in self._sources):
            require_on(self._network, self._source)
        self._requiring = [i for i, t in enumerate(self._sources) if t.requires_grad]
        self._numels = list(map(_numel, found))
        self._layouts = Layouts(self._sources)
        self._batches = _in_batches(self._sources)
        self._found = found

    def _plain_copies(self, tensors: list[Tensor]) -> Iterator[Iterable[Tensor]]:
        """Make new tensors for every copy; as in PyTorch, a first replica shares those on the network's device."""
        alone = self._alone.union(map(id, compress(tensors, map(vars, tensors))))
        packed = [t for t in tensors if id(t) not in alone] if alone else tensors
        away = [device for device in self._devices if device != self._source]
        arrived = iter(broadcast_coalesced(packed, away, self._cap_bytes) if away else ())
        for number, device in enumerate(self._devices):
            shares = self._shares(number)
            if shares:
                made: Iterable[Tensor] = [t.detach() if t.requires_grad else t for t in packed]
            elif device == self._source:
                made = chain.from_iterable(map(_CopyBatch.clones, self._batches_of(packed)))
            else:
                made = next(arrived)
            if alone:
                packed_ones = iter(made)
                made = [self._one(t, device, shares) if id(t) in alone else next(packed_ones) for t in tensors]
            yield made

    def _batches_of(self, tensors: list[Tensor]) -> list["_CopyBatch"]:
        return self._batches if tensors is self._sources else _in_batches(tensors)

    def _one(self, tensor: Tensor, device: torch.device, shares: bool) -> Tensor:
        frozen = id(tensor) in self._in_parameter_slots and tensor.is_leaf and not tensor.requires_grad
        return tensor if device == self._source and (shares or frozen) else copied(tensor, device)

    def _linked(self, rows: list[list[Tensor]], indices: list[int]) -> list[list[Tensor]]:
        """Insert differentiable copies of the tensors that need a gradient between the plain copies of the others."""
        tensors = [self._sources[i] for i in indices]
        copies = broadcast_coalesced(tensors, self._devices, self._cap_bytes)
        for place, index in enumerate(indices):  # each on its own: one that is not used gets no gradient, nor its hooks
            linked = link([row[place].detach() for row in copies], [0], [tensors[place]])
            for row, tensor in zip(rows, linked, strict=True):
                row.insert(index, tensor)
        return rows


def _numel(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor.numel()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


_clone_all: Callable[[list[Tensor]], Iterable[Tensor]] = getattr(torch, "_foreach_clone", partial(map, Tensor.clone))
_ALIGNMENT = 16  # of every copy, so that it can be viewed as any dtype; vectors of one element, which quantizers resize
# in place, keep memory of their own
_BATCH = 256  # Python would look for garbage if thousands of copies were made before the old ones go


def _in_batches(tensors: list[Tensor]) -> list["_CopyBatch"]:
    return [_CopyBatch(tensors[i : i + _BATCH]) for i in range(0, len(tensors), _BATCH)]


class _CopyBatch:
    """Some tensors to be copied together: those of one dimension through one tensor, which takes half the time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        vectors: dict[torch.dtype, list[int]] = defaultdict(list)
        rest: list[int] = []
        for i, tensor in enumerate(tensors):
            is_vector = tensor.dim() == 1 and tensor.layout == torch.strided
            fits = is_vector and tensor.nbytes and not tensor.nbytes % _ALIGNMENT
            (vectors[tensor.dtype] if fits else rest).append(i)
        groups = [[tensors[i] for i in members] for members in vectors.values()]
        self._vectors = [(members, [t.numel() for t in members]) for members in groups]
        self._rest = [tensors[i] for i in rest]
        made = {place: number for number, place in enumerate(chain(*vectors.values(), rest))}
        self._order = [made[i] for i in range(len(tensors))]

    def clones(self) -> Iterable[Tensor]:
        """Return copies of the tensors, in their order; each counts its own versions."""
        made: list[Tensor] = []
        for members, sizes in self._vectors:
            made += torch.unsafe_split_with_sizes(torch.cat(members), sizes)
        made += _clone_all(self._rest) if self._rest else ()
        return map(made.__getitem__, self._order)
