"""The parameters in the slots of replicas, their values, and their gradients.

A copy's parameters are made once, of the class of the network's, around values that are kept up to date. Their
attributes are those of the network's parameters at each use, and their graph leads to the network's parameters.

On the network's own device a value is the parameter's storage itself, seen through a tensor that shares its version
counter: nothing is ever copied, and autograd notices a write at the wrong moment just as on one device. On another
device it is a view of a flat buffer that lives as long as the replicas. A transfer rewrites buffers in place, and
increments the versions of exactly those values whose parameter was written. So a graph that has saved the value of
another parameter goes on undisturbed, and a graph that has saved a changed value says so, as it would on one device.

Values are sent at each use, also those that no version counter says were written: a write through ``.data`` leaves no
trace, and to look for one, the host would have to wait for the device.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, compress, count

import torch
from torch import Tensor
from torch.nn import Module

from lockstep._base.buckets import BucketSlot, FlatBucket, TensorSpec, plan_buckets
from lockstep._base.devices import current_streams, is_accelerator
from lockstep._base.inner_tensors import inner_tensors, is_plain, like
from lockstep._base.tensor_state import Change, TensorSnapshot
from lockstep.local.comm import fill_all, pack, unpack
from lockstep.local.functions import link
from lockstep.local.module_copy import ModuleCopy, TensorSlot, put


class ParameterValues:
    """The values of ``tensors`` (all on one device) on each of ``devices``; :meth:`on` returns them in order."""

    def __init__(self, tensors: Sequence[torch.Tensor], devices: Iterable[torch.device], cap_bytes: int) -> None:
        self._tensors = tensors
        self._source = tensors[0].device if tensors else None
        away = [device for device in dict.fromkeys(devices) if device != self._source]
        shared = [_storage_bucket(tensors, indices) for indices in _sharing_storage(tensors)]
        self._buckets = shared + _other_buckets(tensors, shared, cap_bytes)
        self._whole_storages = len(shared)  # the first buckets
        self._flats = {d: [_empty(bucket, d) for bucket in self._buckets] for d in away}
        self._values = {d: self._views(flats) for d, flats in self._flats.items()}
        if self._source is not None and self._source in devices:  # else old data would live on after p.data = new
            self._values[self._source] = [t.detach() for t in tensors]
        self.transfer(range(len(tensors)))

    def _views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = [torch.empty(0)] * len(self._tensors)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for slot, view in zip(bucket.slots, unpack(bucket, flat), strict=True):
                values[slot.index] = view
        return values

    @property
    def travel(self) -> bool:
        """True if there are values on other devices."""
        return bool(self._flats)

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the values on one of the devices."""
        return self._values[device] if self._tensors else []

    def transfer(self, written: Iterable[int]) -> None:
        """Send all values to the other devices; the values of tensors known to be ``written`` get new versions."""
        for number, bucket in enumerate(self._buckets if self._flats else ()):
            flats = [flats[number] for flats in self._flats.values()]
            one = len(bucket.slots) == 1  # its values may lie in another order than a flat tensor's
            fill_all([bucket.views(flat)[0] for flat in flats] if one else flats, self._together(number, bucket))
        changed = list(written)
        for device in self._flats:
            torch.autograd.graph.increment_version([self._values[device][i] for i in changed])

    def _together(self, number: int, bucket: FlatBucket) -> torch.Tensor:
        """Return the values of a bucket in one tensor, on their own device: the tensor itself if it is the only one."""
        members = [t.detach() for t in bucket.take(self._tensors)]
        if number < self._whole_storages:
            return members[0].as_strided((bucket.numel,), (1,), 0)
        return members[0] if len(members) == 1 else pack(bucket, members)


def _sharing_storage(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group tensors that lie in one storage and fill most of it, such as the weights of a cuDNN RNN.

    They are sent as that storage and keep their places in it: cuDNN wants its weights in one chunk, in its order.
    """
    groups: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.untyped_storage().data_ptr(), tensor.dtype].append(index)
    return [
        indices
        for indices in groups.values()
        if len(indices) > 1
        and 2 * sum(tensors[i].nbytes for i in indices) > tensors[indices[0]].untyped_storage().nbytes() > 0
    ]


def _storage_bucket(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> FlatBucket:
    first = tensors[indices[0]]
    slots = [
        BucketSlot(i, int(tensors[i].storage_offset()), tuple(tensors[i].shape), tensors[i].stride()) for i in indices
    ]
    return FlatBucket(first.dtype, first.device, first.untyped_storage().nbytes() // first.itemsize, tuple(slots))


def _other_buckets(tensors: Sequence[torch.Tensor], shared: Sequence[FlatBucket], cap_bytes: int) -> list[FlatBucket]:
    taken = {slot.index for bucket in shared for slot in bucket.slots}
    rest = [i for i in range(len(tensors)) if i not in taken]
    plan = plan_buckets([TensorSpec.of(tensors[i]) for i in rest], cap_bytes)
    return [
        FlatBucket(
            b.dtype, b.device, b.numel, tuple(BucketSlot(rest[s.index], s.offset, s.shape, s.stride) for s in b.slots)
        )
        for b in plan.buckets
    ]


def _empty(bucket: FlatBucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)


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
        self._slots: dict[TensorSlot, int | None] = {}
        self.recopied: list[TensorSlot] = []
        self._sort(modules)
        self._hooked = _hooked(self._parameters)
        self._bound: _ParameterRows | None
        homes = (p.device for p in self._parameters[:1])
        self._accelerators = [device for device in (*homes, *devices) if is_accelerator(device)]
        self._place_values()

    def _sort(self, modules: Sequence[Module]) -> None:
        """Find the parameters that persist, with the module of each, and the slots that get new tensors each time."""
        numbers: dict[int, int] = {}
        for index, module in enumerate(modules):
            for name, tensor in module._parameters.items():
                slot = ("_parameters", index, name)
                if tensor is not None and not _persists(tensor):
                    self.recopied.append(slot)
                    continue
                if tensor is not None and id(tensor) not in numbers:
                    self._parameters.append(tensor)
                    self._owners.append(index)
                self._slots[slot] = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))

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
            self._bound = None
        return True

    def refresh(self, *, gradients: bool) -> None:
        """Update the values of all parameters, and the links to the network's if ``gradients`` are wanted.

        If a copy's forward gave a parameter other data (``p.data = ...``), which no transfer would reach, all copies
        get new parameters. So they do for a use with gradients under other streams than the last one: autograd goes on
        using the streams on which the parameters were linked.
        """
        hooked, streams = self._hooked, None
        if gradients:  # both matter in backward only
            hooked, streams = _hooked(self._parameters), current_streams(self._accelerators)
        if hooked != self._hooked or (self._bound is not None and not self._bound.valid(streams)):
            self._hooked = hooked
            self._bound = None
        if self._values.travel:  # else the list of written values is not needed
            self._values.transfer(self._then.written())

    def _place_values(self) -> None:
        self._then = TensorSnapshot(self._parameters)
        self._values = ParameterValues(self._parameters, self._devices, self._cap_bytes)
        self._bound = None

    # Slots #

    def bind(self) -> bool:
        """Bind linked tensors to the copies' slots, with the attributes of the network's parameters; return False if
        they already are bound."""
        if self._bound is not None:
            self._take_attributes(self._bound)
            return False
        rows = [self._new(device) for device in self._devices]
        for copy, tensors in zip(self._copies, rows, strict=True):
            in_slots = [None if i is None else tensors[i] for i in self._slots.values()]
            put(copy.holders(self._slots), [name for _, _, name in self._slots], in_slots)
        self._link(rows)  # not while old ones are in the slots: they keep the network's nodes, with other streams
        self._bound = _ParameterRows(rows, current_streams(self._accelerators))
        self._take_attributes(self._bound)
        return True

    def _take_attributes(self, wanted: "_ParameterRows") -> None:
        """Give the copies' parameters the attributes that the network's have now."""
        wanted.with_attributes.update(compress(count(), map(vars, self._parameters)))
        for number in wanted.with_attributes:
            for row in wanted.rows:
                attributes = vars(row[number])
                attributes.clear()
                attributes.update(vars(self._parameters[number]))

    @property
    def bound(self) -> bool:
        """True if the tensors in the copies' slots are valid."""
        return self._bound is not None

    def _link(self, rows: list[list[Tensor]]) -> None:
        """Make the parameters of all copies differentiable, bucket by bucket, late layers first."""
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

    def _new(self, device: torch.device) -> list[Tensor]:
        pairs = zip(self._values.on(device), self._parameters, strict=True)
        return [like(value, parameter, requires_grad=False) for value, parameter in pairs]


class _ParameterRows:
    """Parameters of all copies, one row for each copy, and what they were like when they were made."""

    def __init__(self, rows: list[list[Tensor]], streams: list[torch.Stream]) -> None:
        self.rows = rows
        self.streams = streams
        """The streams on which gradients are summed: those that were current when the parameters were linked."""
        self.with_attributes: set[int] = set()
        """The numbers of the parameters that have got attributes."""
        self._snapshot = TensorSnapshot(list(chain(*rows)))

    def valid(self, streams: list[torch.Stream] | None) -> bool:
        """Return True unless a parameter has other data now, or the streams, where they matter, are other ones."""
        return streams in (None, self.streams) and self._snapshot.change(gradients=False) is Change.NONE


def _hooked(parameters: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the parameters with gradient hooks. Each is linked alone: a node that runs calls the hooks
    of all its parameters, with None for those that got no gradient."""
    return [i for i, parameter in enumerate(parameters) if parameter._backward_hooks]


def _persists(tensor: Tensor) -> bool:
    """Return True if copies of a parameter can be linked once and for all: it is a leaf, with all values in memory of
    its own."""
    return tensor.is_leaf and is_plain(tensor) and (tensor.requires_grad or len(inner_tensors(tensor)) == 1)
