"""PURE: reductions of the ranks' values, element by element, always in rank order.

So a result has the same bits on every rank and in every run, whichever rank computes which part of it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep._base.texts import first_line
from lockstep.errors import OptionError
from lockstep.shm.messages import Op

_FUNCTIONS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


class TensorReduction:
    """Reduces tensors of one dtype, one per rank, to one tensor.

    Half precision is rounded once, at the end, for more than two ranks and for a mean. A mean of whole numbers is the
    mean of their exact sum, with the fraction cut off. ``rounded_to``: a dtype to which all sources are rounded before,
    and the result after.
    """

    def __init__(self, op: Op, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> None:
        check(op, dtype)
        self._rounded_to = None if rounded_to == dtype else rounded_to
        self._function = _FUNCTIONS[op]
        self._mean = op is Op.AVG
        self._wide = _wide(op, dtype)

    def __call__(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Write the reduction of two or more sources to ``out``, which may be one of them."""
        if self._rounded_to is not None:
            self._reduce_rounded(sources, out, self._rounded_to)
            return
        first, *others = sources
        into = out
        if self._wide is not None and (len(others) > 1 or self._mean):
            first = into = torch.empty_like(out, dtype=self._wide).copy_(first)
        elif len(others) > 1 and any(out.data_ptr() == other.data_ptr() for other in others):
            into = torch.empty_like(out)
        for other in others:
            self._function(first, other, out=into)
            first = into
        if self._mean:
            divide(into, len(sources))
        if into is not out:
            out.copy_(into)

    def _reduce_rounded(self, sources: Sequence[Tensor], out: Tensor, rounded_to: torch.dtype) -> None:
        into = sources[0].to(rounded_to).to(out.dtype)
        for other in sources[1:]:
            self._function(into, other.to(rounded_to), out=into)
        if self._mean:
            divide(into, len(sources))
        out.copy_(into.to(rounded_to))


reduction_of = lru_cache(256)(TensorReduction)
"""Returns the reduction of an operation and its dtypes: the same object each time."""


def divide(x: Tensor, count: int) -> None:
    """Divide a sum in place; whole numbers lose their fraction, as with NCCL."""
    whole = not (x.is_floating_point() or x.is_complex())
    x.div_(count, rounding_mode="trunc" if whole else None)


def _wide(op: Op, dtype: torch.dtype) -> torch.dtype | None:
    """Return the wider dtype in which to reduce, or None to reduce in ``dtype`` itself."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32 if op in (Op.SUM, Op.AVG, Op.PRODUCT) else None
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return torch.int64 if whole and op is Op.AVG else None


@lru_cache(256)
def check(op: Op, dtype: torch.dtype) -> None:
    """Raise unless this version of PyTorch can reduce values of the dtype with the operation."""
    try:
        sample = torch.ones(1, dtype=torch.uint8, device="cpu").to(dtype)
        if op is Op.AVG and dtype is torch.bool:
            raise TypeError("a mean needs numbers")
        result = _FUNCTIONS[op](sample, sample, out=torch.empty_like(sample))
        if op is Op.AVG:
            divide(result, 2)
    except (RuntimeError, TypeError, ValueError) as error:  # which one depends on the version
        raise OptionError(
            f"the shm process group cannot reduce {dtype} with {op.name}: {first_line(error)}; use another "
            "operation, or convert the tensor first"
        ) from error
