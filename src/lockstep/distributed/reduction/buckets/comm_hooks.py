"""Communication hooks: the bucket passed to one, which one a module has, and its state in checkpoints.

A hook is called with its state and a bucket, as in PyTorch, when the bucket is ready. Its return value decides:

- a future (``torch.futures.Future``): the hook communicates and divides by the world size itself; the future's value is
  the reduced buffer. All hooks that come with PyTorch are of this kind and run unchanged.
- a tensor: the hook has transformed the buffer (a cast, a clip, noise). The buffer is averaged in the tensor's dtype,
  and the result is cast back.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.buckets.bucket import Bucket
from lockstep.errors import HookError


class Waitable(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when it has arrived."""

    def done(self) -> bool:
        """Return True if :meth:`wait` would return immediately."""


class GradBucket:
    """The bucket passed to a communication hook, with the methods of ``torch.distributed.GradBucket``.

    Gradients are this rank's sums, not yet divided.
    """

    def __init__(self, bucket: Bucket, buffer: Tensor, last: bool, index: int) -> None:
        self._index = index
        self._bucket = bucket
        self._buffer = buffer
        self._last = last

    def index(self) -> int:
        """Return the place of the bucket in the launch order, beginning at 0.

        If buckets are planned again, as after unfreezing, a bucket with other gradients than the earlier one of its
        number gets a new number, so that hooks do not apply to it the state they keep for another bucket.
        """
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor; a sparse one if the bucket holds a sparse gradient."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer, in the shapes of the parameters."""
        if self._buffer.is_sparse:
            return [self._buffer]
        return self._bucket.planned.layout.views(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of :meth:`gradients`."""
        return [member.parameter for member in self._bucket.members]

    def is_last(self) -> bool:
        """Return True if this is the last bucket of the backward pass."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by one with the same number of elements."""
        if buffer.numel() != self._buffer.numel():
            raise HookError(
                f"bucket {self.index()}: set_buffer() got {buffer.numel()} elements, expected {self._buffer.numel()}"
            )
        self._buffer = buffer


class Hook(NamedTuple):
    """A registered hook with its state."""

    state: Any
    call: Callable[[Any, Any], Any]


_OF_PYTORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_SAME_ON_ALL_RANKS = (
    f"{_OF_PYTORCH}default_hooks",
    f"{_OF_PYTORCH}powerSGD_hook",
    f"{_OF_PYTORCH}quantization_hooks",
)


class HookInUse:
    """The hook of one module, if it has one."""

    def __init__(self) -> None:
        self.hook: Hook | None = None
        """The hook in use, the same on all ranks."""
        self.is_agreed = False
        """True if the ranks have compared it."""
        self._offered: Hook | None = None  # registered since, but not in use yet
        self.has_changed = False
        """True if this rank has a hook that the ranks have not agreed on yet."""
        self._numbered: dict[int, _References] = {}  # by number, the parameters of the bucket that the hook has seen

    @property
    def gives_the_same(self) -> bool:
        """True if all ranks are known to get the same gradients: by no hook, or one of PyTorch's that reduce."""
        return self.hook is None or getattr(self.hook.call, "__module__", "") in _SAME_ON_ALL_RANKS

    def register(self, hook: Hook) -> bool:
        """Return True if the hook is in use immediately, as before the first round; otherwise it comes into use with
        the next agreement."""
        if self.is_agreed:
            self._offered, self.has_changed = hook, True
        else:
            self.hook = hook
        return not self.is_agreed

    def agree(self, collectives: Collectives) -> None:
        """Compare the hooks of all ranks, which must call collectives alike."""
        hook = self._offered or self.hook
        name = "none" if hook is None else name_of(hook.call)
        check_same_on_all_ranks([Line("communication hook", name)], collectives)
        self.hook, self._offered = hook, None
        self.is_agreed, self.has_changed = True, False

    def _number(self, bucket: Bucket) -> int:
        parameters = [member.parameter for member in bucket.members]
        if bucket.index not in self._numbered:
            self._numbered[bucket.index] = _references(parameters)
        if _are_to(self._numbered[bucket.index], parameters):
            return bucket.index
        found = next((number for number, known in self._numbered.items() if _are_to(known, parameters)), None)
        if found is None:
            found = 1 + max(self._numbered)
            self._numbered[found] = _references(parameters)
        return found

    def send(
        self,
        bucket: Bucket,
        buffer: Tensor,
        last: bool,
        collectives: Collectives,
        divisor: float,
        *,
        accept: Callable[[Tensor], object],
        planned: bool,
    ) -> Waitable:
        """Call the hook for a bucket; ``accept`` gets the result when the returned object is waited for.

        ``planned``: these are not the buckets of a first backward, which have their places as numbers, as in PyTorch:
        a hook must not keep state for them.
        """
        hook = self.hook
        assert hook is not None
        index = self._number(bucket) if planned or self._numbered else bucket.index
        seen = GradBucket(bucket, buffer, last, index)
        outcome = hook.call(hook.state, seen)
        if isinstance(outcome, Future | torch._C.Future):
            return _Reduction(accept, partial(_result_of, outcome, hook), outcome.done)
        if not isinstance(outcome, Tensor):
            raise HookError(
                f"Communication hook {name_of(hook.call)}: callback must return a torch.futures.Future object, but "
                f"got {type(outcome).__name__}; return a Future of the reduced buffer, or the transformed buffer "
                "as a Tensor"
            )
        seen.set_buffer(outcome)
        outgoing = (outcome if outcome is buffer else outcome.clone()).div_(divisor)
        pending = collectives.all_reduce(outgoing, f"bucket {bucket.index}")

        def average() -> Tensor:
            pending.wait()
            return outgoing

        return _Reduction(accept, average, pending.done)


_References = Sequence["ref[Parameter]"]


def _references(parameters: Sequence[Parameter]) -> _References:
    """Return weak references, which also tell the parameters from later ones at the same addresses."""
    return [ref(parameter) for parameter in parameters]


def _are_to(references: _References, parameters: Sequence[Parameter]) -> bool:
    """Return True if these are the references of exactly these parameters."""
    same_length = len(references) == len(parameters)
    return same_length and all(link() is parameter for link, parameter in zip(references, parameters, strict=True))


class _Reduction(NamedTuple):
    """A bucket whose hook has been called."""

    accept: Callable[[Tensor], object]
    result: Callable[[], Tensor]
    """Waits for the reduced buffer, and returns it."""
    done: Callable[[], bool]

    def wait(self) -> None:
        self.accept(self.result())


def _result_of(future: Any, hook: Hook) -> Tensor:
    """Wait for a future; return the tensor that is its value, alone or as the only entry of a list."""
    outcome = future.wait()
    if isinstance(outcome, Sequence) and len(outcome) == 1:
        outcome = outcome[0]
    if not isinstance(outcome, Tensor):
        raise HookError(
            f"Communication hook {name_of(hook.call)}: expected a future of a Tensor or of a list of one, got one of "
            f"{type(outcome).__name__}"
        )
    return outcome


def check_hook(hook: Any) -> None:
    """Raise :class:`HookError` for an object that is not a valid communication hook."""
    if not callable(hook):
        raise HookError(f"Communication hook must be callable. Got {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # built in
        return
    bucket = signature.parameters.get("bucket")
    annotation = inspect.Parameter.empty if bucket is None else bucket.annotation
    if annotation not in (inspect.Parameter.empty, _TORCH_BUCKET, GradBucket, *_GRAD_BUCKET_NAMES):
        raise HookError(
            f"Communication hook: bucket annotation should be dist.GradBucket. Got {annotation} in {name_of(hook)}"
        )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, *_RETURNED) and not str(returned).endswith(_RETURNED_NAMES):
        raise HookError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], or torch.Tensor "
            f"for a hook that only transforms. Got {returned} in {name_of(hook)}"
        )


_TORCH_BUCKET: Any = getattr(dist, "GradBucket", None)
_GRAD_BUCKET_NAMES = ("dist.GradBucket", "torch.distributed.GradBucket", "GradBucket")
_RETURNED = (Future, Future[Tensor], torch._C.Future, Tensor)
_RETURNED_NAMES = ("Future[torch.Tensor]", "Future[Tensor]", "Future", "torch.Tensor", "Tensor")


def name_of(hook: Any) -> str:
    """Return the name of a hook in messages."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def hook_state(state: Any) -> Any:
    """Return the part of a hook's state to be saved: its ``state_dict()``, or its attributes except process groups.

    NumPy's random generator, which PowerSGD uses, is replaced by plain values that ``torch.load(weights_only=True)``
    loads.
    """
    if state is None or _is_group(state):
        return None
    if callable(getattr(state, "state_dict", None)):
        return state.state_dict()
    if isinstance(state, Mapping):
        return dict(state)
    attributes = getattr(state, "__dict__", None)
    if attributes is None:
        names = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
        attributes = {name: getattr(state, name) for name in names if hasattr(state, name)}
    return {name: _plain(value) for name, value in attributes.items() if not _is_group(value)}


def restore_hook_state(state: Any, saved: Any) -> None:
    """Load a state saved by :func:`hook_state` into the state of the hook registered now."""
    if saved is None:
        return
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(saved)
    elif isinstance(state, dict):
        state.clear()
        state.update(saved)
    elif state is None:
        raise HookError(
            "the training state holds a communication hook's state, but the hook was registered without one"
        )
    else:
        for name, value in saved.items():
            numbers: Any = getattr(state, name, None)
            if _is_numpys_numbers(numbers) and isinstance(value, Mapping):
                numbers.set_state(value)
            else:
                setattr(state, name, value)


def _plain(value: Any) -> Any:
    if not _is_numpys_numbers(value):
        return value
    state = value.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _is_numpys_numbers(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.RandomState)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup) or (hasattr(value, "rank") and hasattr(value, "allreduce"))
