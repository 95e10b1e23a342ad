"""One training step in replicas: forward, loss, backward, and the sums of the gradients.

The engine would run the backward of all CPU replicas one after the other in the calling thread. So there each replica
runs its own backward: *apart*, into leaves of its own (:mod:`~lockstep.local.replica_backward`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from lockstep.errors import LayoutError
from lockstep.local import replica_backward, workers
from lockstep.local.gradient_sums import Gradients, accumulate
from lockstep.local.replica_backward import LossGraph
from lockstep.local.replicas import ReplicaSet
from lockstep.phases import Phases

LossFunction = Callable[..., torch.Tensor]
Share = tuple[tuple[Any, ...], Any]  # positional and keyword arguments of one replica


def forward(phases: Phases, index: int, replica: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one replica's forward under a label for the profiler, and return its output."""
    with phases.phase("forward", replica=index):
        return replica(*args, **kwargs)


@contextmanager
def running(networks: Sequence[ReplicaSet]) -> Iterator[None]:
    """Mark the first network as a replica while replicas run: it warns if its gradients are cleared in forward."""
    attributes = vars(networks[0].network)
    attributes["_is_replica"] = True
    try:
        yield
    finally:
        attributes.pop("_is_replica", None)
        for network in networks:
            network.after_forward()
    for network in networks:
        network.check_slots()


def training_step(
    networks: Sequence[ReplicaSet],
    loss_fn: LossFunction,
    shares: Sequence[Share],
    weights: Sequence[float],
    phases: Phases,
) -> list[torch.Tensor]:
    """Return the replicas' weighted losses, after their backward; other steps of the networks wait meanwhile.

    The first of ``networks`` is the model; the second, if there is one, is ``loss_fn``.
    """
    with ExitStack() as stepping:
        for network in sorted(networks, key=id):  # the same order in every thread, so that no two wait for each other
            stepping.enter_context(network.uses.step())
        devices = networks[0].devices[: len(shares)]
        apart = len(shares) > 1 and all(device.type == "cpu" for device in devices)
        apart = apart and not any(map(_has_hooks, networks))
        results = _run_forward(networks, loss_fn, shares, devices, apart, phases)
        weighted = [loss * weight for (loss, _), weight in zip(results, weights, strict=True)]
        graphs = [graph for _, graph in results if graph is not None]
        with torch.autocast("cpu", enabled=False):
            if apart:
                _backward_apart(weighted, graphs, networks, phases)
            else:
                with phases.phase("backward"):
                    needing = [loss for loss in weighted if loss.requires_grad]
                    torch.autograd.backward(needing or weighted)  # autograd's error if no loss needs a gradient
        return weighted


def _run_forward(
    networks: Sequence[ReplicaSet],
    loss_fn: LossFunction,
    shares: Sequence[Share],
    devices: Sequence[torch.device],
    apart: bool,
    phases: Phases,
) -> list[tuple[torch.Tensor, LossGraph | None]]:
    """Return each replica's loss, with the graph behind it if the replica runs its own backward."""
    with ExitStack() as alone:
        for network in sorted(networks, key=id):
            alone.enter_context(network.uses.forward_of_step())
        modules, *others = [network.refresh(leaves=apart) for network in networks]
        loss_fns = others[0] if others else [loss_fn] * len(shares)
        calls = [
            partial(_loss, phases, index, modules[index], loss_fns[index], args, apart)
            for index, (args, _) in enumerate(shares)
        ]
        with running(networks):
            return workers.run(calls, devices)


def _loss(
    phases: Phases, index: int, replica: Module, loss_fn: LossFunction, args: tuple[Any, ...], apart: bool
) -> tuple[torch.Tensor, LossGraph | None]:
    inputs, target = (args[:-1], args[-1:]) if len(args) > 1 else (args, ())
    output = forward(phases, index, replica, *inputs)
    with phases.phase("loss", replica=index):
        loss = loss_fn(output, *target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LayoutError(f"loss_fn must return one number, the mean over its rows; in replica {index} it gave {got}")
    return loss, LossGraph.of(loss) if apart else None


def _backward_apart(
    losses: Sequence[torch.Tensor], graphs: Sequence[LossGraph], networks: Sequence[ReplicaSet], phases: Phases
) -> None:
    parameters = [p for network in networks for p in network.network.parameters()]
    captured = replica_backward.backward(losses, graphs, parameters, phases)
    with phases.phase("reduce"):
        accumulate(*_gradients(networks, captured))


def _gradients(networks: Sequence[ReplicaSet], captured: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all leaf tensors for which a step has gradients, in the networks and elsewhere, and the gradients."""
    tensors: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for network in networks:
        some, their = network.take_gradients(captured)
        tensors += some
        gradients += their
    rest = list(captured.values())
    captured.clear()
    return [*tensors, *(leaf for leaf, _ in rest)], [*gradients, *(gradient for _, gradient in rest)]


def _has_hooks(network: ReplicaSet) -> bool:
    """Return True if a parameter has gradient hooks: they must see the whole gradient, not each replica's."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in network.network.parameters())
