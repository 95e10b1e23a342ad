"""A row of numbers on an accelerator, on its way to the host without anybody waiting for it."""

import torch
from torch import Tensor


class DeferredRow:
    """A copy that is begun now and read later."""

    def __init__(self, row: Tensor) -> None:
        self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._host.copy_(row, non_blocking=True)
        self._copied = torch.Event(row.device)
        self._copied.record()

    def arrived(self) -> Tensor:
        """The values, on the host; waits for the copy alone, not for what the accelerator was given since."""
        self._copied.synchronize()
        return self._host
