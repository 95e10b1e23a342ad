"""Moves the tensors of nested inputs to a device, and finds those in nested outputs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.devices import resolve_device
from lockstep.distributed.options import Options
from lockstep.tree import Tree, tree_map


def input_device(options: Options) -> torch.device | None:
    """The accelerator that tensors among the inputs are moved to, None to leave them."""
    given = options.device_id if options.device_id is not None else next(iter(options.device_ids or ()), None)
    if given is None:
        return None
    device = resolve_device(given)
    return None if device.type == "cpu" else device


def move_to(value: Any, device: torch.device) -> Any:
    """Nested inputs with their tensors on ``device``; containers keep their types."""

    def on_device(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor | PackedSequence) else leaf  # type: ignore[arg-type]

    return tree_map(on_device, value, "inputs", whole=(PackedSequence,))


def outputs_in(value: Any) -> Iterator[Tensor]:
    """Every tensor among nested outputs."""
    for leaf in Tree(value, "outputs", whole=(PackedSequence,)).leaves:
        tensor = leaf.value.data if isinstance(leaf.value, PackedSequence) else leaf.value
        if isinstance(tensor, Tensor):
            yield tensor
