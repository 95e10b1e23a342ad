"""Backward of CPU replicas, each on its own thread, as one backward pass over all of them would have been.

The engine has one thread for the CPU, so a pass over all losses would run the replicas one after the other. Here each
replica runs its own, which ends in leaves that only it has (:meth:`ReplicaSet.refresh` with ``leaves``). The first
replica is the network itself; what would reach its parameters is taken off before it does. Then everything is summed in
replica order, and given to the parameters in one pass of the engine. So whoever looks - hooks of a parameter, hooks
where it accumulates - sees the gradient of the whole batch, once, and other threads may run backward meanwhile.

That is right only where the replicas' graphs have nothing in common but is seen here: an input with a graph, a buffer
or another tensor that all replicas use and that needs a gradient, values that replicas exchanged. So the graphs are
looked through, which takes a small part of what running them takes; where two share a node, one pass runs all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.local import workers
from lockstep.local.gradient_sums import Gradients
from lockstep.phases import Phases


@dataclass(frozen=True, slots=True)
class LossGraph:
    """The nodes behind a loss; the leaf tensors in which they end; whether a reentrant checkpoint is among them."""

    nodes: set[Any]
    leaves: list[Tensor]
    reentrant: bool

    @classmethod
    def of(cls, loss: Tensor) -> "LossGraph":
        """The graph behind a loss, empty if it needs no gradient."""
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
        """Whether gradients can be taken off before they reach the leaves.

        Reentrant checkpoints refuse that. Hooks of a leaf that is no parameter would see its gradient twice.
        """
        return not self.reentrant and not any(_hooked(t) for t in self.leaves if id(t) not in parameters)


def _hooked(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def backward(
    losses: Sequence[Tensor], graphs: Sequence[LossGraph], parameters: Sequence[Tensor], phases: Phases
) -> Gradients:
    """Run backward for the losses of all replicas, of which the first uses ``parameters`` themselves.

    Returns the gradients that were taken off before they reached a leaf; others are on the replicas' leaves. A
    loss that needs no gradient adds nothing; if none needs one, the error is autograd's.
    """
    own = {id(parameter) for parameter in parameters}
    needing = [i for i, loss in enumerate(losses) if loss.requires_grad]
    if not needing:
        torch.autograd.backward(list(losses))
    if len(set().union(*(graph.nodes for graph in graphs))) < sum(len(graph.nodes) for graph in graphs):
        with phases.phase("backward"):
            return _in_one_pass([losses[i] for i in needing], [graphs[i] for i in needing], own)
    calls = [partial(_of_replica, i, losses[i], graphs[i], own, phases) for i in needing]
    return dict(chain(*(taken.items() for taken in workers.run(calls, [losses[i].device for i in needing]))))


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
