"""``DistributedDataParallel``: a wrapper with PyTorch's interface, implemented by ``replicate()``.

``join()`` lets a rank that has run out of inputs take part in the steps of the others. In each forward inside of it,
one all-reduce of a few numbers tells which ranks still have batches, and if this iteration synchronises. A rank that
has run out then takes part in the round without gradients.

Several wrappers may be in one ``Join``. Each has one forward in an iteration, but their forwards and backwards may come
in any order: all messages before a round have the same form, so a rank that has run out can follow the others.
"""

import copy
import dataclasses
import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.compiler import outside_compiler
from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Group, resolve_group
from lockstep.distributed.reduction.buffer_sync import Policy
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.replication.ddp_compat import INSTEAD, BufferHookLocation, CompatibleNames
from lockstep.distributed.replication.options import Options
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import Replication, broadcast_values, register
from lockstep.errors import CommunicationError, NotReplicableError, OptionError
from lockstep.inherited import refusing
from lockstep.run_all import RunAll
from lockstep.wrapper import is_of_module, naming_options

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
        init_sync: If True, rank 0's parameters and buffers are sent to all ranks now. If False, nothing is sent before
            the first backward, which also compares the modules of the ranks.
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
        mixed_precision: A ``torch.nn.parallel.distributed._MixedPrecision``. Forward runs with copies of parameters,
            inputs and buffers in its dtypes, and gradients are sent in its reduce dtype. Parameters, buffers and
            ``.grad`` keep their dtypes.
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
        replication = ReducerReplication(self.module, self._options, (), taking_over=True)
        register(self, replication)
        self._held = replication
        replication.start()
        if self._buffer_hook is not None and replication.reducer is not None:
            replication.reducer.buffers.leave()
        if self._hooks_removed:
            replication.set_requires_gradient_sync(False)

    @property
    def _replication(self) -> ReducerReplication:
        if self._held is None:
            self._begin()  # the wrapper is a copy, or was unpickled
        assert self._held is not None
        return self._held  # not from the registry: the compiler would put guards on its other entries

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Communicates nothing, except inside of :meth:`join`."""
        replication = self._replication
        if self._join_config.enable:
            enter_iteration(self, replication)
        if self._buffer_hook is not None:
            self._run_buffer_hook(BufferHookLocation.PRE_FORWARD)
        inputs, kwargs = replication.before_forward(inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        if self._buffer_hook is not None:
            self._run_buffer_hook(BufferHookLocation.POST_FORWARD)
        replication.after_forward(outputs)
        return outputs

    # ------------------------------------------------------------------------------ synchronising

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not synchronise; forward may run inside or outside of it."""
        return self._replication.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backward passes that begin from now on synchronise, or accumulate gradients on this rank if False."""
        if requires_gradient_sync and self._hooks_removed:
            raise OptionError("_remove_autograd_hooks() has ended synchronising for good; wrap wrapper.module anew")
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
        if self._buffer_hook is not None:
            raise OptionError(
                "join() and _register_buffer_comm_hook() do not go together: a rank that has run out of batches calls "
                "no forward, so the others' hooks would wait for it. Use buffer_policy"
            )
        self._divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return ShadowHook(self, self._replication)

    @property
    def join_device(self) -> torch.device:
        """The device of ``Join``'s own small tensors."""
        return self._replication.started_reducer.collectives.device

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
        state = {name: value for name, value in self.__dict__.items() if name not in ("_held", "_relied_on")}
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
        state = {
            **self.__dict__,
            "_options": None,
            "_join_config": None,
            "_held": None,
            "_relied_on": None,
        }
        Module.__setstate__(copied, {name: copy.deepcopy(value, memo) for name, value in state.items()})
        copied._options = dataclasses.replace(
            self._options, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None
        )
        Joinable.__init__(copied)
        return copied


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


# ------------------------------------------------------------------------------------------------ join


_GONE, _LOCAL, _SYNCHRONISES = 0, 1, 2
_contexts: "weakref.WeakKeyDictionary[ReducerReplication, weakref.ref[ShadowHook]]" = weakref.WeakKeyDictionary()


def enter_iteration(wrapper: Any, replication: ReducerReplication) -> None:
    """Note that an active rank begins an iteration. Sends nothing outside of a ``Join`` context and after it."""
    link = _contexts.get(replication)
    hook = None if link is None else link()  # the context keeps it alive as long as it lasts
    if hook is None or hook.ended:
        return
    work = Join.notify_join_context(wrapper)
    if work is not None:  # only the first of several wrappers notifies the others of an iteration
        work.wait()
    synchronises = torch.is_grad_enabled() and replication.requires_sync
    marks = hook.scheduler.announce_forward(hook.reducer, _SYNCHRONISES if synchronises else _LOCAL)
    hook.count_only_active(marks)


def is_in_join(replication: Replication) -> bool:
    """Return True if a module is in a ``Join`` context that is not over."""
    link = _contexts.get(replication)  # type: ignore[call-overload]
    hook = None if link is None else link()
    return hook is not None and not hook.ended


class _Iteration(Enum):
    """The progress of an iteration of the other ranks."""

    EXPECTED = auto()
    BEGUN = auto()
    """Its round is still to come."""
    OVER = auto()


class ShadowHook(JoinHook):
    """The hook of a rank without batches."""

    def __init__(self, wrapper: Any, replication: ReducerReplication) -> None:
        self._wrapper = wrapper
        self._replication = replication
        self._iteration = _Iteration.EXPECTED
        self.ended = False
        """True once all ranks have run out, and the context is over."""
        _contexts[replication] = weakref.ref(self)

    @property
    def reducer(self) -> Reducer:
        """The reducer of the wrapper."""
        return self._replication.started_reducer

    @property
    def scheduler(self) -> GroupScheduler:
        """The scheduler of the wrapper's group."""
        return scheduler_of(self.reducer.collectives.group)

    def count_only_active(self, marks: list[int]) -> None:
        """Use the buffers of the first rank that has batches, and divide by the number of such ranks if asked to."""
        active = [rank for rank, mark in enumerate(marks) if mark != _GONE]
        if active:
            divide_by = len(marks) if self._wrapper._divide_by_initial_world_size else len(active)
            self.reducer.common.set_participants(active, divide_by)

    def main_hook(self) -> None:
        """Take part in the steps of the others until this wrapper has had its iteration."""
        while self._iteration is not _Iteration.OVER:
            self._follow()
        self._iteration = _Iteration.EXPECTED

    def _follow(self) -> None:
        """Follow the other ranks: begin an iteration of a wrapper, or reduce."""
        scheduler = self.scheduler
        hooks = {hook.reducer: hook for hook in _open_hooks() if hook.scheduler is scheduler}
        marks, members = scheduler.listen()
        if any(marks):
            for hook in (hooks[member] for member in members if member in hooks):
                hook._begin(marks)
            return
        steps = RunAll()
        for member in members:
            with steps:
                if member in hooks:
                    hooks[member]._reduce_without_batch()
                else:
                    scheduler.reduce([member])
        steps.end()

    def _begin(self, marks: list[int]) -> None:
        self.count_only_active(marks)
        synchronises = _SYNCHRONISES in marks
        self._iteration = _Iteration.BEGUN if synchronises else _Iteration.OVER
        if synchronises and self.scheduler.modules.exclusive:
            self._reduce_without_batch()

    def _reduce_without_batch(self) -> None:
        if self._iteration is _Iteration.BEGUN:
            self._iteration = _Iteration.OVER
        self.scheduler.reduce_without_batch(self.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the values of a rank that ended last."""
        self.ended = True
        reducer = self.reducer
        collectives = reducer.collectives
        ended_last = all_gather_object(is_last_joiner, "who ended last", collectives)
        source = max(rank for rank, last in enumerate(ended_last) if last)
        self._wrapper._authoritative_rank = source
        broadcast_values([m.parameter for m in reducer.parameters], reducer.buffers.buffers, collectives, source)
        reducer.common.set_participants(range(collectives.world), collectives.world)


def _open_hooks() -> list[ShadowHook]:
    hooks = (link() for link in list(_contexts.values()))
    return [hook for hook in hooks if hook is not None and not hook.ended]
