"""``StateSlice``: this rank's slice of a tensor of an optimizer's state, which can only be saved and loaded.

It has the shape, dtype and device of the whole tensor, and implements the protocol of ``torch.distributed.checkpoint``.
A checkpoint holds rectangular blocks, into which the ranks' slices are cut, so it can be loaded on any number of ranks,
and into the state of a plain optimizer.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.errors import ShardingError
from lockstep.sharding.partition import Block, blocks_of
from lockstep.sharding.pieces import in_former_order, in_order, memory_order

_KEEPS = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


class StateSlice(Tensor):
    """A rank's slice of a tensor that belongs to a parameter, as ``optimizer.state_dict()`` returns it.

    ``local`` has the elements from ``start`` on, in one dimension. ``order`` lists the dimensions of the whole tensor
    in the order in which they lie in memory, the slowest first.
    """

    local: Tensor
    start: int
    order: list[int]

    @staticmethod
    def __new__(cls: Any, local: Tensor, start: int, shape: Sequence[int], order: list[int]) -> "StateSlice":
        """Wrap a slice of a tensor of this shape, whose dimensions lie in memory in this order."""
        state_slice: StateSlice = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        state_slice.local, state_slice.start, state_slice.order = local, start, order
        return state_slice

    @classmethod
    def of(cls, local: Tensor, start: int, like: Tensor) -> "StateSlice":
        """Return the slice of a tensor that has the layout of ``like``."""
        return cls(local, start, like.shape, memory_order(like))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        last = self.start + self.local.numel()
        return f"StateSlice({self.start}:{last} of shape {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy or move the slice; raise for anything else, since only the whole tensor gives the right result."""
        if func not in _KEEPS or not isinstance(args[0], StateSlice):
            _refuse(f"{func}")
        argument = args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
        return cls(func(argument.local, **options), argument.start, argument.shape, argument.order)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling it (torch.save)")

    # ------------------------------------------------------- the protocol of torch.distributed.checkpoint

    def _blocks(self) -> list[Block]:
        blocks = blocks_of(in_order(self.shape, self.order), self.start, self.start + self.local.numel())
        return [Block(*(in_former_order(each, self.order) for each in block)) for block in blocks]

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Return the items that a checkpoint writes for this rank, one for each block."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return the places of this rank's blocks in the whole tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))
            for block in self._blocks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return one block; a view, so that what is loaded into it is loaded into the slice."""
        begin = 0
        for block in self._blocks():
            sizes = in_order(block.sizes, self.order)
            end = begin + torch.Size(sizes).numel()
            if torch.Size(block.offsets) == index.offset:
                return self.local[begin:end].view(sizes).permute([self.order.index(dim) for dim in range(len(sizes))])
            begin = end
        raise ShardingError(f"this rank has no block at {index.offset} of a tensor of shape {tuple(self.shape)}")


def _refuse(what: str) -> NoReturn:
    raise ShardingError(
        f"{what}: each rank has a slice of this tensor of the optimizer's state, so it cannot be used as a tensor. "
        "lockstep.sharding.full_state_dict(optimizer) returns whole tensors, on rank 0; lockstep.save() and "
        "torch.distributed.checkpoint save sharded state"
    )
