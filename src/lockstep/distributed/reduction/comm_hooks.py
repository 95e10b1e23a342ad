"""Communication hooks: the bucket that they are given, a chain of several, and their state, saved and loaded.

A hook is called with its state and a bucket, as PyTorch's are, when the bucket is ready to leave. What it returns
decides:

- a future (``torch.futures.Future``): the hook communicates by itself, and divides by the world size by itself; the
  future's value is the reduced buffer. All hooks that come with PyTorch are of this kind and run unchanged.
- a tensor: the hook has transformed the buffer (a cast, a clip, noise). Averaging is done for it, after the last hook,
  in the tensor's own dtype; the result is cast back.

Each hook of a chain gets the buffer that the one before it has left.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.buckets import GradientBucket
from lockstep.errors import HookError


class Waitable(Protocol):
    """Something sent, to be waited for."""

    def wait(self) -> object:
        """Return when it has arrived."""

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""


class GradBucket:
    """A bucket as communication hooks see it: answers to the names of ``torch.distributed.GradBucket``.

    Gradients are this rank's own sums, not yet divided by anything.
    """

    def __init__(self, bucket: GradientBucket, buffer: Tensor, last: bool) -> None:
        self._bucket, self._buffer, self._last = bucket, buffer, last

    def index(self) -> int:
        """Return the place of the bucket in the order in which buckets leave; 0 is the first.

        When buckets are planned anew, as after unfreezing, one of other gradients than had its number before gets a
        number that none has had, so that hooks do not apply what they keep for another bucket.
        """
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor (a sparse one, if the bucket holds a sparse gradient)."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer in the shapes of the parameters."""
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
        """Replace the buffer by one of the same number of elements."""
        if buffer.numel() != self._buffer.numel():
            raise HookError(
                f"bucket {self.index()}: set_buffer() got {buffer.numel()} elements, expected {self._buffer.numel()}"
            )
        self._buffer = buffer


class _Numbered(GradBucket):
    """A bucket whose number is not its place, because another has had that."""

    def __init__(self, bucket: GradientBucket, buffer: Tensor, last: bool, number: int) -> None:
        super().__init__(bucket, buffer, last)
        self._number = number

    def index(self) -> int:
        """See :meth:`GradBucket.index`."""
        return self._number


class Hook(NamedTuple):
    """A registered hook."""

    state: Any
    call: Callable[[Any, Any], Any]


class HookChain:
    """The hooks of one module."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        """Those in use, on all ranks."""
        self.are_agreed = False
        """True if the ranks have compared them."""
        self._offered: list[Hook] = []  # registered since, and not in use yet
        self._waits: bool | None = None  # whether one that is not the last communicates; not known yet
        self._numbered: dict[int, _References] = {}  # the parameters of each bucket that hooks have seen

    @property
    def may_wait(self) -> bool:
        """True if :meth:`send` may wait for other ranks: for what a hook sends whose result the next one gets."""
        return len(self.hooks) > 1 and self._waits is not False

    def register(self, state: Any, hook: Callable[[Any, Any], Any]) -> bool:
        """Add a hook at the end of the chain; returns whether it is in use at once, as it is before the first round.

        Later it is from the next agreement on. Raises :class:`HookError` if it cannot be a hook.
        """
        check_hook(hook)
        (self._offered if self.are_agreed else self.hooks).append(Hook(state, hook))
        self._waits = None
        return not self.are_agreed

    @property
    def has_changed(self) -> bool:
        """True if this rank has hooks that the ranks have not agreed on yet."""
        return bool(self._offered)

    def agree(self, collectives: Collectives) -> None:
        """Compare the hooks of all ranks: without one, a rank would send what the others do not."""
        chain = [*self.hooks, *self._offered]
        lines = [Line("number of communication hooks", str(len(chain)))]
        lines += [Line(f"communication hook {number}", name_of(hook.call)) for number, hook in enumerate(chain)]
        check_same_on_all_ranks(lines, collectives)
        self.hooks, self._offered, self.are_agreed = chain, [], True

    def _number(self, bucket: GradientBucket) -> int:
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
        bucket: GradientBucket,
        buffer: Tensor,
        last: bool,
        collectives: Collectives,
        divisor: float,
        planned: bool,
    ) -> Waitable:
        """Call the hooks for a bucket; the result is in the bucket when the returned object has been waited for.

        ``planned``: the buckets are not those of a first backward. Those of the very first have their places as
        numbers, as in PyTorch: hooks must not keep anything for them.
        """
        index = self._number(bucket) if planned or self._numbered else bucket.index
        seen = _Numbered(bucket, buffer, last, index)
        averaged = False
        for number, hook in enumerate(self.hooks):
            outcome = hook.call(hook.state, seen)
            if isinstance(outcome, Tensor):
                seen.set_buffer(outcome)
                continue
            if not isinstance(outcome, Future | torch._C.Future):
                raise HookError(
                    f"Communication hook {name_of(hook.call)}: callback must return a torch.futures.Future object, but "
                    f"got {type(outcome).__name__}; return a Future of the reduced buffer, or the transformed buffer "
                    "as a Tensor"
                )
            averaged = True
            if number == len(self.hooks) - 1:
                self._waits = bool(self._waits)
                return _Reduced(bucket, outcome, hook)
            self._waits = True
            seen.set_buffer(_value(outcome.wait(), hook))
        self._waits = bool(self._waits)
        if averaged:
            return _Arrived(bucket, seen.buffer())
        outgoing = seen.buffer().clone() if seen.buffer() is not buffer else buffer
        outgoing = outgoing.div_(divisor)
        return _Averaged(bucket, outgoing, collectives.all_reduce(outgoing, f"bucket {bucket.index}"))


_References = Sequence["ref[Parameter]"]


def _references(parameters: Sequence[Parameter]) -> _References:
    """Return references that do not keep the tensors, and tell them from later ones at their addresses."""
    return [ref(parameter) for parameter in parameters]


def _are_to(references: _References, parameters: Sequence[Parameter]) -> bool:
    """Return True if the references are to just these parameters."""
    same_length = len(references) == len(parameters)
    return same_length and all(link() is parameter for link, parameter in zip(references, parameters, strict=True))


class _Reduced:
    """A bucket whose last hook has returned a future."""

    def __init__(self, bucket: GradientBucket, future: Any, hook: Hook) -> None:
        self._bucket, self._future, self._hook = bucket, future, hook

    def wait(self) -> None:
        self._bucket.accept(_value(self._future.wait(), self._hook))

    def done(self) -> bool:
        return bool(self._future.done())


class _Arrived:
    """A bucket that is reduced already."""

    def __init__(self, bucket: GradientBucket, summed: Tensor) -> None:
        self._bucket, self._summed = bucket, summed

    def wait(self) -> None:
        self._bucket.accept(self._summed)

    def done(self) -> bool:
        return True


class _Averaged:
    """A bucket that is averaged after its hooks have transformed it."""

    def __init__(self, bucket: GradientBucket, outgoing: Tensor, pending: Waitable) -> None:
        self._bucket, self._outgoing, self._pending = bucket, outgoing, pending

    def wait(self) -> None:
        self._pending.wait()
        self._bucket.accept(self._outgoing)

    def done(self) -> bool:
        return self._pending.done()


def _value(outcome: Any, hook: Hook) -> Tensor:
    """Return the tensor that a future holds, alone or as the only entry of a list."""
    if isinstance(outcome, Sequence) and len(outcome) == 1:
        outcome = outcome[0]
    if not isinstance(outcome, Tensor):
        raise HookError(
            f"Communication hook {name_of(hook.call)}: expected a future of a Tensor or of a list of one, got one of "
            f"{type(outcome).__name__}"
        )
    return outcome


def check_hook(hook: Any) -> None:
    """Raise :class:`HookError` for what cannot be a communication hook."""
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
    """Return what a hook is called in messages."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def hook_state(state: Any) -> Any:
    """Return what of a hook's state is worth keeping: its own ``state_dict``, or its attributes without process groups.

    Of NumPy's random numbers, which PowerSGD draws, the state is kept, so that ``torch.load(weights_only=True)`` takes
    it.
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
    """Put what :func:`hook_state` has kept into the state of the hook that is registered now."""
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
