"""Replicas of a network that are built once and then kept up to date.

A :class:`ReplicaSet` holds one complete copy of the module tree for each device (:mod:`~lockstep.local.module_copy`).
Each use begins with :meth:`ReplicaSet.refresh`, which takes the following steps, in this order:

1. *Notice.* One pass over the network (:mod:`~lockstep.local.changes`). If submodules or parameters were replaced, or
   their data has moved, build everything anew.
2. *Parameters.* Replicas on the network's device use the parameters' own storage. To other devices the values are sent
   in flat transfers (:mod:`~lockstep.local.replica_parameters`).
3. *Buffers.* A replica gets new tensors with the network's values (:mod:`~lockstep.local.replica_buffers`).
4. *Attributes.* A replica gets those that the network has now (:mod:`~lockstep.local.attributes`).

The replicas' parameters are made differentiable once, by one :class:`~lockstep.local.functions.GradientEdges` for each
bucket. These nodes save nothing, so they serve every backward; each sums its bucket into the network's parameters as
soon as the bucket's last gradient is there.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from lockstep._base.buckets import DEFAULT_CAP_BYTES
from lockstep._base.devices import DeviceLike, resolve_devices
from lockstep.local.attributes import Attributes
from lockstep.local.changes import ReplicaSlots, StructureSnapshot
from lockstep.local.checks import common_device, require_on
from lockstep.local.module_copy import CACHE, ModuleCopy, check_replicable
from lockstep.local.replica_buffers import ReplicaBuffers
from lockstep.local.replica_parameters import ReplicaParameters
from lockstep.phases import Phases


def replicate(network: Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[Module]:
    """Return one replica of a network for each device, whose gradients are summed into the network's parameters.

    Args:
        network: a module whose parameters and buffers are all on one device.
        devices: one entry for each replica; a device may stand there more than once.
        detach: give the replicas plain copies, without gradients to the network.

    The replicas of a network for the same devices are built once; every later call returns the same modules, brought
    up to date with whatever was set on the network since. The replicas for the two device lists used last are kept.
    On the network's own device they share its parameters' storage, and the first of them its buffers too. Raises
    :class:`~lockstep.errors.NotReplicableError` for lazy modules that have no shapes yet and for scripted modules with
    Python children. Communicates one copy for each 10 MiB bucket and other device. Stands for
    ``torch.nn.parallel.replicate``.

    >>> import torch
    >>> network = torch.nn.Linear(2, 1)
    >>> first, second = replicate(network, ["cpu", "cpu"])
    >>> (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    >>> network.bias.grad
    tensor([2.])
    """
    if len(devices) == 0:
        return []
    targets = resolve_devices(devices)
    make = partial(ReplicaSet, network, targets, detach=detach)
    replicas: ReplicaSet = cached(network, ("replicate", detach, *targets), make)
    return replicas.refresh()


KEPT = 2  # sets of replicas that a network keeps for the functional calls: for a whole batch, and for the last one


class _Cache(dict[Any, Any]):
    """Replica sets kept on a network for the functional calls. Copies and pickles of the network have an empty dict."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {}

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()  # no class of this library: a pickled network loads without lockstep, too


def cached(network: Module, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the object that ``make`` made before for this very network and ``key``; else make and keep it."""
    cache = vars(network).get(CACHE)
    if not isinstance(cache, _Cache) or cache.get("owner") != id(network):
        cache = vars(network)[CACHE] = _Cache(owner=id(network))  # also where copy.copy shared the original's
    found = cache.pop(key, None)
    if found is None:
        for oldest in list(cache)[1 : 1 - KEPT]:  # the first entry is the owner
            cache.pop(oldest, None)
        found = make()
    cache[key] = found  # the last used stands last
    return found


class ReplicaSet:
    """Persistent replicas of ``network`` on ``devices``: :meth:`refresh` brings them up to date and returns them.

    With ``network_first`` the first replica is the network itself, which must then be on the first device.
    """

    def __init__(
        self,
        network: Module,
        devices: Sequence[torch.device],
        *,
        detach: bool = False,
        network_first: bool = False,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        phases: Phases | None = None,
    ) -> None:
        self.network = network
        self.devices = list(devices)
        self.builds = 0
        self._detach = detach
        self._network_first = network_first
        self._cap_bytes = cap_bytes
        self._phases = phases or Phases("local")
        self._lock = threading.RLock()
        self._built: _Built | None = None

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        return f"{type(self).__name__}({type(self.network).__name__} on {devices}; built {self.builds} times)"

    def refresh(self) -> list[Module]:
        """Return the replicas, up to date with the network."""
        enabled = torch.is_grad_enabled()
        with self._lock, self._phases.phase("refresh"), torch.inference_mode(False), torch.no_grad():
            if self._built is None or not self._built.follow_network(gradients=enabled):
                self._built = None  # before new ones are made: old links keep a graph to parameters of another shape
                self._built = self._build()
            else:
                self._built.parameters.refresh(gradients=enabled)
            self._built.bind(grad=enabled and not self._detach)
            return ([self.network] if self._network_first else []) + [copy.root for copy in self._built.copies]

    def _build(self) -> "_Built":
        with self._phases.phase("build"):
            check_replicable(self.network)
            if self._network_first:
                require_on(self.network, self.devices[0])
            devices = self.devices[1:] if self._network_first else self.devices
            built = _Built(self.network, devices, self._network_first, self._detach, self._cap_bytes)
            self.builds += 1
            return built

    def after_forward(self) -> None:
        """Let attributes that the network's own forward has just set belong to each replica itself."""
        with self._lock:
            if self._built is not None:
                self._built.attributes.keep_what_forward_set()

    def check_slots(self) -> None:
        """Raise :class:`~lockstep.errors.NotReplicableError` if a forward has made a parameter in one replica, or has
        made a buffer larger in place."""
        with self._lock:
            if self._built is not None:
                self._built.slots.check()
                self._built.buffers.check_sizes()


class _Built:
    """Everything that is built at once for a network: a copy for each device, and a snapshot of the network."""

    def __init__(
        self, network: Module, devices: Sequence[torch.device], network_first: bool, detach: bool, cap_bytes: int
    ) -> None:
        modules = list(network.modules())
        source = common_device([*network.parameters(), *network.buffers()], "replicate")
        self.copies = [ModuleCopy(network) for _ in devices]
        self.parameters = ReplicaParameters(modules, self.copies, devices, detach=detach, cap_bytes=cap_bytes)
        self.parameters.bind()
        self.buffers = ReplicaBuffers(
            network,
            self.parameters.recopied,
            self.copies,
            devices,
            source=source,
            first_shares=not network_first,
            cap_bytes=cap_bytes,
        )
        self.buffers.refresh(grad=False)
        self._structure = StructureSnapshot(modules)
        self.attributes = Attributes(modules, self.copies)
        self.slots = ReplicaSlots(([modules] if network_first else []) + [copy.modules for copy in self.copies])

    def follow_network(self, *, gradients: bool) -> bool:
        """Look at what the network has now; return False if the copies as a whole are stale."""
        if self._structure.changed() or not self.parameters.follow_network(gradients=gradients):
            return False
        return self.attributes.follow_network()

    def bind(self, *, grad: bool) -> None:
        """Put parameters and buffers into the copies' slots, and set all attributes.

        Buffers are differentiable copies with ``grad``.
        """
        if not self.parameters.bound:
            self.slots.forget()  # old links keep a graph to the former parameters
        bound_anew = self.parameters.bind()
        self.buffers.refresh(grad=grad)
        self.attributes.give()
        if bound_anew or self.parameters.recopied:
            self.slots.look()
