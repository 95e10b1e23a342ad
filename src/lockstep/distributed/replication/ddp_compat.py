"""What stands in for private parts of PyTorch's DDP, and what to use instead of the names that are refused.

A search of what Accelerate, Lightning, transformers, torchtitan, fairseq, detectron2 and mmengine read from a wrapper
has found three methods of ``wrapper.reducer``, and one entry of the logging data. They are here; all other private
names are refused.
"""

from typing import Any

from lockstep._base.inherited import message


class UnneededCalls:
    """``wrapper.reducer``: what frameworks call around backward to prepare PyTorch's reducer, which does nothing here.

    Any other name raises an AttributeError.
    """

    def prepare_for_backward(self, outputs: object) -> None:
        """Do nothing: backward is seen when it begins (called by Accelerate and Lightning)."""

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are rebuilt at the end of the first backward (called by Lightning)."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: gradients are reduced when backward returns (called by Lightning, for ``static_graph``)."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(message("reducer", name), name=name, obj=self)


class LoggingData(dict[str, int]):
    """The logging data, in which other entries than ``can_set_static_graph`` are refused by name."""

    def __missing__(self, name: str) -> int:
        raise KeyError(message("logging data", name, _STATISTICS))


_STATISTICS = "lockstep.loop.statistics(wrapper) counts rounds, bytes and seconds"
_BUFFERS = "use wrapper.module.named_buffers()"
_MOVED = "forward moves its inputs itself (device_ids); lockstep.DataParallel and lockstep.local have several devices"
_FINAL = "gradients are complete when backward returns, and nothing has to be finalized"

INSTEAD = {
    "_comm_hooks": "keep the hook that you give to register_comm_hook()",
    "_distributed_rank": "use wrapper.process_group.rank()",
    "_register_buffer_comm_hook": "choose buffer_policy=, or change buffers in a forward hook of the module",
    "_register_builtin_comm_hook": (
        "use register_comm_hook(None, hook), with a hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks, "
        "or reduce_dtype="
    ),
    "_register_fused_optim": (
        "run the optimizer in register_post_accumulate_grad_hook, which waits for the reduced gradient"
    ),
    "_remove_autograd_hooks": "use set_requires_gradient_sync(False)",
    "_set_ddp_runtime_logging_sample_rate": _STATISTICS,
    "_set_params_and_buffers_to_ignore_for_model": "pass params_and_buffers_to_ignore= when you wrap the module",
    "_set_static_graph": "leave it out: the graph may change in every step",
    "_update_process_group": "wrap wrapper.module anew, with process_group=",
    "device_type": "use wrapper.device.type",
    "finalize_backward": _FINAL,
    "gather": _MOVED,
    "logger": _STATISTICS,
    "modules_buffers": _BUFFERS,
    "named_module_buffers": _BUFFERS,
    "parameters_to_ignore": "keep the names that you give to params_and_buffers_to_ignore=",
    "require_manual_backward_finalization": _FINAL,
    "scatter": _MOVED,
    "should_finalize_after_backward": _FINAL,
    "to_kwargs": _MOVED,
    "will_sync_module_buffers": "buffers are made equal at the end of each backward that synchronises",
}
"""What to use instead of a name of PyTorch's class, for names that programs use; the others have one text."""
