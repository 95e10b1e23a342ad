"""Dropout in a check: off, or with masks that depend on the row, so that N processes can be compared with one."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep._base.inner_tensors import read_bytes
from lockstep.errors import OptionError

DROPOUTS = ("off", "rows", "on")
"""``off``: nothing is dropped. ``rows``: masks depend on the row, not on the rank. ``on``: as drawn."""


class Dropout(TorchDispatchMode):
    """While it is entered, masks of this thread follow ``how``; notes the state of the random numbers at the first.

    Every dropout on the CPU, that of attention and between recurrent layers too, draws its mask by
    ``bernoulli_(1 - p)``, and divides it by ``1 - p``; so do layers that leave out whole paths. ``off`` fills the mask
    with ``1 - p``. An operation is intercepted where backward computes it again, too.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows: Sequence[str] = ()
        """The digests of the rows of the present batch."""
        self.drawn_from: str | None = None
        """A digest of the state of the random numbers at the first mask of the step."""

    def begin(self, rows: Sequence[str]) -> None:
        """Begin a step with these rows."""
        self.rows, self.drawn_from = rows, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **kwargs or {})
        if self.drawn_from is None:
            self.drawn_from = hashlib.blake2b(read_bytes(torch.get_rng_state()), digest_size=8).hexdigest()
        if self.how == "on":
            return func(*args, **kwargs or {})
        mask, kept = args[0], args[1] if len(args) > 1 else 0.5
        return mask.fill_(kept) if self.how == "off" else self._fill_by_row(mask, kept)

    def _fill_by_row(self, mask: Tensor, kept: float) -> Tensor:
        """Draw each row of a mask from the row's digest and one random number, which is the same on all ranks."""
        if mask.dim() == 0 or len(mask) != len(self.rows):
            raise OptionError(
                f"dropout by row: the program draws a mask of shape {tuple(mask.shape)}, in a batch of "
                f"{len(self.rows)} rows; expected the rows first. Check with dropout off"
            )
        number = int(torch.randint(2**31, ()))
        for row, digest in zip(mask, self.rows, strict=True):
            seed = hashlib.blake2b(f"{number} {digest}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed))
            row.copy_(torch.rand(row.shape, generator=generator, dtype=torch.float64) < kept)
        return mask
