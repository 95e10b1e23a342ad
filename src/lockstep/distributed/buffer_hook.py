"""``wrapper._register_buffer_comm_hook``: a hook that makes buffers equal in place of the policy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lockstep.distributed.buffers import Buffer
from lockstep.errors import HookError

BufferHookLocation = _BufferCommHookLocation
FutureKinds = (Future, torch._C.Future)


class BufferHook(NamedTuple):
    """What is called, with what, and when."""

    state: Any
    call: Callable[[Any, Mapping[str, Tensor]], Any]
    location: BufferHookLocation

    @torch.no_grad()
    def run(self, buffers: Sequence[Buffer]) -> None:
        """Call the hook with copies, wait for the futures that it returns, and assign what it has written.

        Copies, for a pending backward may have saved the buffers themselves.
        """
        found = ((buffer, buffer.current()) for buffer in buffers)
        copies = [(buffer, tensor.detach().clone()) for buffer, tensor in found if tensor is not None]
        self._wait(self.call(self.state, {buffer.name: copied for buffer, copied in copies}))
        for buffer, copied in copies:
            buffer.assign(copied)

    def _wait(self, futures: Any) -> None:
        if futures is None:
            return
        futures = [futures] if isinstance(futures, FutureKinds) else futures
        if not isinstance(futures, list | tuple) or not all(isinstance(each, FutureKinds) for each in futures):
            raise HookError(
                "the hook that _register_buffer_comm_hook() was given must return None or a list of "
                f"torch.futures.Future, got {type(futures).__name__}; return what its collectives' get_future() gives"
            )
        for future in futures:
            future.wait()


def check_buffer_hook(hook: Any, location: Any) -> None:
    """Raise :class:`HookError` for what cannot be a hook, or a place for one."""
    if not callable(hook):
        raise HookError(f"a hook for buffers must be callable, got {type(hook).__name__}")
    if not isinstance(location, BufferHookLocation):
        raise HookError(
            f"comm_hook_location must be a _BufferCommHookLocation, PRE_FORWARD or POST_FORWARD, got {location!r}"
        )
