"""``wrapper.reducer`` and ``wrapper.logger``: the calls that programs make between forward and backward.

Frameworks that run forward or backward by themselves tell PyTorch's reducer that a backward is coming, that buckets may
be rebuilt, that statistics are due. None of that has to be told here, so these calls do nothing; what would change what
is reduced is refused by name.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lockstep.distributed.replication import Replication
from lockstep.errors import CommunicationError, OptionError
from lockstep.inherited import message

_INSTEAD = {
    "_autograd_hook": "gradients are noticed by hooks on the parameters",
    "_delay_all_reduce": "call backward under no_sync(), and the last one outside of it",
    "_get_local_used_map": "which parameters were used is found and compared in every backward",
    "_get_zeros_like_grad_buckets": "use wrapper.join() for ranks that run out of batches",
    "_install_post_backward_futures": "wait for it before optimizer.step(); gradients are complete after backward",
    "_reset_state": "a failed backward leaves nothing behind that would have to be reset",
    "_run_allreduce_hook": "a communication hook may return the transformed buffer, which is then averaged for it",
    "_run_comm_hook": "use wrapper.join() for ranks that run out of batches",
    "_set_forward_pass_work_handle": "use wrapper.join() for ranks that run out of batches",
    "_set_mixed_precision_param_dtype": "pass mixed_precision to the wrapper",
    "_set_sparse_metadata": "sparse gradients need none",
    "_update_process_group": "wrap the module anew, with process_group=",
    "get_backward_stats": "lockstep.statistics(wrapper) has the seconds of every phase",
}


class Wrapper(Protocol):
    """What is asked of the wrapper."""

    @property
    def _replication(self) -> Replication: ...

    def _get_ddp_logging_data(self) -> dict[str, Any]: ...

    def _note_error(self, error: str) -> None: ...

    def _remove_autograd_hooks(self) -> None: ...


class _OfWrapper:
    """What a wrapper gives out, and what does not keep the wrapper."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)

    def _of(self) -> Wrapper:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper


class CompatibleReducer(_OfWrapper):
    """The calls of PyTorch's reducer that are harmless."""

    def prepare_for_forward(self) -> None:
        """Nothing has to be prepared."""

    def prepare_for_backward(self, outputs: Iterable[Tensor] = ()) -> None:
        """Nothing has to be prepared: whether a backward synchronises is decided when it begins."""

    def _rebuild_buckets(self) -> bool:
        """Whether this call has rebuilt buckets: they are rebuilt at the end of the first backward."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Nothing has to be pushed."""

    def _check_reducer_finalized(self) -> None:
        """Raise :class:`CommunicationError` inside a backward pass; when one has returned, it has ended."""
        reducer = self._of()._replication.reducer
        if reducer is not None and reducer.in_backward:
            raise CommunicationError("the backward pass under way has not ended: its gradients are not reduced yet")

    def _ddp_graph_static(self) -> bool:
        """Whether every synchronised backward so far has used the same parameters."""
        reducer = self._of()._replication.reducer
        return reducer is None or reducer.participation.is_static

    def _set_static_graph(self) -> None:
        """Nothing is assumed of the graph either way."""

    def _set_optimizer_in_backward(self) -> None:
        """Optimizers that run in backward wait for the reduced gradient by themselves."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Statistics cover every backward."""
        if sample_rate < 1:
            raise OptionError(
                f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}; it has no "
                "effect here"
            )

    def _remove_autograd_hooks(self) -> None:
        self._of()._remove_autograd_hooks()

    def set_logger(self, logger: object) -> None:
        """Statistics need no logger."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(message("reducer", name, _INSTEAD.get(name)), name=name, obj=self)


class LoggingData(NamedTuple):
    """What ``wrapper.logger._get_ddp_logging_data()`` returns."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class CompatibleLogger(_OfWrapper):
    """The calls of PyTorch's logger that are harmless."""

    def _get_ddp_logging_data(self) -> LoggingData:
        data = self._of()._get_ddp_logging_data()
        return LoggingData(
            {name: value for name, value in data.items() if isinstance(value, str)},
            {name: value for name, value in data.items() if not isinstance(value, str)},
        )

    def set_construction_data_and_log(self, *arguments: object) -> None:
        """The data are read when they are asked for."""

    def set_runtime_stats_and_log(self) -> None:
        """The data are read when they are asked for."""

    def set_error_and_log(self, error: str) -> None:
        """Let the data say ``has_error``."""
        self._of()._note_error(error)

    def _set_comm_hook_name(self, name: str) -> None:
        """The names of hooks are read when they are asked for."""

    def _set_static_graph(self) -> None:
        """The options are read when they are asked for."""

    def _set_uneven_input_join(self) -> None:
        """Whether ranks join is read when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(message("logger", name, None), name=name, obj=self)
