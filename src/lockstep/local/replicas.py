"""Replicas of a network that are built once and then only kept up to date.

A :class:`ReplicaSet` holds one whole copy of the module tree for each device (:mod:`~lockstep.local.module_copy`). Each
use begins with :meth:`ReplicaSet.refresh`, which goes through the following, in this order:

1. *Notice.* One pass over the network (:mod:`~lockstep.local.changes`). Other submodules or parameters, or data that is
   elsewhere: build everything anew. Otherwise carry over the attributes and hooks that were set since the last use, and
   give up what the forward of another replica than the first has set, but for what the first one's sets, too.
2. *Parameters.* On the network's device replicas use the parameters' own storage. On others the values are brought up
   to date in flat transfers (:mod:`~lockstep.local.parameters`): always if a gradient is wanted; otherwise those that
   are others than were sent.
3. *Buffers.* A replica gets new tensors with the network's values (:mod:`~lockstep.local.fresh`).

The replicas' parameters are made differentiable once, by one :class:`~lockstep.local.functions.GradientEdges` a
bucket. Those nodes save nothing, so they serve every backward, each summing its bucket into the network's parameters
as soon as its last gradient is there. For :meth:`ReplicaSet.collect_gradients` the replicas have *leaves* in their
slots instead.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.buckets import DEFAULT_CAP_BYTES, TensorSpec, plan_buckets
from lockstep.devices import DeviceLike, resolve_devices
from lockstep.errors import DeviceError
from lockstep.local.changes import Attributes, CopyAttributes, Structure
from lockstep.local.fresh import FreshSlots
from lockstep.local.functions import link
from lockstep.local.gradient_sums import Gradients, accumulate, summed
from lockstep.local.in_use import Uses
from lockstep.local.layout import common_device
from lockstep.local.made_in_forward import ReplicaSlots
from lockstep.local.module_copy import CACHE, ModuleCopy, check_replicable
from lockstep.local.parameters import ParameterValues
from lockstep.local.tensor_state import Tensors, addresses, layouts
from lockstep.phases import Phases


def replicate(network: Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[Module]:
    """One replica of a network for each device, whose gradients sum into the network's parameters.

    Args:
        network: a module whose parameters and buffers are all on one device.
        devices: one entry for each replica; a device may stand there more than once.
        detach: give the replicas plain copies, without gradients to the network.

    The replicas of a network for the same devices are built once; every later call returns the same modules, brought
    up to date with whatever was set on the network since. Those for the two device lists that were used last are kept.
    On the network's own device they share its parameters' storage, and the first of them its buffers too. Raises
    :class:`~lockstep.errors.NotReplicableError` for lazy modules that have no shapes yet and for scripted modules with
    Python children. Communicates one copy a 10 MiB bucket and other device. Stands for ``torch.nn.parallel.replicate``.

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


def require_on(network: Module, device: torch.device) -> None:
    """Raise :class:`~lockstep.errors.DeviceError`, naming the first parameter or buffer that is not on ``device``."""
    for kind, named in (("parameter", network.named_parameters()), ("buffer", network.named_buffers())):
        for name, tensor in named:
            if tensor.device != device:
                raise DeviceError(
                    f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of "
                    f"them on device: {tensor.device} ({kind} {name}). Move it there with module.to('{device}')."
                )


KEPT = 2  # how many sets of replicas a network keeps for the functional calls: for a whole batch, and for the last one


class _Cache(dict[Any, Any]):
    """What is kept on a network for the functional calls. Its copies and pickles have an empty dict there."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {}

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()  # no class of ours: a pickled network loads where there is no lockstep


def cached(network: Module, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` made for this very network and ``key`` before, or makes now."""
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
    :attr:`uses` keeps a step and other uses apart.
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
        self.network, self.devices = network, list(devices)
        self.builds = 0
        self._detach, self._network_first, self._cap_bytes = detach, network_first, cap_bytes
        self._copy_devices = self.devices[1:] if network_first else self.devices
        self._phases = phases or Phases()
        self._lock = threading.RLock()
        self.uses = Uses()
        self._structure: Structure | None = None
        self._linked: list[list[Tensor]] = []
        self._leaves: list[list[Tensor]] = []
        self._bound: list[list[Tensor]] | None = None
        self._copies: list[ModuleCopy] = []
        self._replica_slots: ReplicaSlots | None = None
        self._astray = False
        self._fresh: FreshSlots | None = None
        self._attributes = Attributes([])
        self._of_copies: list[CopyAttributes] = []
        self._kept: set[tuple[int, str]] = set()  # attributes that forward sets, of which every replica has its own

    # Use #

    def refresh(self, *, leaves: bool = False) -> list[Module]:
        """The replicas, up to date with the network; with ``leaves`` as :meth:`collect_gradients` needs them."""
        enabled = torch.is_grad_enabled()
        with self._lock, self._phases.phase("refresh"), torch.inference_mode(False), torch.no_grad():
            if self._notice():
                self._build()
            else:
                self._refresh_parameters(everything=enabled)
            bound_anew = self._bind_parameters(leaves)
            if leaves:  # no other use: a step of another thread may be in its backward
                for leaf in chain(*self._leaves):
                    leaf.grad = None  # of a step that failed halfway
            self._refresh_fresh(grad=enabled and not self._detach, always=enabled)
            if (bound_anew or self._loose) and self._replica_slots is not None:
                self._replica_slots.look()
        return ([self.network] if self._network_first else []) + [copy.root for copy in self._copies]

    def absorb(self) -> None:
        """Look at what a forward has left behind.

        Attributes that the network's own forward has set stay its own: the next refresh does not carry them over, and
        lets each replica keep its own. It does carry over hooks: one that removes itself at its first call must be gone
        from every replica. A replica whose parameters have strayed gets new ones at the next refresh.
        """
        with self._lock:
            if self._structure is not None and self._attributes.changed():
                self._kept.update(_pairs(self._attributes.disregard()))
            self._astray = self._astray or self._strayed()  # the leaves are still needed, to collect gradients

    def check_slots(self) -> None:
        """Raise :class:`~lockstep.errors.NotReplicableError` if a forward has made a parameter, which only one replica
        has."""
        with self._lock:
            if self._replica_slots is not None:
                self._replica_slots.check()

    def collect_gradients(self) -> None:
        """Add the gradients on the replicas' leaves to the network's, in replica order, and take them off the
        leaves."""
        accumulate(*self.take_gradients({}))

    def take_gradients(self, captured: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """The network's parameters that have gradients, and the sums of those, in replica order.

        They are taken off the replicas' leaves, and out of ``captured``, which may have some of the network's own
        parameters and of the leaves.
        """
        rows: list[list[Tensor | None]] = [[captured.pop(id(p), (p, None))[1] for p in self._persistent]]
        owned = [False]
        for leaves in self._leaves:
            owned.append(not any(id(leaf) in captured for leaf in leaves))
            rows.append([])
            for parameter, leaf in zip(self._persistent, leaves, strict=True):
                grad = leaf.grad if owned[-1] else captured.pop(id(leaf), (leaf, None))[1]
                rows[-1].append(grad if grad is None else grad.to(parameter.device))
                leaf.grad = None
        totals = summed(rows, owned)
        reached = [i for i, total in enumerate(totals) if total is not None]
        return [self._persistent[i] for i in reached], [total for total in totals if total is not None]

    # Notice #

    def _notice(self) -> bool:
        """Carry over changed attributes; or tell that the replicas are stale as a whole."""
        if self._structure is None or self._structure.changed():
            return True
        if self._parameters.moved():
            if self._parameters.retyped():
                return True
            self._place_values()  # the same parameters, elsewhere: RNN.flatten_parameters, p.data = ...
        changed = self._attributes.changed()
        if changed and self._structure.replaced():
            return True
        self._give_up_strays()
        if changed:
            changes = self._attributes.take_changes()
            self._kept.difference_update(_pairs(changes))
            self._carry_over(changes)
        return False

    def _carry_over(self, changes: list[tuple[int, list[str]]]) -> None:
        """Set attributes of the network in every copy."""
        leading = self._attributes.leading
        for copy, of_copy in zip(self._copies, self._of_copies, strict=True):
            copy.set_attributes(changes, leading)
            of_copy.look_again(index for index, _ in changes)

    def _give_up_strays(self) -> None:
        """Set attributes anew that only a forward of a copy has set: else they could not be reset on the network."""
        for copy, of_copy in zip(self._copies, self._of_copies, strict=True):
            if not of_copy.changed():
                continue
            changes = of_copy.take_changes()
            strays = [(i, [name for name in names if (i, name) not in self._kept]) for i, names in changes]
            copy.set_attributes(strays, self._attributes.leading)
            of_copy.look_again(index for index, names in strays if names)

    # Build #

    def _build(self) -> None:
        with self._phases.phase("build"):
            check_replicable(self.network)
            self._replica_slots = None
            self._copies, self._of_copies = [], []  # else old links keep a graph to parameters of another shape
            self._fresh = None
            self._modules = list(self.network.modules())
            if self._network_first:
                require_on(self.network, self.devices[0])
            self._source = common_device([*self.network.parameters(), *self.network.buffers()], "replicate")
            self._sort_slots()
            self._place_values()
            self._copies = [ModuleCopy(self.network) for _ in self._copy_devices]
            self._fresh = FreshSlots(
                self.network,
                self._loose,
                self._copies,
                self._copy_devices,
                source=self._source,
                first_shares=not self._network_first,
                cap_bytes=self._cap_bytes,
                check=partial(require_on, self.network),
            )
            self._bind_parameters(leaves=False)
            self._fresh.refresh(grad=False, always=True)
            self._attributes, self._structure = Attributes(self._modules), Structure(self._modules)
            leading = self._attributes.leading
            for copy in self._copies:
                copy.set_all_attributes(leading)
            self._of_copies = [CopyAttributes(copy.modules) for copy in self._copies]
            self._kept = set()
            own = [self._modules] if self._network_first else []
            self._replica_slots = ReplicaSlots(own + [copy.modules for copy in self._copies])
            self.builds += 1

    def _sort_slots(self) -> None:
        """Which parameters are linked once, with the module that owns each, and which slots get new tensors each
        time."""
        numbers: dict[int, int] = {}
        self._persistent: list[Tensor] = []
        self._owners: list[int] = []
        self._slots: dict[tuple[int, str], int | None] = {}
        self._loose: list[tuple[int, str]] = []
        for index, name, tensor in _all_slots(self._modules, "_parameters"):
            if tensor is not None and not _persists(tensor):
                self._loose.append((index, name))
                continue
            if tensor is not None and id(tensor) not in numbers:
                self._persistent.append(tensor)
                self._owners.append(index)
            self._slots[index, name] = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
        self._hooked = _hooked(self._persistent)

    # Parameters #

    def _place_values(self) -> None:
        self._parameters = Tensors(self._persistent)
        self._values = ParameterValues(self._persistent, self._copy_devices, self._cap_bytes)
        self._unbind_parameters()

    def _unbind_parameters(self) -> None:
        self._leaves, self._linked, self._bound, self._astray = [], [], None, False
        if self._replica_slots is not None:  # old links keep a graph to parameters that may have another shape now
            self._replica_slots.forget()

    def _strayed(self, *, quick: bool = False) -> bool:
        """Whether a forward gave a replica's parameter other data (``p.data = ...``), which no transfer would reach.

        A quick look takes it that other data is elsewhere.
        """
        return any(
            addresses(bound) != self._values.addresses[device]
            or not (quick or layouts(bound) == self._values.layouts[device])
            for device, bound in zip(self._copy_devices, self._bound or (), strict=False)
        )

    def _refresh_parameters(self, *, everything: bool) -> None:
        self._astray = self._astray or (not self._network_first and self._strayed(quick=True))
        hooked = _hooked(self._persistent)
        if self._parameters.requirements_changed() or self._astray or hooked != self._hooked:
            self._unbind_parameters()
        self._hooked = hooked
        if self._values.travel:  # else nobody asks what was written
            self._values.transfer(self._parameters.written(), everything=everything)

    def _bind_parameters(self, leaves: bool) -> bool:
        """Put linked tensors, or leaves, into the replicas' slots; False if they are there already."""
        if leaves and not self._leaves:
            self._leaves = [self._new_parameters(d, requires_grad=True) for d in self._copy_devices]
        if not leaves and not self._linked:
            self._linked = self._new_linked()
        wanted = self._leaves if leaves else self._linked
        if self._bound is wanted:
            return False
        self._bound = wanted
        for copy, tensors in zip(self._copies, wanted, strict=True):
            in_slots = [None if i is None else tensors[i] for i in self._slots.values()]
            copy.bind("_parameters", list(self._slots), in_slots)
        self._rebind_attributes()
        return True

    def _new_parameters(self, device: torch.device, *, requires_grad: bool) -> list[Tensor]:
        pairs = zip(self._values.on(device), self._persistent, strict=True)
        return [Parameter(value, requires_grad and p.requires_grad) for value, p in pairs]

    def _new_linked(self) -> list[list[Tensor]]:
        """Parameters for every copy, differentiable, linked bucket by bucket, late layers first."""
        rows = [self._new_parameters(d, requires_grad=False) for d in self._copy_devices]
        needing = [i for i, p in enumerate(self._persistent) if p.requires_grad and not self._detach]
        backwards = needing[::-1]
        alone = set(self._hooked)
        together = [i for i in backwards if i not in alone]
        plan = plan_buckets([TensorSpec.of(self._persistent[i]) for i in together], self._cap_bytes)
        groups = [[together[slot.index] for slot in bucket.slots] for bucket in plan.buckets]
        for members in [*groups, *([i] for i in self._hooked if i in backwards)] if rows else ():
            link(
                [row[i] for row in rows for i in members],
                [self._owners[i] for i in members],
                [self._persistent[i] for i in members],
            )
        return rows

    # Buffers, and parameters that cannot persist #

    def _refresh_fresh(self, *, grad: bool, always: bool) -> None:
        """Bind new tensors to the slots whose tensors are not persistent; attributes that hold them follow."""
        exchanged = self._fresh.refresh(grad=grad, always=always) if self._fresh is not None else set()
        self._rebind_attributes()
        if exchanged and (changes := self._attributes.holding(exchanged)):
            self._carry_over(changes)

    def _rebind_attributes(self) -> None:
        for copy, of_copy in zip(self._copies, self._of_copies, strict=False):  # none of these yet while building
            if numbers := copy.rebind_attributes():
                of_copy.look_again(numbers, often=True)


def _pairs(changes: list[tuple[int, list[str]]]) -> set[tuple[int, str]]:
    return {(index, name) for index, names in changes for name in names}


def _hooked(parameters: Sequence[Tensor]) -> list[int]:
    """The numbers of those with gradient hooks. Each is linked alone: a node that runs calls the hooks of all its
    parameters, with None for those that got no gradient."""
    return [i for i, parameter in enumerate(parameters) if parameter._backward_hooks]


def _persists(tensor: Tensor) -> bool:
    """Whether copies of a parameter can be linked once and for all: it is a leaf, dense, and a plain tensor."""
    return tensor.is_leaf and tensor.layout == torch.strided and type(tensor) in (Parameter, Tensor)


def _all_slots(modules: Sequence[Module], kind: str) -> list[tuple[int, str, Tensor | None]]:
    return [(index, name, tensor) for index, m in enumerate(modules) for name, tensor in getattr(m, kind).items()]
