"""Where a module lies, and where its inputs go."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.utils.rnn import PackedSequence

from lockstep.devices import resolve_device
from lockstep.distributed import registry
from lockstep.distributed.buffers import has_overlap
from lockstep.distributed.dtensors import local_part
from lockstep.distributed.options import Options
from lockstep.errors import AlreadyManagedError, NotReplicableError, OptionError
from lockstep.tree import Tree, tree_map


def sharded_children(module: Module) -> Iterator[Module]:
    """The modules below ``module`` that ``fully_shard`` manages; raises if it is ``module`` itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    if isinstance(module, kinds):
        raise AlreadyManagedError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`; replicate over another "
            "dimension of the mesh with fully_shard(mesh=) itself, or leave this module to one of the two"
        )
    return (child for child in module.modules() if isinstance(child, kinds))


def left_out(module: Module, ignored: Iterable[Module], options: Options) -> tuple[set[Module], set[str]]:
    """The modules, and the names of parameters and buffers, that are not replicated."""
    roots = (*ignored, *sharded_children(module), *registry.replicated_children(module))
    modules = {each for root in roots for each in root.modules()}
    names = {*options.params_and_buffers_to_ignore, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    return modules, names


def check_devices(named: Sequence[tuple[str, Tensor]], options: Options) -> None:
    """Raise :class:`OptionError` for devices that do not go together."""
    devices = {tensor.device for _, tensor in named}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise OptionError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {kinds}"
        )
    if options.device_ids is not None and len(options.device_ids) > 1:
        raise OptionError(
            f"device_ids can only be None or contain a single element. Got {list(options.device_ids)}; a rank has "
            "one device, lockstep.DataParallel uses several in one process"
        )
    if (options.device_ids or options.output_device) and (len(devices) > 1 or kinds == {"cpu"}):
        raise OptionError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device/multiple-device GPU modules or CPU modules, but got device_ids {options.device_ids}, "
            f"output_device {options.output_device}, and module parameters {devices}."
        )


def check_kinds(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise :class:`NotReplicableError` for parameters that cannot be synchronised."""
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_leaf:
            raise NotReplicableError(f"parameter {name} is not a leaf of autograd; register a Parameter")
        if has_overlap(local_part(parameter)):
            raise NotReplicableError(
                f"parameter {name} has elements that share memory, as an expanded tensor has, and cannot be written; "
                "register parameter.contiguous() or .clone()"
            )


def check_embeddings(named: Sequence[tuple[str, Module]]) -> None:
    """Raise :class:`NotReplicableError` for embeddings that rewrite their weights, each rank the rows that it uses."""
    for name, module in named:
        embeds = isinstance(module, Embedding | EmbeddingBag)
        if embeds and module.max_norm is not None and module.weight is not None and module.weight.requires_grad:
            weight = f"{name}.weight" if name else "weight"
            raise NotReplicableError(
                f"parameter {weight} belongs to an embedding with max_norm={module.max_norm}, whose forward shortens "
                "the rows that it looks up: other rows on each rank, so that replicas would drift apart. Use "
                "max_norm=None, and shorten rows after optimizer.step() on every rank alike; or leave the parameter "
                "out, by params_and_buffers_to_ignore"
            )


def input_device(options: Options) -> torch.device | None:
    """The accelerator that tensors among the inputs are moved to, None to leave them."""
    given = options.device_id if options.device_id is not None else next(iter(options.device_ids or ()), None)
    if given is None:
        return None
    device = resolve_device(given)
    return None if device.type == "cpu" else device


def move_to(value: Any, device: torch.device) -> Any:
    """Nested inputs with their tensors on ``device``; containers keep their types."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor | PackedSequence) else leaf  # type: ignore[arg-type]

    return tree_map(moved, value, "inputs", whole=(PackedSequence,))


def outputs_in(value: Any) -> Iterator[Tensor]:
    """Every tensor among nested outputs."""
    for leaf in Tree(value, "outputs", whole=(PackedSequence,)).leaves:
        tensor = leaf.value.data if isinstance(leaf.value, PackedSequence) else leaf.value
        if isinstance(tensor, Tensor):
            yield tensor
