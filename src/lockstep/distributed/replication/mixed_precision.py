"""``mixed_precision`` of the wrapper and of ``replicate()``: forward in a lower precision.

While the module's forward runs, the slots of its modules hold copies of its parameters and buffers in lower precision.
A copy of a parameter is the output of a cast recorded by autograd, so its gradient arrives and is accumulated in the
parameter's own dtype; only the message between ranks is cast to the reduce dtype (:class:`ReduceIn`). Parameters do not
change: an optimizer, a checkpoint, and all code outside of forward see full precision. Changes that forward makes to a
buffer are written back.

A submodule that is called on its own, as by activation checkpointing inside of backward, is cast on its own.
"""

import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from lockstep._base.compiler import outside_compiler
from lockstep._base.identity_map import IdentityMap
from lockstep._base.tree import tree_map
from lockstep._base.wrapper import ModuleHook
from lockstep.distributed.reduction.buckets.comm_hooks import GradBucket
from lockstep.distributed.reduction.module.buffers import holders
from lockstep.errors import OptionError


def check_mixed_precision(config: Any) -> None:
    """Raise :class:`OptionError` for an object that is not a configuration."""
    if config is None:
        return
    if not isinstance(config, _MixedPrecision):
        raise OptionError(
            "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, got "
            f"{type(config).__name__}; torch.autocast around forward needs none"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(config, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise OptionError(f"mixed_precision: {name} must be a floating dtype or None, got {dtype!r}")


def reduce_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None for that of the parameters."""
    chosen: torch.dtype | None = config.reduce_dtype or config.param_dtype
    return chosen


class ReduceIn:
    """A communication hook that casts a bucket before it is sent."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, state: object, bucket: GradBucket) -> Tensor:
        """Return the bucket's gradients in the reduce dtype."""
        buffer = bucket.buffer()
        return buffer.to(self._dtype) if buffer.is_floating_point() else buffer


class _Slot(NamedTuple):
    """A slot whose tensor has been replaced by a copy."""

    place: dict[str, Any]
    key: str
    original: Tensor
    cast: Tensor


class Casts:
    """Replaces the parameters and buffers of one module tree while forward runs."""

    def __init__(self, module: Module, config: Any, left_alone: Iterable[Tensor]) -> None:
        self._param_dtype = config.param_dtype
        self._buffer_dtype = config.buffer_dtype
        self._root = weakref.ref(module)
        self._left_alone = {id(tensor): weakref.ref(tensor) for tensor in left_alone}
        self._inside: list[int] = []  # ids of the modules whose forward runs, outermost first
        self._thread = 0
        self._slots: list[_Slot] = []
        self._rnns: list[RNNBase] = []
        self._hooked: IdentityMap[None] = IdentityMap()
        self._handles: list[RemovableHandle] = []

    def attach(self, module: Module, undo: ExitStack) -> None:
        """Let the forwards of ``module`` run in lower precision from now on; ``undo`` removes the hooks again."""
        undo.callback(self._detach)
        for each in module.modules():
            self._hook(each)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: Module) -> None:
        """Let the forward of a submodule run in lower precision even if it is called on its own.

        Parametrizations are left out, since they are called wherever their parameter is read.
        """
        if module not in self._hooked and not isinstance(module, ParametrizationList):
            self._hooked[module] = None
            link = weakref.ref(self)  # a submodule may outlive the module

            def enter(module: Module, args: Any) -> None:
                if (casts := link()) is not None:
                    casts.enter(module)

            def leave(module: Module, args: Any, outputs: Any) -> None:
                if (casts := link()) is not None:
                    casts.leave(module)

            self._handles.append(module.register_forward_pre_hook(ModuleHook(module, enter)))
            last = ModuleHook(module, leave)  # prepended: other hooks see the originals
            self._handles.append(module.register_forward_hook(last, always_call=True, prepend=True))

    def inputs(self, value: Any) -> Any:
        """Return nested inputs with their floating tensors in the dtype of the parameters."""
        return value if self._param_dtype is None else tree_map(self._cast_input, value, "inputs")

    def _cast_input(self, leaf: Any) -> Any:
        return leaf.to(self._param_dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    @outside_compiler
    def enter(self, module: Module) -> None:
        """Replace parameters and buffers as the outermost forward begins."""
        thread = threading.get_ident()
        if self._inside and thread != self._thread:
            raise OptionError(
                "mixed_precision: forward was called while another thread is inside of it; parameters are exchanged "
                "while forward runs, so one thread at a time can call it. Use torch.autocast instead"
            )
        if self._inside and module is self._root():  # left over from an interrupted forward
            self._restore()
        if not self._inside:
            self._thread = thread
            self._exchange(module)
        self._inside.append(id(module))

    @outside_compiler
    def leave(self, module: Module) -> None:
        """Restore parameters and buffers as the outermost forward ends, even by an error."""
        if self._inside and self._inside[-1] == id(module) and threading.get_ident() == self._thread:
            self._inside.pop()
            if not self._inside:
                self._restore()

    def _exchange(self, module: Module) -> None:
        copies: dict[int, Tensor] = {}
        # Code inside of forward may need gradients even if forward is called without:
        # test_gradients_inside_of_a_forward_that_is_called_without.
        with torch.enable_grad():
            for owner in module.modules():
                # The module may be new: test_a_new_layer_that_is_checkpointed_is_cast_when_it_is_computed_again.
                self._hook(owner)
                self._exchange_in(owner._parameters, self._param_dtype, copies)
                self._exchange_in(owner._buffers, self._buffer_dtype, copies)
                if isinstance(owner, RNNBase):
                    self._rnns.append(owner)

    def _exchange_in(self, place: dict[str, Any], dtype: torch.dtype | None, copies: dict[int, Tensor]) -> None:
        for key, tensor in list(place.items()) if dtype is not None else ():
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype or self._is_left_alone(tensor):
                continue
            cast = copies.get(id(tensor))
            if cast is None:  # a tied tensor has one copy for all of its slots
                cast = copies[id(tensor)] = tensor.to(dtype)
            self._slots.append(_Slot(place, key, tensor, cast))
            place[key] = cast

    def _is_left_alone(self, tensor: Tensor) -> bool:
        link = self._left_alone.get(id(tensor))
        return (link is not None and link() is tensor) or getattr(tensor, "_ddp_ignored", False)

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore the original tensors, with the changes that forward has made to buffers."""
        slots = self._slots[:]
        self._slots.clear()
        self._inside.clear()
        for place, key, original, cast in slots:
            current = place.get(key)
            if isinstance(original, torch.nn.Parameter):
                if current is cast:
                    place[key] = original
            elif current is not None:
                place[key] = _written(original, current)
        for rnn in self._rnns:  # they have listed the casts in their forward
            rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
        self._rnns.clear()


def _written(original: Tensor, current: Tensor) -> Tensor:
    """Return a buffer with the values that forward has left; a new tensor if a graph may have saved the old one.

    Values that forward has not changed keep their precision. (Version counters do not show changes: batch normalisation
    writes without raising them.)
    """
    if current.shape != original.shape:
        return current.to(original.dtype)
    new = torch.where(current == original.to(current.dtype), original, current.to(original.dtype))
    return original.copy_(new) if not original.requires_grad and holders(original) <= 1 else new
