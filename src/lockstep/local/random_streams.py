"""Random numbers of CPU replicas: each draws from a stream of its own.

Replicas are threads, and PyTorch has one CPU generator for the whole process. Were it shared, which numbers a replica
draws would depend on the others' pace; and what reads the generator's state in forward and sets it again in backward,
as activation checkpointing does, would get another replica's numbers there: gradients of another dropout mask.

So the first replica goes on in the caller's stream, and every other has a generator of its own, seeded out of the
caller's state. Nothing of that is left to the caller but one number drawn, and only if a replica drew any. Two runs
from one seed are alike, and a state that was read in a replica gives the same numbers wherever it is set again.

Three parts. *Draws*: in the threads of replicas a dispatch key is on (one that PyTorch keeps for tests, with no kernels
of its own) whose kernels hand the thread's generator to every operation that takes one; nothing else gets slower.
*States*: ``torch.get_rng_state`` and its like ask ``torch.random.default_generator``, which from the first use of
replicas on is a stand-in that knows streams. *Backward*: the engine has a thread for each accelerator, so that two
recomputations may fork the one CPU generator at the same time, and leave each other's state behind; inside a backward
pass a fork is therefore the thread's own, whether it sets a state or a seed (as PyTorch's PowerSGD hook does).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import library
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_KEY = "TESTING_ONLY_GenericMode"
_WITHOUT_GENERATOR = {
    "native_dropout",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
}
"""Operations that draw in other operations, of which some overloads take no generator."""
_installing = threading.Lock()
_installed: list[Any] = []  # the libraries of kernels, which live as long as this does


class RandomStream:
    """A generator that is made at its first use, out of a state of another."""

    def __init__(self, origin: torch.Tensor, number: int, depth: int) -> None:
        self._origin, self._number, self._depth = origin, number, depth
        self._start: torch.Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        """The generator: the same for the same state, number and depth of nesting."""
        if self._start is None:
            seeds = torch.Generator()
            seeds.set_state(self._origin)
            seed = int(torch.randint(1 << 62, (self._number,), generator=seeds, device="cpu")[-1])
            self._generator = torch.Generator().manual_seed(seed + self._depth)
            self._start = self._generator.get_state()
        return self._generator

    def has_drawn(self) -> bool:
        """Whether numbers were drawn from it."""
        return self._start is not None and not torch.equal(self._start, self._generator.get_state())


class _Fork:
    """The stream of a thread inside a backward pass, from setting a state until the state before is set again."""

    def __init__(self, generator: torch.Generator, before: torch.Tensor | None) -> None:
        self.task, self.before = torch._C._current_graph_task_id(), before
        self.generator = generator

    def has_ended(self) -> bool:
        """Whether its pass is over, or the node of the graph that began it: the engine takes the key off after each."""
        return self.task != torch._C._current_graph_task_id() or not torch._C._dispatch_tls_is_dispatch_key_included(
            _KEY
        )


class _Read(NamedTuple):
    """The process's state, as a thread last read it inside a backward pass, and of which pass."""

    state: torch.Tensor
    task: int


class _Thread(threading.local):
    stream: RandomStream | _Fork | None = None
    depth = 0  # how many calls of replicas this thread is inside of
    read: _Read | None = None


_thread = _Thread()


def _current() -> RandomStream | _Fork | None:
    stream = _thread.stream
    if isinstance(stream, _Fork) and stream.has_ended():  # before it was set back
        _thread.stream = stream = None
    return stream


def _read_in_this_pass() -> torch.Tensor | None:
    """The process's state as this thread has read it in the backward pass it is in, as a fork begins with doing."""
    read = _thread.read
    return read.state if read is not None and read.task == torch._C._current_graph_task_id() else None


def _begin_fork(generator: torch.Generator) -> None:
    _thread.stream = _Fork(generator, _read_in_this_pass())
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)


def _generator() -> torch.Generator:
    """The generator that this thread draws from."""
    stream = _current()
    return torch.default_generator if stream is None else stream.generator


class ReplicaStreams:
    """The streams of the replicas of one call, which begins and ends in the caller's thread."""

    def __init__(self, count: int) -> None:
        _install()
        self._depth, own = _thread.depth + 1, _thread.stream
        origin = _generator().get_state()
        first = own if isinstance(own, RandomStream) else None
        others = (RandomStream(origin, number, self._depth) for number in range(1, count))
        self._streams: list[RandomStream | None] = [first, *others]

    @contextmanager
    def drawing_from(self, index: int) -> Iterator[None]:
        """Inside the block, this thread draws from a replica's stream."""
        before = _thread.stream, _thread.depth
        _thread.stream, _thread.depth = self._streams[index], self._depth
        included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, _thread.stream is not None)
        try:
            yield
        finally:
            _thread.stream, _thread.depth = before
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)

    def end(self) -> None:
        """Let the caller's stream differ from what it was before, if replicas have drawn from theirs."""
        if any(stream is not None and stream.has_drawn() for stream in self._streams[1:]):
            torch.randint(2, (1,), generator=_generator(), device="cpu")


class _GivenStream(RandomStream):
    """A stream whose generator somebody else has made."""

    def __init__(self, generator: torch.Generator) -> None:
        self._start, self._generator = generator.get_state(), generator


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Inside the block, this thread draws from ``generator`` where it would draw from the process's, on the CPU."""
    _install()
    before = _thread.stream
    _thread.stream = _GivenStream(generator)
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield
    finally:
        _thread.stream = before
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)


class _DefaultGenerator:
    """Stands for the process's CPU generator in ``torch.random``: the one that the asking thread draws from."""

    def get_state(self) -> torch.Tensor:
        """The state of this thread's stream."""
        state = _generator().get_state()
        if _current() is None and _in_backward():
            _thread.read = _Read(state, torch._C._current_graph_task_id())
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state of this thread's stream; inside a backward pass, of one that lasts until it is set back."""
        stream = _current()
        if isinstance(stream, _Fork) and state is stream.before:
            _thread.stream = _thread.read = None
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
        elif stream is None and _in_backward() and state is not _read_in_this_pass():
            generator = torch.Generator()
            generator.set_state(state)
            _begin_fork(generator)
        else:  # also where a fork ends that has neither set a state nor seeded, but drawn
            _generator().set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed this thread's stream; inside a backward pass that has read the state, one that lasts until it is set."""
        if _current() is None and _in_backward() and _read_in_this_pass() is not None:
            _begin_fork(torch.Generator().manual_seed(seed))
            return _generator()
        return _generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator(), name)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _install() -> None:
    """Register the kernels and the stand-in, once in a process."""
    if _installed:
        return
    with _installing:
        if _installed:
            return
        others = torch._C._dispatch_library("IMPL", "_", _KEY, "", 0)
        others.fallback_fallthrough()
        kernels = library.Library("aten", "IMPL")
        for schema in torch._C._jit_get_all_schemas():
            if not schema.name.startswith("aten::"):
                continue
            place = next((i for i, argument in enumerate(schema.arguments) if argument.name == "generator"), None)
            name, overload = schema.name.removeprefix("aten::"), schema.overload_name
            kernel = None
            if place is None and name in _WITHOUT_GENERATOR:
                kernel = _past_modes(_operation(schema))
            elif place is not None and _takes_tensors(schema):
                by_keyword = schema.arguments[place].kwarg_only
                kernel = _drawing(_operation(schema), place, by_keyword)
            if kernel is not None:
                kernels.impl(f"{name}.{overload}".rstrip("."), kernel, _KEY, with_keyset=True)
        torch.random.default_generator = _DefaultGenerator()  # type: ignore[attr-defined, assignment]
        _installed.extend([others, kernels])


def _operation(schema: Any) -> Any:
    return getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")


def _takes_tensors(schema: Any) -> bool:
    """Whether an operation fills or reads tensors; one that only makes them calls one that fills them."""
    return any(isinstance(argument.type, torch._C.TensorType) for argument in schema.arguments)


def _drawing(operation: Any, place: int, by_keyword: bool) -> Callable[..., Any]:
    """``operation``, given the thread's generator where it would take the process's."""
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generator") if by_keyword else next(iter(args[place:]), None)
        if (given is None or _address(given) == _address(torch.default_generator)) and (
            own := _for_cpu(args, kwargs)
        ) is not None:
            if by_keyword:
                kwargs["generator"] = own
            else:
                args = (*args[:place], own, *args[place + 1 :])
        return operation.redispatch(keys & below, *args, **kwargs)

    return draw


def _past_modes(operation: Any) -> Callable[..., Any]:
    """``operation``, which draws inside, and takes no generator, out of the reach of dispatch modes.

    What a mode runs is below the key of this module: the operation would draw from the process's generator.
    """
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0 and _for_cpu(args, kwargs) is not None:
            with _disable_current_modes():
                return operation(*args, **kwargs)
        return operation.redispatch(keys & below, *args, **kwargs)

    return draw


def _is_traced() -> bool:
    """Whether operations are recorded, and not run: modes of users, as selective checkpointing has, run them."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )


def _for_cpu(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The thread's own generator, if it has one and the operation is on CPU tensors, and is run, not traced."""
    stream = _current()
    if stream is None or _is_traced():
        return None
    devices = [value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if (device := kwargs.get("device")) is not None:
        devices.append(torch.device(device))
    return stream.generator if all(device.type == "cpu" for device in devices) else None


def _address(generator: torch.Generator) -> int:
    """Where a generator is; kernels get wrappers of it that are made anew."""
    return int(generator._cdata)  # type: ignore[attr-defined]
