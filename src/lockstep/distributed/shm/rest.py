"""What shared memory does not do itself: it goes to a Gloo group beside it."""

import ctypes
import os
import weakref
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.compiler import outside_compiler
from lockstep.distributed.shm.overloads import with_overloads

_Gloo: Any = dist.ProcessGroupGloo  # its type does not have its options


def gloo(store: Any, rank: int, size: int, timeout: float, one_host: bool) -> Any:
    """A Gloo group; on one host it stays on the loopback interface, and connects when it is used.

    So nobody waits for a rank that dies meanwhile. (A rank that is alive but never comes ends the first use after
    Gloo's own attempts to connect, some 15 s, if the time-out is less.)
    """
    if one_host:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        options._timeout = timedelta(seconds=timeout)
        group = _Gloo(store, rank, size, options)
    else:
        group = _Gloo(store, rank, size, timedelta(seconds=timeout))
    _made.add(group)
    return group


_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _keep_in_child() -> None:
    """The end of a Gloo group waits for its threads, which a forked process does not have: it keeps its copy."""
    for group in list(_made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_in_child)


class CollectivesOfGloo:
    """Each is a method of its own: PyTorch's C++ looks them up by name."""

    @abstractmethod
    def _gloo(self) -> Any:
        """The Gloo group."""

    @outside_compiler
    @with_overloads(dist.GatherOptions, ["output_tensors", "input_tensors input_tensor"], ["root", "timeout"])
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Give one rank the tensors of all."""
        return self._gloo().gather(outputs, inputs, opts)

    @outside_compiler
    @with_overloads(dist.ScatterOptions, ["output_tensors output_tensor", "input_tensors"], ["root", "timeout"])
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Give every rank one of the tensors of one."""
        return self._gloo().scatter(outputs, inputs, opts)

    @outside_compiler
    @with_overloads(dist.AllToAllOptions, ["output_tensors", "input_tensors"])
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """Give every rank one of the tensors of each."""
        return self._gloo().alltoall(outputs, inputs, opts)

    @outside_compiler
    @with_overloads(
        dist.AllToAllOptions, ["output", "input", "output_split_sizes", "input_split_sizes"], ["timeout"], single=False
    )
    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Any:
        """The same, with one tensor for all."""
        return self._gloo().alltoall_base(output, x, output_sizes, input_sizes, opts)

    alltoall_base = all_to_all_single

    @outside_compiler
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Send tensors to one rank."""
        return self._gloo().send(tensors, dstRank, tag)

    @outside_compiler
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:
        """Receive tensors from one rank."""
        return self._gloo().recv(tensors, srcRank, tag)

    @outside_compiler
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive tensors from whoever sends some."""
        return self._gloo().recv_anysource(tensors, tag)
