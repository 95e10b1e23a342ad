"""Runs backward of each CPU replica in its own thread, with the result of one backward pass over all.

The engine has one thread for the CPU, so a pass over all losses would run the replicas one after the other. Here each
replica runs a pass of its own, which ends in leaves that only this replica has (:meth:`ReplicaSet.refresh` with
``leaves``). The first replica is the network itself; its gradients are captured before they reach its parameters. Then
all gradients are summed in replica order and given to the parameters in one pass of the engine. So every observer -
hooks of a parameter, hooks where it accumulates - sees the gradient of the whole batch, once, and other threads may run
backward meanwhile.

That is right only if the replicas' graphs share nothing but what is handled here. They may share more: an input with a
graph, a buffer or another tensor that all replicas use and that needs a gradient, values that replicas exchanged. So
the graphs are searched, which takes a small part of the time of running them; if two share a node, one pass runs all.
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


def backward(
    losses: Sequence[Tensor], graphs: Sequence[LossGraph], parameters: Sequence[Tensor], phases: Phases
) -> Gradients:
    """Run backward for the losses of all replicas, of which the first uses ``parameters`` themselves.

    Returns the gradients that were captured before they reached a leaf; the others are on the replicas' leaves. A loss
    that needs no gradient adds nothing; if none needs one, this raises autograd's error.
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
