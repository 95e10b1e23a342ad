"""``shard_optimizer()``: each rank keeps a slice of the optimizer's state and steps on it; then weights are gathered.

Gradients are reduced as before, and every rank has whole gradients, so code that reads them works. The state (two
numbers for each weight, for Adam) and the work of the step are sharded.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lockstep.compiler import calls_compiled
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.replication.join import is_in_join
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import Replication, replications
from lockstep.errors import AlreadyManagedError, NotReplicableError, OptionError, ShardingError
from lockstep.sharding import state_dicts
from lockstep.sharding.shards import Shards
from lockstep.sharding.twin import check_attributes

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class ShardedOptimizer(Optimizer):
    """The class that :func:`shard_optimizer` adds to an optimizer's own class."""

    _sharding: Shards
    _sharding_replications: list[Replication]
    _sharding_seen: list[weakref.ref[Replication]]

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of each parameter that this rank has a piece of; its tensors are
        :class:`~lockstep.sharding.StateSlice`. To change it raises :class:`ShardingError`."""
        loading = vars(self).get("state")
        return state_dicts.read_only(self._sharding) if loading is None else loading

    @state.setter
    def state(self, value: object) -> NoReturn:
        state_dicts.refuse_change()

    @calls_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's pieces, and gather all weights; every rank has to call it.

        Communicates one all-gather of 128 bytes from each rank, and one of the weights, in chunks of at most 2 MiB from
        each (through staging memory on ``shm``).

        Args:
            closure: As in PyTorch's optimizers; called once, before the step.

        Returns:
            What the closure returns.

        Raises:
            AgreementError: Ranks differ in options, in the parameters that have a gradient, or in the number of steps.
            PeerError: The step has failed on another rank; all weights are as they were before it.
            ShardingError: The gradients are not the mean over all ranks, or an earlier step was cut short.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        vars(self)["_opt_called"] = True  # what PyTorch's schedulers look at
        with torch.no_grad():
            self._sharding.prepare(self, self._names, self._problem)
            failure = self._sharding.step_own()
            self._sharding.finish(self, failure)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it notes that it was called

    def _names(self) -> dict[int, str]:
        names, _ = names_of(self)
        check_names(self.param_groups, names)
        return names

    def _problem(self) -> str:
        """Return why no step can be taken, or an empty text."""
        if not any(parameter.grad is not None for parameter in parameters_of(self)):
            return ""
        present = [weakref.ref(each) for each in replications()]
        if present != self._sharding_seen:  # modules have been replicated since, or wrapped again
            self._sharding_seen, (_, self._sharding_replications) = present, names_of(self)
        if any(each.has_local_gradients for each in self._sharding_replications):
            return (
                "the gradients are those of one rank alone, since the last backward did not synchronise; let the last "
                "backward before step() run outside of no_sync(), with last=True in accumulate()"
            )
        if any(
            isinstance(each, ReducerReplication) and is_in_join(each.reducer) for each in self._sharding_replications
        ):
            return (
                "it is in a Join context, in which ranks that have run out of batches take no steps, but a sharded "
                "optimizer needs every rank in each; iterate over lockstep.batches() instead"
            )
        return ""

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
        return self._state_dict_of(state_dicts.sharded_state(self._sharding))

    def gathered_state_dict(self, keeps: bool) -> dict[str, Any]:
        """Return the whole state dict if ``keeps`` is True on this rank, else an empty one; every rank has to call it.

        :func:`full_state_dict` and :func:`lockstep.save` call this. Communicates what :func:`full_state_dict` does.
        """
        state = state_dicts.full_state(self._sharding, keeps)
        return self._state_dict_of(state) if keeps else {}

    def _state_dict_of(self, state: dict[Any, Any]) -> dict[str, Any]:
        """Return PyTorch's state dict with this state, less that of parameters which are in no group any more."""
        present = {id(parameter) for parameter in parameters_of(self)}
        vars(self)["state"] = {
            key: values for key, values in state.items() if not isinstance(key, Tensor) or id(key) in present
        }
        try:
            return super().state_dict()
        finally:
            del vars(self)["state"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a sharded optimizer, or of a plain one, from which each rank takes its pieces.

        Communicates nothing.
        """
        parameters = list(parameters_of(self))
        loaded = {id(parameters[key]) for key in state_dict["state"] if key in range(len(parameters))}
        self._sharding.place([_trained_or(group, loaded) for group in self.param_groups], self._names)
        self._sharding.follow()
        sliced = state_dicts.sliced(self._sharding, state_dict, parameters)
        super().load_state_dict(sliced)
        state_dicts.take(self._sharding, vars(self).pop("state"), self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are assigned to ranks in the first step in which they have a gradient, or when
        their state is loaded."""
        super().add_param_group(param_group)
        if "_sharding" in vars(self):
            names, found = names_of(self)
            try:
                check_names(self.param_groups[-1:], names)
                check_groups(found)
            except NotReplicableError:
                del self.param_groups[-1]
                raise
            self._sharding_replications = found

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"a sharded {type(self).__name__} cannot be copied: copy full_state_dict(optimizer)")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(f"a sharded {type(self).__name__} cannot be pickled: save full_state_dict(optimizer)")


def shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Divide the state of an optimizer, and the work of its step, between the ranks (ZeRO-1); call it on every rank.

    The parameters have to be in modules that :func:`lockstep.replicate` or :class:`lockstep.DistributedDataParallel`
    has replicated. Each rank steps on its part of the parameters, and gets the new values of the other parts. On W
    ranks, float32 AdamW needs 8 + 8/W bytes for each weight instead of 16 (weight, gradient and state), and the work of
    the step is divided by W. Groups, schedulers, hooks, GradScaler, ``foreach`` and ``fused`` work as before. Gradients
    stay whole on every rank. The weights have the same bits as without sharding.

    If an optimizer updates element by element (SGD, Adam, AdamW, RMSprop, ...), each rank gets an equal range of all
    elements. If it needs whole parameters (Muon, Adafactor, LAMB), each rank gets whole parameters, so that the cost of
    the updates is balanced. Trials on small tensors tell which kind an optimizer is.

    Args:
        optimizer: An optimizer, before or after training has begun. Existing state is sharded, too.

    Returns:
        The same object; its class is now one derived from its former class and from
        :class:`~lockstep.sharding.ShardedOptimizer`.

    Raises:
        ShardingError: The optimizer needs all parameters at once (LBFGS), needs a closure, draws random numbers, or its
            ``step`` has been replaced on the instance.
        NotReplicableError: A parameter is in no replicated module, or the modules are replicated over several groups.
        AlreadyManagedError: The optimizer has been sharded already, or shares a parameter with another sharded
            optimizer.
        AgreementError: Ranks have different parameters or options.

    Communicates one all-gather of 128 bytes from each rank.

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
    kind = type(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        raise AlreadyManagedError("this optimizer has been sharded already; use what shard_optimizer() returned")
    names, found = names_of(optimizer)
    collectives = _collectives_of(found)
    shards: Shards | None = None
    failure: Exception | None = None
    try:
        _check(optimizer, names)
        shards = Shards(optimizer, kind, collectives)
        stepped = {id(parameter) for parameter in optimizer.state}
        shards.place([_trained_or(group, stepped) for group in optimizer.param_groups], lambda: names)
    except Exception as error:
        failure = error
    (shards or Shards(optimizer, kind, collectives)).agree_on_places(optimizer, failure)
    assert shards is not None
    _attach(optimizer, kind, shards, found)
    return optimizer


def _attach(optimizer: Optimizer, kind: type[Optimizer], shards: Shards, found: list[Replication]) -> None:
    """Make the optimizer a sharded one, and slice its existing state."""
    state = optimizer.state_dict()["state"]
    own = vars(optimizer)
    del own["state"]
    own.pop("step", None)  # of a scheduler, which only notes that it was called
    own.update(_sharding=shards, _sharding_replications=found, _sharding_seen=[])
    optimizer.__class__ = _class_for(cast("Any", kind))
    optimizer._patch_step_function()
    sharded = cast("ShardedOptimizer", optimizer)
    parameters = list(parameters_of(optimizer))
    sliced = state_dicts.sliced(shards, {"state": state}, parameters)["state"]
    state_dicts.take(shards, {parameters[number]: each for number, each in sliced.items()}, optimizer.param_groups)
    for parameter in parameters:
        _sharded_by[id(parameter)] = sharded


def _trained_or(group: dict[str, Any], with_state: set[int]) -> dict[str, Any]:
    """Return the group with the parameters that are trained or have state; ``with_state`` has the ``id`` of those."""
    wanted = [each for each in group["params"] if each.requires_grad or id(each) in with_state]
    return {**group, "params": wanted}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters of all groups, in the order of their numbers in a state dict."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def names_of(optimizer: Optimizer) -> tuple[dict[int, str], list[Replication]]:
    """Return the names of the optimizer's replicated parameters, by ``id``, and their modules' replications."""
    wanted = {id(parameter) for parameter in parameters_of(optimizer)}
    names: dict[int, str] = {}
    found = []
    for replication in replications():
        own = {number: name for number, name in replication.replicated_names().items() if number in wanted}
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
    check_names(optimizer.param_groups, names)
    check_attributes(optimizer)
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ShardingError("optimizer.step has been replaced on this instance; call shard_optimizer() before that")
    for parameter in parameters_of(optimizer):
        other = _sharded_by.get(id(parameter))
        if other is not None and any(each is parameter for each in parameters_of(other)):
            raise AlreadyManagedError(
                f"parameter {names[id(parameter)]} has a sharded optimizer already; one optimizer steps a parameter"
            )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptionError(f"parameter group {number} has differentiable=True, which cannot go through slices")


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


@functools.cache
def _class_for(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of sharded optimizers of a class; it has the same name and the same place."""
    return type(kind.__name__, (ShardedOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


_sharded_by: "weakref.WeakValueDictionary[int, ShardedOptimizer]" = weakref.WeakValueDictionary()


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
    return optimizer.gathered_state_dict(all_ranks or optimizer._sharding.rank == 0)
