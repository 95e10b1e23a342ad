"""Names of PyTorch's DDP, some of them private, that programs read or call.

Kept: attributes that say how the wrapper was made; ``_set_static_graph`` and
``_set_params_and_buffers_to_ignore_for_model`` (many training frameworks call them), ``_register_builtin_comm_hook``,
``_register_buffer_comm_hook``, ``_distributed_rank``, ``will_sync_module_buffers``, ``_remove_autograd_hooks``, and
``_get_ddp_logging_data`` with the entries that do not come from PyTorch's own reducer.

``wrapper.reducer`` and ``wrapper.logger`` have the methods that frameworks call between forward and backward: these
tell PyTorch's reducer that a backward is coming, that buckets may be rebuilt, or that statistics are due. None of that
is needed here, so they do nothing; a method that would change what is reduced raises an error by name, which says what
to use instead.
"""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lockstep.distributed.comm.collectives import Group, global_ranks
from lockstep.distributed.reduction.buffers import Buffer
from lockstep.distributed.reduction.plan import MIB, ReductionPlan
from lockstep.distributed.replication.options import Options
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.errors import CommunicationError, HookError, OptionError
from lockstep.inherited import message, refusal


class _OfWrapper:
    """Base class of objects that refer to their wrapper weakly, and refuse what they do not have by its name."""

    _kind: ClassVar[str]

    def __init__(self, wrapper: "CompatibleNames") -> None:
        self._wrapper = weakref.ref(wrapper)

    def _of(self) -> "CompatibleNames":
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
        """Raise :class:`CommunicationError` inside a backward pass that is not over."""
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
    """Raise :class:`HookError` for an object that is not a valid hook, or for an invalid location."""
    if not callable(hook):
        raise HookError(f"a hook for buffers must be callable, got {type(hook).__name__}")
    if not isinstance(location, BufferHookLocation):
        raise HookError(
            f"comm_hook_location must be a _BufferCommHookLocation, PRE_FORWARD or POST_FORWARD, got {location!r}"
        )


_BUILTIN = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}


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


def _option(name: str) -> Any:
    """Return a read-only attribute: an option of the wrapper."""
    return property(attrgetter(f"_options.{name}"))


class CompatibleNames:
    """Attributes and private methods of PyTorch's wrapper that programs use in training."""

    module: Any
    _options: Options
    device_mesh = _option("device_mesh")
    find_unused_parameters = _option("find_unused_parameters")
    gradient_as_bucket_view = _option("gradient_as_bucket_view")
    batched_grad_copy = _option("batched_grad_copy")
    lazy_bucket_allocation = _option("lazy_bucket_allocation")
    skip_all_reduce_unused_params = _option("skip_all_reduce_unused_params")
    static_graph = _option("static_graph")
    mixed_precision = _option("mixed_precision")
    forward_sync_buffers = broadcast_buffers = _option("syncs_buffers")

    _active_ddp_module = None  # read by the compiler from PyTorch's class, for the backward of PyTorch's wrapper
    _buffer_hook: BufferHook | None = None
    _divide_by_initial_world_size = True
    _error = ""
    _hooks_removed = False
    _relied_on: ReductionPlan | None = None
    _use_python_reducer = False
    use_side_stream_for_tensor_copies = False
    dim = 0
    broadcast_bucket_size = 250 * MIB
    require_forward_param_sync = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            refused = refusal(type(self), name)
            if refused is None:
                raise
        raise AttributeError(refused, name=name, obj=self)

    @property
    def device_ids(self) -> list[int] | None:
        """The index of the accelerator that inputs are moved to, in a list; None if there is none."""
        return [
            torch.device(given).index if not isinstance(given, int) else given
            for given in self._options.device_ids or ()
        ] or None

    @property
    def output_device(self) -> int | None:
        """The index of the accelerator of :attr:`device_ids`, or None."""
        return next(iter(self.device_ids or ()), None)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.module.parameters())).device  # type: ignore[no-any-return]

    @property
    def device_type(self) -> str:
        """The type of :attr:`device`."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """True if parameters are on more than one device."""
        return len({parameter.device for parameter in self.module.parameters()}) > 1

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of a bucket in bytes."""
        return self._options.caps[-1]

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes in ``bucket_cap_mb_list``, in bytes."""
        return list(self._options.caps) if self._options.bucket_cap_mb_list else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """True if no size was given."""
        return self._options.bucket_cap_mb is None and not self._options.bucket_cap_mb_list

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are not replicated."""
        marked = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return {*self._options.params_and_buffers_to_ignore, *marked}

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The replicated buffers, by name."""
        ignored = self.parameters_to_ignore
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The replicated buffers."""
        return list(self.named_module_buffers.values())

    @property
    def _module_parameters(self) -> list[Parameter]:
        ignored = self.parameters_to_ignore
        return [parameter for name, parameter in self.module.named_parameters() if name not in ignored]

    @property
    def _delay_all_reduce_params(self) -> list[Parameter]:
        return [parameter for _, parameter in self._options.delay_all_reduce_named_params or ()]

    @property
    @abstractmethod
    def _replication(self) -> ReducerReplication:
        """The replication of the wrapper."""

    @property
    def reducer(self) -> CompatibleReducer:
        """The object for calls that programs make between forward and backward, which do nothing."""
        return CompatibleReducer(self)

    @property
    def logger(self) -> CompatibleLogger:
        """The object with the data of :meth:`_get_ddp_logging_data`, and with logging calls, which do nothing."""
        return CompatibleLogger(self)

    @property
    def process_group(self) -> Group:
        """The group over which gradients are reduced."""
        return self._replication.group

    @property
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        return [(hook, state) for state, hook in self._replication.hooks]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if buckets are final. A hook that reads this (ZeRO's) relies on the buckets from then on."""
        reducer = self._replication.reducer
        plan = None if reducer is None else reducer.common.plan.current
        if self._relied_on is not None and plan != self._relied_on:
            rank = global_ranks(self.process_group)[self._distributed_rank]
            raise HookError(
                f"rank {rank}: a hook keeps what the buckets held, and they have changed: a parameter was unfrozen, "
                "added, replaced, or used for the first time or several times in one backward. "
                "Build the optimizer and its hook anew, around a new wrapper of wrapper.module"
            )
        if reducer is None or not reducer.common.is_planned:
            return False
        self._relied_on = plan
        return True

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Return None: the compiler does not have to split its graphs at the ends of PyTorch's buckets."""

    @staticmethod
    def _get_data_parallel_params(module: Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def will_sync_module_buffers(self) -> bool:
        """Return True if buffers will be made equal at the end of the next backward that synchronises."""
        reducer = self._replication.reducer
        return reducer is not None and reducer.rank_state.requires_sync and bool(reducer.buffers.buffers)

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned."""

    def _note_error(self, error: str) -> None:
        self._error = error

    def _remove_autograd_hooks(self) -> None:
        """Stop synchronising for good: gradients stay local to each rank from now on."""
        self._replication.set_requires_gradient_sync(False)
        self._hooks_removed = True

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = BufferHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook(state, buffers)`` make buffers equal, before or after each forward, instead of the policy."""
        check_buffer_hook(hook, comm_hook_location)
        reducer = self._replication.started_reducer
        self._buffer_hook = BufferHook(state, hook, comm_hook_location)
        reducer.buffers.leave()

    def _run_buffer_hook(self, location: BufferHookLocation) -> None:
        hook = self._buffer_hook
        assert hook is not None
        if hook.location is location and self.require_forward_param_sync and self.forward_sync_buffers:
            reducer = self._replication.reducer
            if reducer is not None and reducer.buffers.buffers:
                hook.run(reducer.buffers.buffers)
        if location is BufferHookLocation.POST_FORWARD:
            self.require_forward_param_sync = torch.is_grad_enabled() and self._replication.requires_sync

    @property
    def _distributed_rank(self) -> int:
        return int(self.process_group.rank())

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        reducer = self._replication.reducer
        if reducer is not None and reducer.rounds:
            raise OptionError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed; it is not needed here"
            )
        self._options = replace(self._options, static_graph=True)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hook = _BUILTIN.get(getattr(comm_hook_type, "name", ""))
        if hook is None:
            raise HookError(f"expected a dist.BuiltinCommHookType, got {comm_hook_type!r}")
        self._replication.register_comm_hook(self.process_group, hook)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        options, replication = self._options, self._replication
        reducer = replication.started_reducer
        trained = [member.spec for member in reducer.parameters if member.parameter.requires_grad]
        error = self._error or reducer.error
        names = [getattr(hook, "__qualname__", str(hook)) for _, hook in replication.hooks]
        return {
            "world_size": reducer.collectives.world,
            "rank": reducer.collectives.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(options.find_unused_parameters),
            "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "iteration": reducer.rounds,
            "can_set_static_graph": int(reducer.rank_state.is_static and reducer.rounds > 0),
            "has_error": int(bool(error)),
            **({"error": error} if error else {}),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(spec.nbytes for spec in trained),
            "bucket_sizes": ", ".join(str(bucket.layout.nbytes) for bucket in reducer.common.plan.current.buckets),
            "join_uneven_inputs": int(hasattr(self, "_authoritative_rank") or self._join_config.enable),
            **({"comm_hook": ", ".join(names)} if names else {}),
        }
