"""The options of ``replicate`` and ``DistributedDataParallel`` with their checks; moves inputs to the device."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from lockstep._base.devices import resolve_device
from lockstep._base.tree import Tree, tree_map
from lockstep._base.wrapper import unknown_option
from lockstep.distributed.comm.groups import Group
from lockstep.distributed.comm.half_precision import HALF_PRECISION
from lockstep.distributed.reduction.buckets.plan import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, MIB
from lockstep.distributed.reduction.module.buffer_sync import POLICIES, Policy
from lockstep.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options, with PyTorch's names.

    Some options are accepted but have no effect, since gradients live in the buckets and unused parameters are found
    without a search of the graph: ``gradient_as_bucket_view``, ``batched_grad_copy``, ``lazy_bucket_allocation``,
    ``find_unused_parameters``, ``skip_all_reduce_unused_params``, ``static_graph``, ``check_reduction``, ``dim``.
    """

    process_group: Group | None = None
    device_mesh: Any = None
    device_id: int | torch.device | None = None
    device_ids: Sequence[int | torch.device] | None = None
    output_device: int | torch.device | None = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False
    lazy_bucket_allocation: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None
    param_to_hook_all_reduce: Parameter | None = None
    mixed_precision: None = None
    reduce_dtype: torch.dtype | None = None
    buffer_policy: Policy = "rank0"
    params_and_buffers_to_ignore: Collection[str] = ()

    def __post_init__(self) -> None:
        """Raise :class:`OptionError` for invalid values, in the order of PyTorch's checks."""
        if (self.delay_all_reduce_named_params is None) != (self.param_to_hook_all_reduce is None):
            raise OptionError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        if self.device_mesh is not None:
            if self.process_group is not None:
                raise OptionError("Cannot specify both process_group and device_mesh arguments. Give the mesh alone")
            if self.device_mesh.ndim != 1:
                raise OptionError(
                    f"Only 1D device mesh is supported, but got {self.device_mesh}. Give one dimension of it, such as "
                    'mesh["dp"]'
                )
        self._check_values()

    def _check_values(self) -> None:
        if self.mixed_precision is not None:
            raise OptionError(
                "mixed_precision= is refused: it takes a private class of PyTorch. Call forward under "
                "torch.autocast(...) instead; reduce_dtype=torch.bfloat16 sends gradients in half precision"
            )
        self._check_reduce_dtype()
        if self.buffer_policy not in POLICIES:
            raise OptionError(f"buffer_policy must be one of {', '.join(POLICIES)}, got {self.buffer_policy!r}")
        listed = [(f"bucket_cap_mb_list[{i}]", cap) for i, cap in enumerate(self.bucket_cap_mb_list or ())]
        for name, value in [("bucket_cap_mb", self.bucket_cap_mb), *listed]:
            if value is not None and not value > 0:
                raise OptionError(f"{name} must be over 0 MiB, got {value}")
        if self.device_id is not None and not isinstance(self.device_id, int | torch.device):
            raise OptionError(f"Expected device_id to be int or torch.device, but got {type(self.device_id)}")

    def _check_reduce_dtype(self) -> None:
        if self.reduce_dtype not in (None, *HALF_PRECISION):
            raise OptionError(
                f"reduce_dtype must be {' or '.join(map(str, HALF_PRECISION))}, or None for the parameters' own dtype; "
                f"got {self.reduce_dtype!r}"
            )

    def warn_deprecated(self, stacklevel: int) -> None:
        """Warn of deprecated options, as PyTorch does."""
        if self.broadcast_buffers is not None:
            warnings.warn(
                "broadcast_buffers is deprecated; use forward_sync_buffers, or buffer_policy",
                FutureWarning,
                stacklevel=stacklevel + 1,
            )
        if self.check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated; it does nothing",
                FutureWarning,
                stacklevel=stacklevel + 1,
            )

    @property
    def group(self) -> Group | None:
        """The group given by the options; None for the default group."""
        return self.device_mesh.get_group(0) if self.device_mesh is not None else self.process_group

    @property
    def policy(self) -> Policy:
        """The policy for buffers after each synchronised backward."""
        return self.buffer_policy if self.syncs_buffers else "local"

    @property
    def syncs_buffers(self) -> bool:
        """True if buffers are kept equal."""
        given = self.forward_sync_buffers if self.forward_sync_buffers is not None else self.broadcast_buffers
        return given is not False

    @property
    def syncs_buffers_at_start(self) -> bool:
        """True if rank 0's buffers are sent at the start."""
        return self.init_sync and (self.forward_sync_buffers is not None or self.broadcast_buffers is not False)

    @property
    def caps(self) -> tuple[int, ...]:
        """The sizes of the buckets in bytes; the last one holds for all further buckets."""
        if self.bucket_cap_mb_list:
            return tuple(max(1, int(cap * MIB)) for cap in self.bucket_cap_mb_list)
        if self.bucket_cap_mb is not None:
            return (max(1, int(self.bucket_cap_mb * MIB)),)
        return FIRST_CAP_BYTES, DEFAULT_CAP_BYTES

    def caps_in_shared_memory(self) -> tuple[int, ...]:
        """Return :attr:`caps` for ranks that reduce in shared memory, on the processor cores that run backward.

        A small first bucket gives a network work early; here it would only interrupt backward
        (``benchmarks/bench_ddp_bounds.py``).
        """
        return self.caps if self.bucket_cap_mb or self.bucket_cap_mb_list else (DEFAULT_CAP_BYTES,)

    def agreed(self) -> list[tuple[str, str]]:
        """Return the options that must be the same on all ranks."""
        return [
            ("option bucket_cap_mb", str(self.caps)),
            ("option buffer_policy", self.policy),
            ("option reduce_dtype", str(self.reduce_dtype)),
            ("option init_sync", f"{self.init_sync}, buffers {self.syncs_buffers_at_start}"),
            ("option delay_all_reduce_named_params", str([n for n, _ in self.delay_all_reduce_named_params or ()])),
        ]


def read_options(given: Mapping[str, Any]) -> Options:
    """Return the options given by name; raise :class:`lockstep.errors.UnknownOptionError` for an unknown one."""
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            raise unknown_option("replicate", name, known)
    return Options(**given)


def input_device(options: Options) -> torch.device | None:
    """Return the accelerator that input tensors are moved to; None to leave them."""
    given = options.device_id if options.device_id is not None else next(iter(options.device_ids or ()), None)
    if given is None:
        return None
    device = resolve_device(given)
    return None if device.type == "cpu" else device


def move_to(value: Any, device: torch.device) -> Any:
    """Return nested inputs with their tensors on ``device``; containers keep their types."""

    def on_device(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor | PackedSequence) else leaf  # type: ignore[arg-type]

    return tree_map(on_device, value, "inputs", whole=(PackedSequence,))


def outputs_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested outputs."""
    for leaf in Tree(value, "outputs", whole=(PackedSequence,)).leaves:
        tensor = leaf.value.data if isinstance(leaf.value, PackedSequence) else leaf.value
        if isinstance(tensor, Tensor):
            yield tensor
