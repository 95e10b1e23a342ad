"""What stands in for parts of PyTorch's DDP: its reducer, its logger, hooks on buffers, and names refused here.

``wrapper.reducer`` and ``wrapper.logger`` have the methods that frameworks call between forward and backward: these
tell PyTorch's reducer that a backward is coming, that buckets may be rebuilt, or that statistics are due. None of that
is needed here, so they do nothing; a method that would change what is reduced raises an error by name, which says what
to use instead.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lockstep._base.inherited import message
from lockstep._base.inner_tensors import inner_tensors
from lockstep.distributed.reduction.module.buffers import Buffer
from lockstep.errors import CommunicationError, HookError, OptionError


class _OfWrapper:
    """Base class of objects that refer to their wrapper weakly, and refuse what they do not have by its name."""

    _kind: ClassVar[str]

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)

    def _of(self) -> Any:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper

    def _nothing(self, *arguments: object) -> None:
        """Do nothing: a round needs no such call, and data for the log are computed when they are read."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(message(self._kind, name), name=name, obj=self)


class CompatibleReducer(_OfWrapper):
    """The harmless methods of PyTorch's reducer."""

    _kind = "reducer"
    prepare_for_forward = prepare_for_backward = _push_all_rebuilt_params = _OfWrapper._nothing
    _set_static_graph = _set_optimizer_in_backward = set_logger = _OfWrapper._nothing

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are rebuilt at the end of the first backward, never by this call."""
        return False

    def _check_reducer_finalized(self) -> None:
        reducer = self._of()._replication.reducer
        if reducer is not None and reducer.in_backward:
            raise CommunicationError("the backward pass under way has not ended: its gradients are not reduced yet")

    def _ddp_graph_static(self) -> bool:
        """Return True if every synchronised backward so far has used the same parameters."""
        reducer = self._of()._replication.reducer
        return reducer is None or reducer.rank_state.is_static

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the rate, and do nothing: statistics cover every backward."""
        if sample_rate < 1:
            raise OptionError(
                f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}; it has no "
                "effect here"
            )

    def _remove_autograd_hooks(self) -> None:
        self._of()._remove_autograd_hooks()


class LoggingData(NamedTuple):
    """The result of ``wrapper.logger._get_ddp_logging_data()``."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class CompatibleLogger(_OfWrapper):
    """The harmless methods of PyTorch's logger."""

    _kind = "logger"
    set_construction_data_and_log = set_runtime_stats_and_log = _OfWrapper._nothing
    _set_comm_hook_name = _set_static_graph = _set_uneven_input_join = _OfWrapper._nothing

    def _get_ddp_logging_data(self) -> LoggingData:
        data = self._of()._get_ddp_logging_data()
        return LoggingData(
            {name: value for name, value in data.items() if isinstance(value, str)},
            {name: value for name, value in data.items() if not isinstance(value, str)},
        )

    def set_error_and_log(self, error: str) -> None:
        """Set ``has_error`` in the data."""
        self._of()._note_error(error)


BufferHookLocation = _BufferCommHookLocation
FutureKinds = (Future, torch._C.Future)


class BufferHook(NamedTuple):
    """A communication hook for buffers: its state, the function, and when it is called."""

    state: Any
    call: Callable[[Any, Mapping[str, Tensor]], Any]
    location: BufferHookLocation

    @torch.no_grad()
    def run(self, buffers: Sequence[Buffer]) -> None:
        """Call the hook with copies, wait for the futures that it returns, and assign the results.

        The hook gets copies because a graph may have saved the buffers for backward.
        """
        found = ((buffer, buffer.current()) for buffer in buffers)
        copies = [(buffer, tensor.detach().clone()) for buffer, tensor in found if tensor is not None]
        self._wait(self.call(self.state, {buffer.name: copied for buffer, copied in copies}))
        for buffer, copied in copies:
            buffer.assign(*inner_tensors(copied))

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
    """Raise :class:`HookError` for an object that is not a valid hook, or for an invalid location."""
    if not callable(hook):
        raise HookError(f"a hook for buffers must be callable, got {type(hook).__name__}")
    if not isinstance(location, BufferHookLocation):
        raise HookError(
            f"comm_hook_location must be a _BufferCommHookLocation, PRE_FORWARD or POST_FORWARD, got {location!r}"
        )


_MOVED = "forward moves its inputs itself (device_ids); lockstep.DataParallel and lockstep.local have several devices"
_FINAL = "gradients are complete when backward returns, and nothing has to be finalized"

INSTEAD = {
    "_register_fused_optim": (
        "run the optimizer in register_post_accumulate_grad_hook, which waits for the reduced gradient"
    ),
    "_update_process_group": "wrap wrapper.module anew, with process_group=",
    "finalize_backward": _FINAL,
    "gather": _MOVED,
    "require_manual_backward_finalization": _FINAL,
    "scatter": _MOVED,
    "should_finalize_after_backward": _FINAL,
    "to_kwargs": _MOVED,
}
"""What to use instead of a name of PyTorch's class, for names that programs call; its private ones have one text."""
