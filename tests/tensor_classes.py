"""Classes of parameters and buffers as packages have them: packed weights, attributes, code of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten

DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype) and "q" not in str(each)}, key=str
)
"""All dtypes but those of quantised tensors, which have a quantiser besides."""


class Packed(torch.Tensor):
    """A weight of integers and a scale, as torchao's are: it says where its values lie."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> Any:
        """A tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=scale.dtype, device=payload.device)

    def __init__(self, payload: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> None:
        self.payload = payload
        self.scale = scale
        self.bits = bits

    def __tensor_flatten__(self) -> Any:
        """The names of the inner tensors, and what else there is."""
        return ["payload", "scale"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        """The tensor, from what __tensor_flatten__ returns."""
        return cls(inner["payload"], inner["scale"], context["bits"])

    def whole(self) -> torch.Tensor:
        """The values."""
        return self.payload.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Copy, move and multiply; nothing else."""
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            where = {"device": kwargs["device"]} if kwargs.get("device") is not None else {}
            made = cls(func(args[0].payload, **where), func(args[0].scale, **where), args[0].bits)
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func in (aten.t.default, aten.mm.default, aten.addmm.default):
            return func(*[each.whole() if isinstance(each, Packed) else each for each in args], **kwargs)
        raise NotImplementedError(f"Packed cannot run {func}")


class Hiding(Packed):
    """A buffer that says where its values lie, a number of times."""

    left: int | None = None

    def __tensor_flatten__(self) -> Any:
        """As often as it may."""
        if self.left == 0:
            raise ArithmeticError("not again")
        if self.left is not None:
            self.left -= 1
        return super().__tensor_flatten__()


class Opaque(torch.Tensor):
    """A tensor whose values only its own code can find."""

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> Any:
        """A tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, hidden.shape, dtype=hidden.dtype, device=hidden.device)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Run the operation on what is hidden."""
        found = func(*[each.hidden if isinstance(each, Opaque) else each for each in args], **(kwargs or {}))
        return cls(found) if func in (aten.detach.default, aten.clone.default) else found


class State:
    """What bitsandbytes has beside four-bit weights."""

    def __init__(self, absmax: torch.Tensor, kind: str = "nf4", nested: State | None = None) -> None:
        self.absmax = absmax
        self.kind = kind
        self.nested = nested


class Quantised(nn.Parameter):
    """Packed integers in memory of its own, and the rest of its values in an attribute."""

    def __new__(cls, data: torch.Tensor, state: State | None = None, requires_grad: bool = False) -> Any:
        """A parameter with a state."""
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.state = state
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As in PyTorch."""
        return super().__torch_function__(func, types, args, kwargs or {})


class Marked(nn.Parameter):
    """A parameter of a class that adds methods only."""

    @property
    def is_marked(self) -> bool:
        """Tell the class."""
        return True


class Attributed(torch.Tensor):
    """A tensor of a class that adds nothing."""
