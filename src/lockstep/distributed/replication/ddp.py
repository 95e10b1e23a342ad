"""``DistributedDataParallel``: a wrapper with PyTorch's interface, implemented by ``replicate()``.

:class:`CompatibleNames` has the attributes that say how the wrapper was made, and the few private names that training
frameworks and PyTorch's own code read. All others are refused by name (``ddp_compat.py``).
"""

import copy
import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep._base.compiler import outside_compiler
from lockstep._base.inherited import refusal, refusing
from lockstep._base.wrapper import is_of_module, naming_options
from lockstep.distributed.comm.groups import (
    Group,
    control_device,
    global_ranks,
    resolve_group,
)
from lockstep.distributed.reduction.buckets.plan import ReductionPlan
from lockstep.distributed.reduction.module.buffer_sync import Policy
from lockstep.distributed.replication.ddp_compat import INSTEAD, LoggingData, UnneededCalls
from lockstep.distributed.replication.join import ShadowHook, enter_iteration
from lockstep.distributed.replication.options import Options
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import register
from lockstep.distributed.replication.training_alone import training_alone
from lockstep.errors import CommunicationError, HookError, NotReplicableError, OptionError


def _option(name: str) -> Any:
    return property(attrgetter(f"_options.{name}"))


class CompatibleNames:
    """The attributes of PyTorch's wrapper that frameworks, and PyTorch's own code, read from a wrapper in training."""

    module: Any
    _options: Options
    device_mesh = _option("device_mesh")
    find_unused_parameters = _option("find_unused_parameters")
    gradient_as_bucket_view = _option("gradient_as_bucket_view")
    batched_grad_copy = _option("batched_grad_copy")
    lazy_bucket_allocation = _option("lazy_bucket_allocation")
    skip_all_reduce_unused_params = _option("skip_all_reduce_unused_params")
    static_graph = _option("static_graph")
    forward_sync_buffers = broadcast_buffers = _option("syncs_buffers")

    _active_ddp_module = None  # read by the compiler from PyTorch's class, for the backward of PyTorch's wrapper
    _relied_on: ReductionPlan | None = None
    dim = 0
    mixed_precision = None
    require_forward_param_sync = True  # set by Accelerate and Lightning, and without effect
    reducer = UnneededCalls()

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
    @abstractmethod
    def _replication(self) -> ReducerReplication:
        """The replication of the wrapper."""

    @property
    def process_group(self) -> Group:
        """The group over which gradients are reduced."""
        return self._replication.group

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if buckets are final. A hook that reads this (ZeRO's) relies on the buckets from then on."""
        reducer = self._replication.reducer
        plan = None if reducer is None else reducer.common.plan.current
        if self._relied_on is not None and plan != self._relied_on:
            rank = global_ranks(self.process_group)[self.process_group.rank()]
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

    def _get_ddp_logging_data(self) -> LoggingData:
        """Return what Lightning asks when training ends: whether ``static_graph=True`` would help. It never does."""
        return LoggingData(can_set_static_graph=0)


M = TypeVar("M", bound=Module)
_PyTorchs: Any = TorchDistributedDataParallel  # for isinstance; its annotations do not count


@refusing(TorchDistributedDataParallel, INSTEAD)
class DistributedDataParallel(CompatibleNames, _PyTorchs, Module, Joinable, Generic[M]):
    """A wrapper that averages the gradients of ``module``'s parameters over all ranks at the end of backward.

    Gradients, communication and errors are as for :func:`lockstep.replicate`. The keys of ``state_dict`` begin with
    ``module.``, as in PyTorch; ``load_state_dict`` also takes keys without it. Gradients are synchronised because
    parameters received them, even if ``module`` is called instead of the wrapper. The wrapper is an instance of
    PyTorch's class, for programs that check the type. No code of that class runs. If a name of that class has no
    meaning here, it raises an AttributeError that says what to use instead.

    Args:
        module: The module. If it is replicated or wrapped already, or is itself a wrapper, the new wrapper replaces the
            earlier one, whose methods raise from then on.
        device_ids: None, or the one accelerator that inputs are moved to.
        output_device: Accepted; outputs stay where the module puts them.
        dim: Accepted; one process has one device.
        broadcast_buffers: Deprecated: False means ``buffer_policy="local"``, and buffers are not sent at the start.
        init_sync: If True, rank 0's parameters and buffers are sent to all ranks now, and the first backward compares
            the values of parameters. If False, nothing is sent before the first backward, which compares the modules
            of the ranks, but no values.
        process_group: The ranks; the default group if None.
        bucket_cap_mb: Size of a bucket of gradients in MiB; 25 if None, and 1 for the first. Smaller buckets leave
            earlier, larger ones have less overhead.
        find_unused_parameters: Not needed: parameters without a gradient are always found.
        check_reduction: Deprecated; does nothing.
        gradient_as_bucket_view: Not needed: gradients always live in the buckets.
        static_graph: Not needed: the graph may change in every step.
        delay_all_reduce_named_params: Pairs of name and parameter; their gradients are sent last.
        param_to_hook_all_reduce: Required with ``delay_all_reduce_named_params``. The delayed gradients are sent at the
            end of backward.
        mixed_precision: Refused, unless None: use ``torch.autocast`` around forward, and ``reduce_dtype``.
        device_mesh: One dimension of a ``DeviceMesh``, instead of ``process_group``.
        skip_all_reduce_unused_params: Not needed: parameters that no rank has ever used are not sent.
        bucket_cap_mb_list: Sizes of successive buckets in MiB; the last one holds for all further buckets.
        batched_grad_copy: Not needed: gradients are copied into a bucket together, and never out.
        forward_sync_buffers: False means ``buffer_policy="local"``, but buffers are sent at the start.
        lazy_bucket_allocation: Not needed: on an accelerator a bucket of large gradients keeps no memory after
            backward. On the CPU buckets keep their memory.
        reduce_dtype: ``torch.bfloat16`` or ``torch.float16``: float32 gradients are sent in this dtype and added in
            float32. The mean is rounded to this dtype once, for any number of ranks; ``.grad`` stays in float32. None:
            gradients are sent in their own dtype.
        buffer_policy: ``"rank0"``: at the end of each backward that synchronises every rank gets rank 0's buffers.
            ``"mean"``: floating-point buffers become the mean over the ranks. ``"local"``: each rank keeps its own.
        params_and_buffers_to_ignore: Names, within ``module``, of parameters and buffers that are not replicated.

    Raises:
        UnknownOptionError: An argument that does not exist (a ``TypeError``).
        OptionError: Invalid options, or options that do not fit the module.
        NotReplicableError: The module has no parameters, or uninitialised ones.
        AgreementError: The ranks differ; raised on every rank.
        CommunicationError: There is no process group, or a rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.module.bias.grad.tolist()
        [3.0, 3.0]

    Stands for: ``torch.nn.parallel.DistributedDataParallel``.
    """

    module: M
    _held: ReducerReplication | None = None
    _has_another_module = False

    @naming_options
    def __init__(
        self,
        module: M,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Group | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        reduce_dtype: torch.dtype | None = None,
        buffer_policy: Policy = "rank0",
        params_and_buffers_to_ignore: Collection[str] = (),
    ) -> None:
        given = dict(locals())
        options = Options(
            **{field.name: given[field.name] for field in dataclasses.fields(Options) if field.name in given}
        )
        options.warn_deprecated(stacklevel=3)
        check_module(module, params_and_buffers_to_ignore)
        Module.__init__(self)  # not that of PyTorch's class
        Joinable.__init__(self)
        self.module = module
        self._options = options
        if resolve_group(options.group) is None:
            raise CommunicationError(
                "Default process group has not been initialized, please make sure to call init_process_group, or pass "
                "process_group"
            )
        self._begin()

    @outside_compiler
    def _begin(self) -> None:
        """Replicate the module, and register the wrapper, so that functions for replicated modules take it."""
        training_alone()
        replication = ReducerReplication(self.module, self._options, (), taking_over=True)
        replication.start(lambda undo: register(self, replication, undo))
        self._held = replication

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign; a module in place of the wrapped one may be used without gradients, but not trained."""
        super().__setattr__(name, value)
        if name == "module" and self._held is not None and isinstance(value, Module):
            self._has_another_module = not self._held.covers(value)

    @property
    def _replication(self) -> ReducerReplication:
        if self._held is None:
            self._begin()  # the wrapper is a copy, or was unpickled
        assert self._held is not None
        return self._held  # not from the registry: the compiler would put guards on its other entries

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Communicates nothing, except inside of :meth:`join`."""
        replication = self._replication
        if self._has_another_module and self.training and torch.is_grad_enabled():
            raise NotReplicableError(
                f"{type(self).__name__}.module was assigned another {type(self.module).__name__} than the one that was "
                "wrapped, and its gradients would not be synchronised: wrap it, too. To evaluate another module in its "
                "place, use it under torch.no_grad(), or after eval()"
            )
        if self._join_config.enable:
            enter_iteration(self, replication.started_reducer)
        inputs, kwargs = replication.before_forward(self.module, inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        replication.after_forward(self.module, inputs, outputs)
        return outputs

    # ------------------------------------------------------------------------------ synchronising

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not synchronise; forward may run inside or outside of it."""
        return self._replication.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backward passes that begin from now on synchronise, or accumulate gradients on this rank if False."""
        self._replication.set_requires_gradient_sync(requires_gradient_sync)

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backward passes synchronise; may be set between micro-batches."""
        return self._replication.requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, required: bool) -> None:
        self.set_requires_gradient_sync(required)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket: see
        :meth:`lockstep.distributed.Replicated.register_comm_hook`."""
        self._replication.register_comm_hook(state, hook)

    # ------------------------------------------------------------------------------- uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context for ranks with unequal numbers of batches: a rank that has run out takes part without
        gradients.

        Args:
            divide_by_initial_world_size: If True, divide sums by the number of all ranks; if False, by the number of
                ranks that still have batches.
            enable: False if all ranks are known to have the same number of batches.
            throw_on_early_termination: Raise on every rank as soon as one has run out.

        Inside, each forward is one iteration. ``no_sync()`` around forward decides if it synchronises. Communicates two
        all-reduces of a few bytes in each forward. At the end all ranks get the parameters (and the buffers, except
        with policy ``"local"``) of a rank that ended last.

        Stands for: ``DistributedDataParallel.join``.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for a rank that has run out of batches; called by
        ``torch.distributed.algorithms.join.Join``."""
        by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return ShadowHook(self, self._replication.started_reducer, by_all)

    @property
    def join_device(self) -> torch.device:
        """The device of ``Join``'s own small tensors."""
        return control_device(self._replication.group)

    @property
    def join_process_group(self) -> Group:
        """The group over which ``Join`` counts."""
        return self._replication.group

    # ------------------------------------------------------------------------ state, copies, pickles

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state with or without ``module.`` in its keys."""
        own = functools.partial(Module.load_state_dict, self)
        target = self.module.load_state_dict if is_of_module(state_dict, self.module) else own
        return target(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the group and without the state common to all ranks; the first forward sets a copy
        up."""
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_WRAPPER}
        options = self._options
        if options.process_group is not None or options.device_mesh is not None:
            state["_lost_group"] = True
        state["_options"] = dataclasses.replace(
            options,
            process_group=None,
            device_mesh=None,
            delay_all_reduce_named_params=None,
            param_to_hook_all_reduce=None,
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        lost = state.pop("_lost_group", False)
        Module.__setstate__(self, state)
        if lost:
            raise NotReplicableError(
                "a DistributedDataParallel on a group of its own was pickled; groups cannot be. Pickle "
                "wrapper.module, or its state_dict, and wrap it anew"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel[M]":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_WRAPPER}
        state |= {"_options": None, "_join_config": None}
        Module.__setstate__(copied, {name: copy.deepcopy(value, memo) for name, value in state.items()})
        copied._options = dataclasses.replace(
            self._options, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None
        )
        Joinable.__init__(copied)
        return copied


_OF_THIS_WRAPPER = frozenset(("_held", "_has_another_module", "_relied_on"))
"""The attributes that a copy does not take over: it is set up by its first forward."""


def check_module(module: Any, ignored: Collection[str]) -> None:
    """Raise an error for an object that is not a module, or has no parameters, or uninitialised ones."""
    if not isinstance(module, Module):
        raise OptionError(f"expected a torch.nn.Module to replicate, got {type(module).__name__}")
    left_out = {*ignored, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(is_lazy(tensor) for name, tensor in tensors if name not in left_out):
        raise NotReplicableError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy "
            "forward pass to correctly initialize the modules"
        )
    if not any(True for _ in module.parameters()):
        raise NotReplicableError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
