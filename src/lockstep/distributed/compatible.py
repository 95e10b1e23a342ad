"""Names of PyTorch's class that programs in the wild read or call, though some are private.

Kept: attributes that say how the wrapper was made; ``_set_static_graph`` and
``_set_params_and_buffers_to_ignore_for_model`` (many training frameworks call them), ``_register_builtin_comm_hook``,
``_distributed_rank``, ``will_sync_module_buffers``, and ``_get_ddp_logging_data`` with the entries that do not come
from PyTorch's own reducer. Not kept: ``reducer``, ``logger``, the fused optimizer and buffer hooks, and everything
that moves them.
"""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Module

from lockstep.distributed.collectives import Group
from lockstep.distributed.options import Options
from lockstep.distributed.plan import MIB
from lockstep.distributed.replication import Replication
from lockstep.errors import HookError, OptionError

_BUILTIN = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}


class CompatibleNames:
    """Read-only attributes, and the private methods that are in use."""

    module: Any
    _options: Options

    if TYPE_CHECKING:

        @property
        def _replication(self) -> Replication: ...

    _divide_by_initial_world_size = True
    _static_graph = False
    dim = 0
    broadcast_bucket_size = 250 * MIB
    require_forward_param_sync = True

    @property
    def process_group(self) -> Group:
        """The group over which gradients are reduced."""
        return self._replication.group

    @property
    def device_mesh(self) -> Any:
        """The mesh dimension that was given, or None."""
        return self._options.device_mesh

    @property
    def device_ids(self) -> list[int] | None:
        """The index of the accelerator that inputs are moved to, None if there is none."""
        return [
            torch.device(given).index if not isinstance(given, int) else given
            for given in self._options.device_ids or ()
        ] or None

    @property
    def output_device(self) -> int | None:
        """The index of the accelerator of :attr:`device_ids`, or None."""
        return next(iter(self.device_ids or ()), None)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.module.parameters())).device  # type: ignore[no-any-return]

    @property
    def device_type(self) -> str:
        """The type of :attr:`device`."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether parameters lie on more than one device."""
        return len({parameter.device for parameter in self.module.parameters()}) > 1

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are kept equal."""
        return self._options.syncs_buffers

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of :attr:`forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def find_unused_parameters(self) -> bool:
        """As given; parameters without a gradient are found either way."""
        return self._options.find_unused_parameters

    @property
    def gradient_as_bucket_view(self) -> bool:
        """As given; gradients are views of the buckets either way."""
        return self._options.gradient_as_bucket_view

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """As given."""
        return self._options.skip_all_reduce_unused_params

    @property
    def static_graph(self) -> bool:
        """As given, or set later; nothing is assumed of the graph."""
        return self._options.static_graph or self._static_graph

    @property
    def mixed_precision(self) -> None:
        """Always None."""
        return

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of a bucket in bytes."""
        return self._options.caps[-1]

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes that ``bucket_cap_mb_list`` has set, in bytes."""
        return list(self._options.caps) if self._options.bucket_cap_mb_list else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether no size was given."""
        return self._options.bucket_cap_mb is None and not self._options.bucket_cap_mb_list

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are left alone."""
        marked = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return {*self._options.params_and_buffers_to_ignore, *marked}

    def will_sync_module_buffers(self) -> bool:
        """Whether buffers will be made equal at the end of the next backward that synchronises."""
        reducer = self._replication.reducer
        return reducer is not None and reducer.requires_sync and bool(reducer.buffers.buffers)

    @property
    def _distributed_rank(self) -> int:
        return int(self.process_group.rank())

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        reducer = self._replication.reducer
        if reducer is not None and reducer.round:
            raise OptionError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed; it is not needed here"
            )
        self._static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hook = _BUILTIN.get(getattr(comm_hook_type, "name", ""))
        if hook is None:
            raise HookError(f"expected a dist.BuiltinCommHookType, got {comm_hook_type!r}")
        self._replication.register_comm_hook(self.process_group, hook)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        options, replication = self._options, self._replication
        reducer = replication.reducer
        assert reducer is not None
        trained = [member.spec for member in reducer.parameters if member.parameter.requires_grad]
        names = [getattr(hook, "__qualname__", str(hook)) for _, hook in replication.hooks]
        return {
            "world_size": reducer.collectives.world,
            "rank": reducer.collectives.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(options.find_unused_parameters),
            "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "iteration": reducer.round,
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(spec.nbytes for spec in trained),
            "bucket_sizes": ", ".join(str(bucket.layout.nbytes) for bucket in reducer.plan.buckets),
            "join_uneven_inputs": int(hasattr(self, "_authoritative_rank") or self._join_config.enable),  # type: ignore[attr-defined]
            **({"comm_hook": ", ".join(names)} if names else {}),
        }
