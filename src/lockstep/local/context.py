"""The caller's context, carried over to a worker thread.

PyTorch keeps the effect of a caller's ``with`` blocks in thread-local state: grad mode, inference mode, autocast, the
default device, saved-tensor hooks, current streams, intra-op threads. A worker without them would silently compute
something else than the caller's thread would. (The default dtype belongs to the process, not to the thread: nothing to
carry. Modes that see every operation, as of selective checkpointing, stay in the caller's thread.)
"""

import contextvars
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

from lockstep._base.devices import accelerator, current_streams, on_streams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The state that :meth:`capture` found in the calling thread, to be entered in others."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    autocast_cache: bool
    default_device: torch.device
    intra_op_threads: int
    saved_tensor_hooks: tuple[Any, Any] | None
    streams: tuple[torch.Stream, ...]
    variables: contextvars.Context

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> "CallerContext":
        """Return the context of the calling thread, with the current stream of each of ``devices``."""
        found = accelerator()
        types = ("cpu",) if found is None else ("cpu", found.type)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            intra_op_threads=torch.get_num_threads(),
            saved_tensor_hooks=_saved_tensor_hooks(),
            streams=tuple(current_streams(devices)),
            variables=contextvars.copy_context(),
        )

    def run_here(self, call: Callable[[], T], device: torch.device) -> T:
        """Return the result of ``call``, in the caller's own thread with ``device`` current."""
        home = self._default_device(device)
        with torch.accelerator.device_index(device.index), nullcontext() if home == self.default_device else home:
            return call()

    def run(self, call: Callable[[], T], device: torch.device) -> T:
        """Return the result of ``call``, in this thread with the caller's state and ``device`` current.

        A thread that runs one replica after another belongs to the library, so state without a ``with`` form is just
        set. Streams and the device are as they were afterwards: a later call that does not use a device finds its
        default stream there, as in a new thread.
        """
        if torch.get_num_threads() != self.intra_op_threads:  # asked first: setting it sets the process's default, too
            torch.set_num_threads(self.intra_op_threads)
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for device_type, dtype, _ in self.autocast:
            torch.set_autocast_dtype(device_type, dtype)  # even if autocast is off: a forward may turn it on
        with ExitStack() as stack:
            stack.enter_context(on_streams(self.streams))
            stack.enter_context(torch.accelerator.device_index(device.index))
            for block in self._blocks(device):
                stack.enter_context(block)
            return _called(call)

    def _blocks(self, device: torch.device) -> Iterator[AbstractContextManager[Any]]:
        if self.inference:
            yield torch.inference_mode()
        for device_type, dtype, enabled in self.autocast:
            if enabled or torch.is_autocast_enabled(device_type):  # a forward may have left autocast on in this thread
                yield torch.autocast(device_type, dtype, enabled, self.autocast_cache)
        if self.default_device.type != "cpu":
            yield self._default_device(device)
        if self.saved_tensor_hooks is not None:
            yield torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks)

    def _default_device(self, device: torch.device) -> torch.device:
        """Tensors made in forward are on the replica's own device, as they are on the only device without replicas."""
        return device if device.type == self.default_device.type != "cpu" else self.default_device


def _called(call: Callable[[], T]) -> T:
    """Return the result of ``call``. If it raises, leave checkpointed segments in the thread that has entered them.

    Up to PyTorch 2.11, a segment that raises stays entered until its frame is gone, and the error keeps the frame alive
    until another thread drops it (``test_inside_a_checkpointed_segment_it_is_refused``).
    """
    try:
        return call()
    except BaseException as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals is vars(checkpoint)]
        for frame in reversed(frames):
            if isinstance(segment := frame.f_locals.get("gen"), Generator):
                segment.close()
        raise


def _saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the innermost saved-tensor hooks of this thread, but not those of activation checkpointing.

    Those hooks count the tensors of one thread in order. Around a whole DataParallel they leave the replicas alone:
    gradients are right, but to save memory one has to checkpoint the blocks inside the module.
    """
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or getattr(hooks[0], "__module__", None) == checkpoint.__name__ else hooks
