"""Splits nested inputs over devices, and gathers nested outputs.

All tensors of a call are split by one plan, so that row ``i`` of one leaf and row ``i`` of another go to the same
replica. Two kinds of tensors are not rows of the batch: a tensor marked by :func:`shared` goes whole to every
replica, and a tensor with as many rows as there are replicas, beside a larger batch, gives one row to each.
"""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep._base.devices import DeviceLike, resolve_destination, resolve_device, resolve_devices
from lockstep._base.tree import Leaf, Node, Tree, holds_tensors, open_node, tensors_in, tree_map
from lockstep.errors import LayoutError, LengthError, StructureError
from lockstep.local.comm import copy_to, even_split
from lockstep.local.functions import Broadcast, Gather, Scatter


def scatter(
    inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, split: Sequence[float] | None = None
) -> list[Any]:
    """Split the tensors of nested inputs along ``dim``; give everything else to each replica by reference.

    Args:
        inputs: tensors, tuples, named tuples, lists, dicts, dataclasses, types of the pytree registry, nested.
        target_gpus: the devices, one for each replica. They may be CPUs; the name is PyTorch's.
        dim: the dimension that is split. Tensors without dimensions, and tensors marked by :func:`shared`, go whole to
            every replica. If a tensor has one row for each device, next to tensors with more rows, each replica gets
            one of its rows.
        split: weights, one for each device; None splits evenly.

    Returns one nested value for each replica used: one for each device, or fewer if there are fewer rows. Communicates
    one copy for each tensor and device. Raises :class:`~lockstep.errors.LayoutError` for tensors that disagree in their
    size along ``dim``, naming both. Stands for ``torch.nn.parallel.scatter``.

    >>> import torch
    >>> scatter({"x": torch.arange(3), "flag": True}, ["cpu", "cpu"])
    [{'x': tensor([0, 1]), 'flag': True}, {'x': tensor([2]), 'flag': True}]
    """
    targets = resolve_devices(target_gpus)
    return [value for (value,) in _scatter([Tree(inputs, "inputs")], targets, dim, split)[0]]


class Shared:
    """A tensor that goes whole to every replica; made by :func:`shared`."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def shared(value: Any) -> Any:
    """Mark tensors among the inputs of ``DataParallel`` that are not rows of the batch: each replica gets them whole.

    Args:
        value: a tensor, such as an attention mask of shape (T, T) or class weights, or a nested value of tensors.

    Returns a value to pass to ``DataParallel``, or to a function of this module, in place of ``value``. The network
    gets tensors. Communicates one copy for each tensor and device; on the tensor's own device all replicas share its
    memory. Gradients are summed over the replicas.

    >>> import torch
    >>> scatter((torch.arange(4), shared(torch.tensor([7, 8, 9]))), ["cpu", "cpu"])
    [(tensor([0, 1]), tensor([7, 8, 9])), (tensor([2, 3]), tensor([7, 8, 9]))]
    """
    return tree_map(lambda leaf: Shared(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def unmarked(value: Any) -> Any:
    """Return the nested value with plain tensors in place of marked ones; ``value`` itself if nothing is marked."""
    tree = Tree(value, "inputs")
    if not any(isinstance(leaf.value, Shared) for leaf in tree.leaves):
        return value
    return tree.build([leaf.value.tensor if isinstance(leaf.value, Shared) else leaf.value for leaf in tree.leaves])


def scatter_kwargs(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    split: Sequence[float] | None = None,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments together, as :func:`scatter` does.

    Returns a tuple of positional and a tuple of keyword arguments for each replica used. Stands for
    ``torch.nn.parallel.scatter_gather.scatter_kwargs``.

    >>> import torch
    >>> scatter_kwargs((torch.arange(2),), {"flag": True}, ["cpu", "cpu"])
    (((tensor([0]),), (tensor([1]),)), ({'flag': True}, {'flag': True}))
    """
    shares, _ = scatter_arguments(inputs, kwargs, resolve_devices(target_gpus), dim, split)
    return tuple(args for args, _ in shares), tuple(kwargs for _, kwargs in shares)


def scatter_arguments(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    targets: Sequence[torch.device],
    dim: int,
    split: Sequence[float] | None,
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[int] | None]:
    """Return the arguments of each replica used, and the number of rows of each (None if there is nothing to split)."""
    trees = [Tree(tuple(inputs), "inputs"), Tree(dict(kwargs or {}), "kwargs")]
    shares, sizes = _scatter(trees, targets, dim, split)
    return [(args, keywords) for args, keywords in shares], sizes


def _scatter(
    trees: Sequence[Tree], targets: Sequence[torch.device], dim: int, split: Sequence[float] | None
) -> tuple[list[tuple[Any, ...]], list[int] | None]:
    """Return a value like each tree for each replica used, and the number of rows of each."""
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    rows = _rows(leaves, dim, len(targets))
    sizes = None if rows is None else split_sizes(rows, len(targets), split)
    used = targets if sizes is None else targets[: len(sizes)]
    if len(used) > 1:
        for leaf in leaves:
            if type(leaf.value) not in _USUAL:
                _look_into(leaf)
    columns = [_scatter_leaf(leaf.value, used, sizes, dim) for leaf in leaves]
    shares = [iter([column[i] for column in columns]) for i in range(len(used))]
    return [tuple([tree.build(share) for tree in trees]) for share in shares], sizes


def _scatter_leaf(value: Any, targets: Sequence[torch.device], sizes: Sequence[int] | None, dim: int) -> Sequence[Any]:
    whole = value.tensor if isinstance(value, Shared) else value
    if not isinstance(whole, torch.Tensor):
        return [value] * len(targets)
    if whole is not value or whole.dim() == 0:
        copies: Sequence[Any] = Broadcast.apply(targets, whole)
        return copies
    assert sizes is not None
    if value.shape[dim] != sum(sizes):  # one row for each replica
        sizes = [1] * len(targets)
    chunks: Sequence[Any] = Scatter.apply(targets, sizes, dim, value)
    return chunks


_USUAL = {torch.Tensor, torch.nn.Parameter, Shared, type(None), bool, int, float, complex, str, bytes}
_looked_into: "weakref.WeakSet[type]" = weakref.WeakSet()


def _look_into(leaf: Leaf) -> None:
    """Warn, once for each type, about an object that goes whole to each replica although it holds tensors."""
    kind = type(leaf.value)
    if kind in _looked_into:
        return
    _looked_into.add(kind)
    if not isinstance(leaf.value, torch.Tensor) and holds_tensors(leaf.value):
        warnings.warn(
            f"{leaf.path} is a {kind.__module__}.{kind.__qualname__}, which holds tensors, and goes whole to every "
            "replica: none of their rows are split. If they are rows of the batch, pass the tensors by themselves, or "
            "register the type with torch.utils._pytree.register_pytree_node",
            stacklevel=2,
        )


def _rows(leaves: Sequence[Leaf], dim: int, replicas: int) -> int | None:
    """Return the size along ``dim`` of the tensors that are split as the batch; None if there is no tensor to split.

    All tensors must agree on it, except those that have one row for each replica beside a batch that has more.
    """
    split: list[tuple[str, torch.Tensor]] = []
    for path, value in leaves:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.layout != torch.strided or value.is_nested:
            raise LayoutError(_without_rows(path, value))
        if not -value.dim() <= dim < value.dim():
            raise LayoutError(
                f"cannot split {path} along dim {dim}: its shape is {tuple(value.shape)}. Pass it without dimensions, "
                "or as lockstep.local.shared(tensor), to give it whole to every replica, or choose another dim."
            )
        split.append((path, value))
    sizes = {value.shape[dim] for _, value in split}
    if len(sizes) > 1:
        larger = [size for size in sizes if size != replicas]
        if len(larger) == 1 and replicas in sizes and larger[0] > replicas:
            return larger[0]
        first, size = split[0][0], split[0][1].shape[dim]
        path, other = next((p, t) for p, t in split if t.shape[dim] != size)
        raise LayoutError(
            f"cannot split the inputs along dim {dim}: {first} has size {size} there, and {path} has "
            f"{other.shape[dim]} (shape {tuple(other.shape)}). A tensor must have one row for each row of the others, "
            f"or, beside a batch of more rows than that, one for each of the {replicas} replicas. Pass one that every "
            "replica needs whole as lockstep.local.shared(tensor), or hold it in the module as a buffer."
        )
    return next(iter(sizes), None)


def _without_rows(path: str, value: torch.Tensor) -> str:
    layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    return (
        f"cannot split {path}: it is a {layout} tensor, whose rows do not lie in memory one after the other. Pass a "
        "dense one, and convert it inside forward, or, if every replica needs it whole, lockstep.local.shared(tensor)."
    )


def split_sizes(rows: int, parts: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return the number of rows of each replica used, in proportion to ``weights``, and at least one each.

    If there are fewer rows than devices, only the first replicas are used. Without weights, sizes differ by at most
    one. Raises :class:`~lockstep.errors.LayoutError` for weights that are not positive and
    :class:`~lockstep.errors.LengthError` unless there is one weight for each device.

    >>> split_sizes(9, 8), split_sizes(9, 2, [2, 1]), split_sizes(1, 2)
    ([2, 1, 1, 1, 1, 1, 1, 1], [6, 3], [1])
    """
    if weights is None:
        return even_split(rows, parts)
    if len(weights) != parts:
        raise LengthError(f"expected one weight in split for each of {parts} devices, got {list(weights)}")
    if not all(weight > 0 for weight in weights):
        raise LayoutError(f"expected weights above 0 in split, got {list(weights)}")
    if rows <= parts:
        return even_split(rows, parts)
    ideal = [rows * weight / sum(weights) for weight in weights]
    sizes = [max(1, int(share)) for share in ideal]
    while sum(sizes) < rows:
        sizes[max(range(parts), key=lambda i: ideal[i] - sizes[i])] += 1
    while sum(sizes) > rows:
        sizes[max((i for i in range(parts) if sizes[i] > 1), key=lambda i: sizes[i] - ideal[i])] -= 1
    return sizes


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Gather the nested outputs of the replicas on one device.

    Args:
        outputs: one nested value for each replica, of one structure.
        target_device: any device; ``-1`` and ``"cpu"`` mean the CPU.
        dim: the dimension along which tensors are concatenated. Tensors without dimensions become a vector.

    Leaves that are not tensors come back once if they are equal on all replicas (NaN equals NaN), else as a list in
    replica order. Communicates one copy for each tensor and device. Raises :class:`~lockstep.errors.StructureError` if
    the replicas' outputs have different structures, naming the place. Stands for ``torch.nn.parallel.gather``.

    >>> import torch
    >>> gather([{"y": torch.zeros(1), "n": 1}, {"y": torch.ones(2), "n": 2}], "cpu")
    {'y': tensor([0., 1., 1.]), 'n': [1, 2]}
    """
    outputs = list(outputs)
    if not outputs:
        raise LengthError("gather expects the outputs of at least one replica, got none")
    return _gather(outputs, resolve_destination(target_device), dim, "outputs")


def _gather(outputs: list[Any], target: torch.device, dim: int, path: str) -> Any:
    tensors = [isinstance(output, torch.Tensor) for output in outputs]
    if all(tensors):
        return _concatenate(outputs, target, dim, path)
    nodes = [open_node(output, path) for output in outputs]
    aligned = _align(nodes) if all(type(o) is type(outputs[0]) for o in outputs) else None
    if aligned is not None:
        columns = zip(aligned[0].names, *(node.children for node in aligned), strict=True)
        return aligned[0].build([_gather(list(items), target, dim, path + name) for name, *items in columns])
    if any(tensors) or any(next(tensors_in(output), None) is not None for output in outputs):
        raise StructureError(_differing(outputs, nodes, path))
    return outputs[0] if all(_same(outputs[0], other) for other in outputs[1:]) else outputs


def _concatenate(outputs: list[torch.Tensor], target: torch.device, dim: int, path: str) -> torch.Tensor:
    try:
        result: torch.Tensor = Gather.apply(target, dim, *outputs)
    except LayoutError as error:
        raise type(error)(f"cannot gather {path} along dim {dim}: {error}") from error
    return result


def _align(nodes: Sequence[Node | None]) -> list[Node] | None:
    """Return the opened containers with their children in one order; None unless all have the same children."""
    first = nodes[0]
    if first is None:
        return None
    aligned = []
    for node in nodes:
        if node is None or sorted(node.names) != sorted(first.names) or not _same(node.context, first.context):
            return None
        if node.names == first.names:
            aligned.append(node)
            continue
        by_name = dict(zip(node.names, node.children, strict=True))
        aligned.append(Node(first.names, [by_name[name] for name in first.names], node.build))
    return aligned


def _differing(outputs: list[Any], nodes: Sequence[Node | None], path: str) -> str:
    described = [
        f"replica {i}: {type(output).__name__}" + (f" with {', '.join(node.names) or 'nothing'}" if node else "")
        for i, (output, node) in enumerate(zip(outputs, nodes, strict=True))
    ]
    dicts = all(isinstance(output, dict) for output in outputs)
    reason = "All dicts must have the same number of keys, and the same keys" if dicts else "the structures differ"
    return (
        f"cannot gather {path}: {reason} ({'; '.join(described)}). Return the same structure from every replica, or "
        "keep the outputs apart with gather_outputs=False."
    )


def _same(one: Any, other: Any) -> bool:
    """Return True if two leaves are equal: arrays in all elements, NaN equal to NaN; never raises, for any type."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):  # the context that a registered type keeps beside its children
        return len(one) == len(other) and all(map(_same, one, other))
    if getattr(one, "shape", None) != getattr(other, "shape", None):  # comparing arrays would broadcast
        return False
    try:
        equal = one == other
        if isinstance(one, complex):
            equal = equal or (_same(one.real, other.real) and _same(one.imag, other.imag))
        elif not isinstance(equal, bool) or not equal:  # NaN is not equal to itself, but is the same on every replica
            equal = equal | ((one != one) & (other != other))
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:  # a user's __eq__ may raise anything; values that cannot be compared do not count as equal
        return False


def move(value: Any, device: DeviceLike) -> Any:
    """Move every tensor of a nested value to ``device``, differentiably; return ``value`` if all are there already."""
    target = resolve_device(device)
    if all(tensor.device == target for tensor in tensors_in(value)):
        return value
    return tree_map(lambda leaf: copy_to(leaf, target) if isinstance(leaf, torch.Tensor) else leaf, value)
