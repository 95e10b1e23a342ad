"""A number computed from the gradients of a step, which shows whether all ranks have the same gradients.

A step looks at a sample: at most ``TENSORS`` gradients, and about ``ELEMENTS`` elements, which are spread over each
gradient. The next step takes others, so that all are looked at in turn.

The number of gradients on an accelerator is compared in the next step, since the host would have to wait for the device
to have it at once, before it gives it any work of the step.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep._base.devices import CPU
from lockstep._base.digests import Digests
from lockstep.sharding.pieces import flat_gradient, gradient_of

ELEMENTS = 1 << 17
TENSORS = 128


class LateNumber:
    """A number of gradients on an accelerator, on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
        self._number.copy_(number, non_blocking=True)
        self._arrived = torch.accelerator.current_stream(number.device).record_event()

    def read(self) -> int:
        """Return the number when it has arrived."""
        self._arrived.synchronize()
        return int(self._number)


def number_of_gradients(named: Sequence[tuple[str, Tensor]], turn: int) -> int | LateNumber:
    """Return a number of 64 bits that depends on the bits of the sampled gradients of some parameters; one that is on
    its way, if any of them is on an accelerator.

    It is the same on all processors, since it does not depend on the order of its sums.
    """
    if not named:
        return 0
    apart = -(-len(named) // TENSORS)
    chosen = named[turn % apart :: apart]
    most = ELEMENTS // len(chosen)
    samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for name, parameter in chosen:
        sample = _sample(parameter, name, most, turn // apart)
        samples[sample.dtype, sample.device].append(sample)
    device = next((device for _, device in samples if device.type != "cpu"), CPU)
    number = Digests([torch.cat(each) for each in samples.values()]).digest(device)
    return int(number) if device == CPU else LateNumber(number)


def _sample(parameter: Tensor, name: str, most: int, turn: int) -> Tensor:
    """Return every n-th element of a gradient in the order of the parameter's memory, at most ``most``."""
    grad = parameter.grad
    assert grad is not None
    if type(grad) is not Tensor or not (grad.is_contiguous() and parameter.is_contiguous()):
        grad = gradient_of(parameter)
        grad = grad.coalesce().values().reshape(-1) if grad.is_sparse else flat_gradient(parameter, name)
    apart = -(-grad.numel() // most) or 1
    first = turn % apart
    return grad.as_strided((-(-(grad.numel() - first) // apart),), (apart,), grad.storage_offset() + first)


def digests_of_gradients(named: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Return a digest of each whole gradient."""
    return Digests([gradient_of(parameter) for _, parameter in named]).each()
