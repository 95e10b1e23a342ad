"""The values of a network's parameters on other devices, brought up to date in a few flat transfers.

On the network's own device a value is the parameter's storage itself, seen through a tensor that shares its version
counter: nothing is ever copied, and a write in the wrong moment is noticed by autograd just as on one device. On
another device it is a view of a flat buffer that lives as long as the replicas. A transfer rewrites buffers in place,
and counts up the versions of exactly those values whose parameter was written. So a graph that has saved another
parameter's value goes on undisturbed, and one that has saved a changed value says so, as it would on one device.
"""

from collections.abc import Iterable, Sequence

import torch

from lockstep.buckets import Bucket, TensorSpec, plan_buckets
from lockstep.local.comm import fill, pack, unpack


class ParameterValues:
    """Values of ``tensors`` (all on one device) on each of ``devices``: :meth:`on` a device, in the tensors' order."""

    def __init__(self, tensors: Sequence[torch.Tensor], devices: Iterable[torch.device], cap_bytes: int) -> None:
        self._tensors = tensors
        self._buckets = plan_buckets([TensorSpec.of(t) for t in tensors], cap_bytes).buckets
        self._source = tensors[0].device if tensors else None
        away = [device for device in dict.fromkeys(devices) if device != self._source]
        self._flats = {d: [_empty(bucket, d) for bucket in self._buckets] for d in away}
        self._values = {d: self._views(flats) for d, flats in self._flats.items()}
        if self._source is not None:
            self._values[self._source] = [t.detach() for t in tensors]
        self.transfer(range(len(tensors)), everything=True)

    def _views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: list[torch.Tensor] = [torch.empty(0)] * len(self._tensors)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for slot, view in zip(bucket.slots, unpack(bucket, flat), strict=True):
                values[slot.index] = view
        return values

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """The values on one of the devices."""
        return self._values[device] if self._tensors else []

    def transfer(self, written: Iterable[int], *, everything: bool) -> int:
        """Bring the values up to date: those of ``written`` tensors, or of all. Returns the bytes that were copied."""
        if not self._flats:
            return 0
        changed, copied = set(written), 0
        for number, bucket in enumerate(self._buckets):
            if not everything and changed.isdisjoint(slot.index for slot in bucket.slots):
                continue
            members = [t.detach() for t in bucket.take(self._tensors)]
            # a bucket of one is written straight into its view: there is nothing to pack
            packed = pack(bucket, members) if len(members) > 1 else None
            for flats in self._flats.values():
                flat = flats[number]
                fill(
                    flat if packed is not None else bucket.views(flat)[0],
                    members[0] if packed is None else packed,
                )
                copied += bucket.nbytes
        for device in self._flats:
            torch.autograd.graph.increment_version([self._values[device][i] for i in changed])
        return copied


def _empty(bucket: Bucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
