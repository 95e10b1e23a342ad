"""Keeps copies of a network's parameters on other devices up to date, in a few flat transfers.

On the network's own device a value is the parameter's storage itself, seen through a tensor that shares its version
counter: nothing is ever copied, and autograd notices a write at the wrong moment just as on one device. On another
device it is a view of a flat buffer that lives as long as the replicas. A transfer rewrites buffers in place, and
increments the versions of exactly those values whose parameter was written. So a graph that has saved the value of
another parameter goes on undisturbed, and a graph that has saved a changed value says so, as it would on one device.

A write through ``.data`` leaves no trace in a version counter. So where only changed values are sent, *checksums* tell
which: each bucket's bits are summed on the source, weighted by place, and all sums are read at once. That reads the
values once and waits for the source; sending them would write them to every device. Values on the CPU are always sent,
since reading them takes as long.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from lockstep.buckets import Bucket, Slot, TensorSpec, plan_buckets
from lockstep.digests import Digests
from lockstep.local.comm import fill, pack, unpack


class ParameterValues:
    """The values of ``tensors`` (all on one device) on each of ``devices``; :meth:`on` returns them in order."""

    def __init__(self, tensors: Sequence[torch.Tensor], devices: Iterable[torch.device], cap_bytes: int) -> None:
        self._tensors = tensors
        self._source = tensors[0].device if tensors else None
        away = [device for device in dict.fromkeys(devices) if device != self._source]
        shared = [_storage_bucket(tensors, indices) for indices in _sharing_storage(tensors)]
        self._buckets = shared + _other_buckets(tensors, shared, cap_bytes)
        self._flats = {d: [_empty(bucket, d) for bucket in self._buckets] for d in away}
        self._values = {d: self._views(flats) for d, flats in self._flats.items()}
        if self._source is not None and self._source in devices:  # else old data would live on after p.data = new
            self._values[self._source] = [t.detach() for t in tensors]
        self._sums: torch.Tensor | None = None  # of what was sent last, if known
        self.transfer(range(len(tensors)), everything=True)

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

    def transfer(self, written: Iterable[int], *, everything: bool) -> None:
        """Update the values on other devices: ``everything``, or only the buckets that differ from what was sent last.

        The values of tensors known to be ``written`` get new versions.
        """
        if not self._flats:
            return
        changed = set(written)
        wanted = range(len(self._buckets)) if everything else self._differing(changed)
        if everything:
            self._sums = None
        for number in wanted:
            for flat, values in self._packed(number, self._buckets[number]):
                fill(flat, values)
        for device in self._flats:
            torch.autograd.graph.increment_version([self._values[device][i] for i in changed])

    def _differing(self, changed: set[int]) -> list[int]:
        """Return the numbers of the buckets that differ, or may differ, from what was sent last."""
        numbers = list(range(len(self._buckets)))
        if self._source is None or self._source.type == "cpu" or not numbers:
            return numbers
        source, before = self._source, self._sums
        sums = torch.stack([Digests([_flat(b.take(self._tensors))]).digest(source) for b in self._buckets])
        self._sums = sums
        same = [False] * len(numbers) if before is None else (sums == before).tolist()
        written = [not changed.isdisjoint(slot.index for slot in bucket.slots) for bucket in self._buckets]
        return [i for i in numbers if written[i] or not same[i]]

    def _packed(self, number: int, bucket: Bucket) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each device, the memory to write and the one tensor to write there."""
        members = [t.detach() for t in bucket.take(self._tensors)]
        flats = [flats[number] for flats in self._flats.values()]
        if len(members) == 1:  # nothing to pack
            return [(bucket.views(flat)[0], members[0]) for flat in flats]
        packed = pack(bucket, members)
        return [(flat, packed) for flat in flats]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors into one, so that a digest takes one pass; a single contiguous tensor is not copied."""
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


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


def _storage_bucket(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> Bucket:
    first = tensors[indices[0]]
    slots = [Slot(i, int(tensors[i].storage_offset()), tuple(tensors[i].shape), tensors[i].stride()) for i in indices]
    return Bucket(first.dtype, first.device, first.untyped_storage().nbytes() // first.itemsize, tuple(slots))


def _other_buckets(tensors: Sequence[torch.Tensor], shared: Sequence[Bucket], cap_bytes: int) -> list[Bucket]:
    taken = {slot.index for bucket in shared for slot in bucket.slots}
    rest = [i for i in range(len(tensors)) if i not in taken]
    plan = plan_buckets([TensorSpec.of(tensors[i]) for i in rest], cap_bytes)
    return [
        Bucket(b.dtype, b.device, b.numel, tuple(Slot(rest[s.index], s.offset, s.shape, s.stride) for s in b.slots))
        for b in plan.buckets
    ]


def _empty(bucket: Bucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
