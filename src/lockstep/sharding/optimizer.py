"""``shard_optimizer()``: each rank keeps a part of the optimizer's state and steps on it; then weights are gathered.

Gradients are reduced as before, and every rank has whole gradients, so code that reads them works. The state (two
numbers for each weight, for Adam) and the work of the step are sharded.

The optimizer keeps its class. It gets the methods of :class:`ShardedOptimizer` as attributes, which refer to it weakly,
so that its memory is freed with it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lockstep._base.compiler import calls_compiled
from lockstep._base.devices import refuse_capture
from lockstep._base.identity_map import IdentityMap
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.replication.join import is_in_join
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import Replication, replications
from lockstep.errors import AlreadyManagedError, NotReplicableError, OptionError, ShardingError
from lockstep.sharding import state_dicts
from lockstep.sharding.granularity import Granularity, granularity_of, step_of
from lockstep.sharding.promises import check_can_be_sharded
from lockstep.sharding.shards import Shards
from lockstep.sharding.shown_state import refuse_change, sharded_state

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class _Sharding:
    """The shards and the modules of one sharded optimizer, without a reference to it."""

    def __init__(self, shards: Shards, found: list[Replication]) -> None:
        self.shards = shards
        self.replications = found
        self._seen: list[weakref.ref[Replication]] = []

    def check_can_step(self, optimizer: Optimizer) -> None:
        if vars(optimizer)["state"] is not self.shards.shown:
            refuse_change()
        with_gradient = next((each for each in parameters_of(optimizer) if each.grad is not None), None)
        if with_gradient is None:
            return
        refuse_capture(with_gradient.device, "the step of a sharded optimizer")
        present = [weakref.ref(each) for each in replications()]
        if present != self._seen:  # modules have been replicated since, or wrapped again
            self._seen, (_, self.replications) = present, names_of(optimizer)
        if any(each.has_local_gradients for each in self.replications):
            raise ShardingError(
                "the gradients are those of one rank alone, since the last backward did not synchronise; let the last "
                "backward before step() run outside of no_sync(), with last=True in accumulate()"
            )
        if any(isinstance(each, ReducerReplication) and is_in_join(each.reducer) for each in self.replications):
            raise ShardingError(
                "it is in a Join context, in which ranks that have run out of batches take no steps, but a sharded "
                "optimizer needs every rank in each; iterate over lockstep.batches() instead"
            )


_shardings: IdentityMap[_Sharding] = IdentityMap()
_sharded_by: "weakref.WeakValueDictionary[int, Optimizer]" = weakref.WeakValueDictionary()  # by a parameter's id


def shards_of(optimizer: Optimizer) -> Shards:
    """Return this rank's part of a sharded optimizer."""
    return _shardings[optimizer].shards


class _IsSharded(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Optimizer) and instance in _shardings


class ShardedOptimizer(Optimizer, metaclass=_IsSharded):
    """The class that ``isinstance`` reports for a sharded optimizer, and its methods, from :func:`shard_optimizer`.

    Its class stays as it was. ``optimizer.state`` has the state of each parameter that this rank has a part of; its
    tensors are :class:`~lockstep.sharding.StateSlice`. To change it raises :class:`ShardingError`. ``train()`` and
    ``eval()``, where the class has them, run on this rank's part as ``step()`` does; every rank has to call them.
    """

    @calls_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's part, and gather all weights; every rank has to call it.

        Communicates one all-reduce of 4 KiB, and one all-gather of the weights, in chunks of at most 2 MiB from each
        rank (through staging memory on ``shm``). On accelerators a further all-reduce tells whether all have stepped,
        and the host does not wait for the device.

        Args:
            closure: As in PyTorch's optimizers; called once, before the step.

        Returns:
            What the closure returns.

        Raises:
            AgreementError: Ranks differ in options, in the parameters that have a gradient, in the number of steps, or
                in having loaded state.
            PeerError: The step has failed on another rank; all weights are as they were before it.
            ShardingError: The gradients are not the mean over all ranks (on accelerators this may be noticed in the
                next step), or an earlier step was cut short.
            OptionError: The step is captured into a graph of an accelerator.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        vars(self)["_opt_called"] = True  # what PyTorch's schedulers look at
        sharding = _shardings[self]
        with torch.no_grad():
            what = sharding.shards.prepare(self, _names(self), lambda: sharding.check_can_step(self))
        _, failure = sharding.shards.act(self, step_of(type(self)))
        with torch.no_grad():
            sharding.shards.finish(self, what, failure)
        return loss

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the norm of all gradients together, with the same bits as ``torch.nn.utils.clip_grad_norm_``.

        Communicates nothing, since every rank has whole gradients.

        Returns:
            The norm before clipping.
        """
        return clip_grad_norm_(list(parameters_of(self)), max_norm, norm_type, error_if_nonfinite, foreach)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank. Its tensors are :class:`~lockstep.sharding.StateSlice`, which
        ``torch.distributed.checkpoint`` saves and loads on any number of ranks.

        :func:`full_state_dict` returns whole tensors. Communicates nothing.
        """
        return _state_dict_of(self, sharded_state(shards_of(self).placement))

    def gathered_state_dict(self, keeps: bool) -> dict[str, Any]:
        """Return the whole state dict if ``keeps`` is True on this rank, else an empty one; every rank has to call it.

        :func:`full_state_dict` and :func:`lockstep.save` call this. Communicates what :func:`full_state_dict` does.
        """
        shards = shards_of(self)
        state = state_dicts.full_state(shards.placement, shards.collectives, keeps)
        return _state_dict_of(self, state) if keeps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a sharded optimizer, or of a plain one, from which each rank takes its part.

        Every rank has to load it: if only some have, the next step is an error. Communicates nothing.
        """
        shards, parameters = shards_of(self), list(parameters_of(self))
        loaded = {id(parameters[key]) for key in state_dict["state"] if key in range(len(parameters))}
        shards.place([_trained_or(group, loaded) for group in self.param_groups], self.param_groups, _names(self))
        state = state_dicts.sliced(shards.placement, state_dict["state"], parameters)
        vars(self)["state"] = {}
        try:
            type(self).load_state_dict(self, {**state_dict, "state": state})
            shards.load(state_dicts.by_piece(shards.placement, vars(self)["state"]))
        finally:
            vars(self)["state"] = shards.shown

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are assigned to ranks in the first step in which they have a gradient, or when
        their state is loaded."""
        type(self).add_param_group(self, param_group)
        names, found = names_of(self)
        try:
            check_names(self.param_groups, names)
            check_groups(found)
        except NotReplicableError:
            del self.param_groups[-1]
            raise
        _shardings[self].replications = found


def _state_dict_of(optimizer: Optimizer, state: dict[Any, Any]) -> dict[str, Any]:
    """Return the state dict that the optimizer's class makes of this state, by parameter."""
    present = {id(parameter) for parameter in parameters_of(optimizer)}
    own, shown = vars(optimizer), vars(optimizer)["state"]
    own["state"] = {key: values for key, values in state.items() if not isinstance(key, Tensor) or id(key) in present}
    try:
        return type(optimizer).state_dict(optimizer)
    finally:
        own["state"] = shown


def _names(optimizer: Optimizer) -> Callable[[], dict[int, str]]:
    """Return a function that looks up the names of an optimizer's parameters, all of which have one."""

    def find() -> dict[int, str]:
        names, _ = names_of(optimizer)
        check_names(optimizer.param_groups, names)
        return names

    return find


def shard_optimizer(optimizer: AnyOptimizer, *, granularity: Granularity | None = None) -> AnyOptimizer:
    """Divide the state of an optimizer, and the work of its step, between the ranks (ZeRO-1); call it on every rank.

    The parameters have to be in modules that :func:`lockstep.replicate` or :class:`lockstep.DistributedDataParallel`
    has replicated. Each rank steps on its part of the parameters, and gets the new values of the other parts. On W
    ranks, float32 AdamW needs 8 + 8/W bytes for each weight instead of 16 (weight, gradient and state), and the work of
    the step is divided by W. Groups, schedulers, hooks, GradScaler, ``foreach`` and ``fused`` work as before. Gradients
    stay whole on every rank. The weights have the same bits as without sharding.

    A table tells how fine the optimizers of ``torch.optim`` may be cut. With SGD, Adam, AdamW, RMSprop and others that
    update element by element, each rank gets an equal range of all elements. With Muon and Adafactor each rank gets
    whole parameters, so that the cost of the updates is balanced. For any other class, and for a subclass with a
    ``step`` of its own, the program says it.

    Args:
        optimizer: An optimizer, before or after training has begun. Existing state is sharded, too.
        granularity: ``"tensor"``: each rank gets whole parameters, the very objects. Right if ``step`` treats each
            parameter for itself: without a norm or another number of several parameters, random numbers, or
            communication. ``"element"``: parameters are also cut, and the optimizer gets views of their memory. Right
            if ``step`` treats each element for itself; the state has to be of numbers and plain tensors. A parameter
            of another class than ``torch.nn.Parameter``, or with attributes, is not cut. None: what the table says.

    Returns:
        The same object, of the same class, with the methods of :class:`~lockstep.sharding.ShardedOptimizer`.

    Raises:
        UnknownOptimizerError: The table does not have the optimizer's class, and ``granularity`` is None.
        OptionError: The table says that the optimizer cannot be cut so fine.
        ShardingError: The optimizer needs all parameters at once (LBFGS), communicates in its ``step``, or its ``step``
            has been replaced on the instance.
        NotReplicableError: A parameter is in no replicated module, or the modules are replicated over several groups.
        AlreadyManagedError: The optimizer has been sharded already, or shares a parameter with another sharded
            optimizer.
        AgreementError: Ranks have different parameters or options.

    After an error the optimizer is as it was. Communicates one all-reduce of 4 KiB.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
        >>> optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.clip_grad_norm_(1.0) > 1
        tensor(True)
        >>> optimizer.step()
        >>> sorted(full_state_dict(optimizer)["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']

    Stands for: ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise AlreadyManagedError("this optimizer has been sharded already; use what shard_optimizer() returned")
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"shard_optimizer() got a {type(optimizer).__name__}; expected an optimizer, such as "
            "torch.optim.AdamW(model.parameters())"
        )
    names, found = names_of(optimizer)
    collectives, kind = _collectives_of(found), type(optimizer)
    shards, state, failure = Shards(kind, "tensor", collectives), {}, None
    try:
        _check(optimizer, names)
        shards = Shards(kind, granularity_of(kind, granularity), collectives)
        state = _divide_state(shards, optimizer, names)
    except Exception as error:
        failure = error
    shards.agree_on_places(optimizer, failure)
    _attach(optimizer, _Sharding(shards, found), state)
    return optimizer


@torch.inference_mode(False)  # memory that is made in inference mode could not be written in training
def _divide_state(shards: Shards, optimizer: Optimizer, names: dict[int, str]) -> dict[Any, Any]:
    """Assign the parameters to ranks, and return the state that the optimizer has by this rank's pieces."""
    groups, state = optimizer.param_groups, optimizer.state
    stepped = {id(parameter) for parameter in state}
    shards.place([_trained_or(group, stepped) for group in groups], groups, lambda: names)
    shards.has_loaded = bool(state)
    parameters = list(parameters_of(optimizer))
    by_number = {number: state[each] for number, each in enumerate(parameters) if each in state}
    others = {key: values for key, values in state.items() if not isinstance(key, Tensor)}
    divided = state_dicts.sliced(shards.placement, {**by_number, **others}, parameters)
    by_parameter = {parameters[key] if key in by_number else key: values for key, values in divided.items()}
    return state_dicts.by_piece(shards.placement, by_parameter)


def _attach(optimizer: Optimizer, sharding: _Sharding, state: dict[Any, Any]) -> None:
    """Give an optimizer its methods, and this rank's part of the state in place of its state; this cannot fail."""
    own, kind, link = vars(optimizer), type(optimizer), weakref.ref(optimizer)
    own["state"].clear()
    own["state"].update(state)
    sharding.shards.placement.state = own["state"]  # a wrapper may have the same object
    methods = {name: getattr(ShardedOptimizer, name) for name in _METHODS}
    methods["step"] = Optimizer.profile_hook_step(ShardedOptimizer.step)
    methods.update({mode: _mode(mode) for mode in ("train", "eval") if callable(getattr(kind, mode, None))})
    own.update({name: _bound(method, link) for name, method in methods.items()}, state=sharding.shards.shown)
    own["step"]._wrapped_by_lr_sched = True  # it notes that it was called
    _shardings[optimizer] = sharding
    for parameter in parameters_of(optimizer):
        _sharded_by[id(parameter)] = optimizer


_METHODS = ("clip_grad_norm_", "state_dict", "gathered_state_dict", "load_state_dict", "add_param_group")


def _mode(mode: str) -> Callable[..., Any]:
    """Return a method that runs ``train()`` or ``eval()`` of an optimizer's class on this rank's part, and gathers all
    weights."""

    def switch(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        shards, what = shards_of(optimizer), f"{mode}()"
        with torch.no_grad():
            shards.prepare_other(optimizer, what, _names(optimizer))
        result, failure = shards.act(optimizer, lambda given: getattr(type(given), mode)(given, *args, **kwargs))
        with torch.no_grad():
            shards.finish(optimizer, what, failure)
        return result

    switch.__name__ = mode
    return switch


def _bound(function: Callable[..., Any], link: "weakref.ref[Optimizer]") -> Any:
    """Return a method of one optimizer that does not keep it alive."""

    @wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(link(), *args, **kwargs)

    parameters = list(signature(function).parameters.values())[1:]
    method.__signature__ = signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def _trained_or(group: dict[str, Any], with_state: set[int]) -> dict[str, Any]:
    """Return the group with the parameters that are trained or have state; ``with_state`` has the ``id`` of those."""
    kept = [each for each in group["params"] if each.requires_grad or id(each) in with_state]
    return {**group, "params": kept}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters of all groups, in the order of their numbers in a state dict."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def names_of(optimizer: Optimizer) -> tuple[dict[int, str], list[Replication]]:
    """Return the names of the optimizer's replicated parameters, by ``id``, and their modules' replications."""
    numbers = {id(parameter) for parameter in parameters_of(optimizer)}
    names: dict[int, str] = {}
    found = []
    for replication in replications():
        own = {number: name for number, name in replication.replicated_names().items() if number in numbers}
        if own:
            found.append(replication)
            names = {**own, **names}
    return names, found


def check_names(groups: Iterable[dict[str, Any]], names: dict[int, str]) -> None:
    """Raise :class:`NotReplicableError` if a parameter has no name: it is in no replicated module."""
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise NotReplicableError(
                    f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}, is in no replicated "
                    "module, so ranks may have other values of it; call replicate() before shard_optimizer(), and "
                    "give parameters that are not replicated an optimizer of their own"
                )


def _check(optimizer: Optimizer, names: dict[int, str]) -> None:
    check_can_be_sharded(optimizer)
    check_names(optimizer.param_groups, names)
    for parameter in parameters_of(optimizer):
        other = _sharded_by.get(id(parameter))
        steps = other is not None and shards_of(other).collectives.is_alive
        if other is not None and steps and any(each is parameter for each in parameters_of(other)):
            raise AlreadyManagedError(
                f"parameter {names[id(parameter)]} has a sharded optimizer already; one optimizer steps a parameter"
            )


def _collectives_of(found: list[Replication]) -> Collectives:
    if not found:
        raise NotReplicableError(
            "no parameter of this optimizer is in a replicated module; call replicate() before shard_optimizer()"
        )
    for replication in found:
        if not replication.ready:
            replication.start()
    check_groups(found)
    return Collectives(found[0].group, found[0].phases)


def check_groups(found: Iterable[Replication]) -> None:
    """Raise :class:`NotReplicableError` if modules are replicated over several process groups."""
    groups = list(dict.fromkeys(each.group for each in found))
    if len(groups) > 1:
        raise NotReplicableError(
            f"the parameters of this optimizer are in modules that are replicated over {len(groups)} process groups; "
            "give the modules of each group an optimizer of their own"
        )


def full_state_dict(optimizer: Optimizer, *, all_ranks: bool = False) -> dict[str, Any]:
    """Return the state dict of a sharded optimizer as of a plain one, with whole tensors; call it on every rank.

    It can be loaded into a plain optimizer of the same class, and into a sharded one on any number of ranks.

    Args:
        optimizer: A sharded optimizer. For a plain optimizer the result is its ``state_dict()``.
        all_ranks: If True, every rank gets the state dict; otherwise the group's first rank, and all others get an
            empty one.

    Returns:
        The state dict; its tensors are copies, on the devices of the parameters.

    Communicates the whole state, in all-gathers of at most 2 MiB from each rank, and its description. Ranks that get an
    empty state dict need memory for two such all-gathers only.

    Example:
        >>> full_state_dict(torch.optim.SGD([torch.ones(2)], lr=0.1))["state"]
        {}

    Stands for: ``ZeroRedundancyOptimizer.consolidate_state_dict()``.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    return ShardedOptimizer.gathered_state_dict(optimizer, all_ranks or shards_of(optimizer).collectives.rank == 0)
