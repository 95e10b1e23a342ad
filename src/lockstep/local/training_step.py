"""One training step in replicas: forward, loss, backward, and the sums of the gradients.

The engine has one thread for the CPU, so a pass over all losses would run the backward of CPU replicas one after the
other. So there each replica runs a pass of its own, *apart*, in its own thread, which ends in leaves that only this
replica has (:meth:`ReplicaSet.refresh` with ``leaves``). The first replica is the network itself; its gradients are
captured before they reach its parameters. Then all gradients are summed in replica order and given to the parameters in
one pass of the engine. So every observer - hooks of a parameter, hooks where it accumulates - sees the gradient of the
whole batch, once, and other threads may run backward meanwhile.

That is right only if the replicas' graphs share nothing but what is handled here. They may share more: an input with a
graph, a buffer or another tensor that all replicas use and that needs a gradient, values that replicas exchanged. So
the graphs are searched, which takes a small part of the time of running them; if two share a node, one pass runs all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.errors import LayoutError
from lockstep.local import workers
from lockstep.local.gradient_sums import Gradients, accumulate
from lockstep.local.replicas import ReplicaSet
from lockstep.phases import Phases

LossFunction = Callable[..., Tensor]
Share = tuple[tuple[Any, ...], Any]  # positional and keyword arguments of one replica


@dataclass(frozen=True, slots=True)
class LossGraph:
    """The nodes behind a loss, the leaf tensors at their ends, and whether a reentrant checkpoint is among them."""

    nodes: set[Any]
    leaves: list[Tensor]
    reentrant: bool

    @classmethod
    def of(cls, loss: Tensor) -> "LossGraph":
        """Return the graph behind a loss, empty if the loss needs no gradient."""
        todo = [] if loss.grad_fn is None else [loss.grad_fn]
        nodes: set[Any] = set(todo)
        ends: list[Any] = []
        while todo:
            edges = todo.pop().next_functions
            for node, _ in edges:
                if node is not None and node not in nodes:
                    nodes.add(node)
                    todo.append(node)
                    if not node.next_functions:
                        ends.append(node)
        leaves = [node.variable for node in ends if hasattr(node, "variable")]
        if loss.grad_fn is None and loss.requires_grad:
            leaves.append(loss)
        return cls(nodes, leaves, any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes))

    def capturable(self, parameters: set[int]) -> bool:
        """Return True if gradients can be captured before they reach the leaves.

        Reentrant checkpoints do not allow that. Hooks of a leaf that is no parameter would see its gradient twice.
        """
        return not self.reentrant and not any(_hooked(t) for t in self.leaves if id(t) not in parameters)


def _hooked(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


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
) -> list[Tensor]:
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
) -> list[tuple[Tensor, LossGraph | None]]:
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
) -> tuple[Tensor, LossGraph | None]:
    inputs, target = (args[:-1], args[-1:]) if len(args) > 1 else (args, ())
    output = forward(phases, index, replica, *inputs)
    with phases.phase("loss", replica=index):
        loss = loss_fn(output, *target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LayoutError(f"loss_fn must return one number, the mean over its rows; in replica {index} it gave {got}")
    return loss, LossGraph.of(loss) if apart else None


def _has_hooks(network: ReplicaSet) -> bool:
    """Return True if a parameter has gradient hooks: they must see the whole gradient, not each replica's."""
    return any(map(_hooked, network.network.parameters()))


def _backward_apart(
    losses: Sequence[Tensor], graphs: Sequence[LossGraph], networks: Sequence[ReplicaSet], phases: Phases
) -> None:
    """Run backward for the losses of all replicas, and add the sums of their gradients to the leaves.

    A loss that needs no gradient adds nothing; if none needs one, this raises autograd's error.
    """
    own = {id(parameter) for network in networks for parameter in network.network.parameters()}
    needing = [i for i, loss in enumerate(losses) if loss.requires_grad]
    if not needing:
        torch.autograd.backward(list(losses))
    if len(set().union(*(graph.nodes for graph in graphs))) < sum(len(graph.nodes) for graph in graphs):
        with phases.phase("backward"):
            captured = _in_one_pass([losses[i] for i in needing], [graphs[i] for i in needing], own)
    else:
        calls = [partial(_of_replica, i, losses[i], graphs[i], own, phases) for i in needing]
        captured = dict(chain(*(taken.items() for taken in workers.run(calls, [losses[i].device for i in needing]))))
    with phases.phase("reduce"):
        accumulate(*_gradients(networks, captured))


def _gradients(networks: Sequence[ReplicaSet], captured: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """Return all leaf tensors for which a step has gradients, in the networks and elsewhere, and the gradients."""
    tensors: list[Tensor] = []
    gradients: list[Tensor] = []
    for network in networks:
        some, their = network.take_gradients(captured)
        tensors += some
        gradients += their
    tensors += [leaf for leaf, _ in captured.values()]
    gradients += [gradient for _, gradient in captured.values()]
    captured.clear()
    return tensors, gradients


def _of_replica(index: int, loss: Tensor, graph: LossGraph, own: set[int], phases: Phases) -> Gradients:
    with phases.phase("backward", replica=index):
        if index == 0 and graph.capturable(own):
            return _captured([loss], graph.leaves)
        loss.backward()
        return {}


def _in_one_pass(losses: Sequence[Tensor], graphs: Sequence[LossGraph], own: set[int]) -> Gradients:
    if all(graph.capturable(own) for graph in graphs):
        leaves = {id(leaf): leaf for graph in graphs for leaf in graph.leaves}
        return _captured(losses, list(leaves.values()))
    torch.autograd.backward(list(losses))
    return {}


def _captured(losses: Sequence[Tensor], leaves: Sequence[Tensor]) -> Gradients:
    found = torch.autograd.grad(list(losses), list(leaves), allow_unused=True)
    return {id(leaf): (leaf, grad) for leaf, grad in zip(leaves, found, strict=True) if grad is not None}
