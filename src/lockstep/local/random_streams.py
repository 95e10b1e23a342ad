"""Random numbers of CPU replicas: each replica draws from a stream of its own.

Replicas are threads, and PyTorch has one CPU generator for the whole process. If replicas shared it, the numbers that
one draws would depend on the pace of the others; and code that reads the generator's state in forward and restores it
in backward, such as activation checkpointing, would get another replica's numbers: gradients of another dropout mask.

So the first replica continues the caller's stream, and every other has a generator of its own, seeded from the caller's
state. The only effect on the caller is one number drawn, and only if a replica drew any. Two runs from one seed are
alike, and a state that was read in a replica gives the same numbers wherever it is restored.

There are three parts. *Draws*: threads of replicas have a dispatch key switched on (one that PyTorch keeps for tests,
without kernels of its own), whose kernels pass the thread's generator to every operation that takes one; nothing else
gets slower. *States*: ``torch.get_rng_state`` and its like ask ``torch.random.default_generator``, which from the first
use of replicas on is a stand-in that knows streams. *Backward*: the engine has a thread for each accelerator, so that
two recomputations may fork the one CPU generator at the same time, and leave each other's state behind. So inside a
backward pass a fork belongs to its thread, whether it sets a state or a seed (as PyTorch's PowerSGD hook does).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
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
"""Operations that draw through other operations, and some of whose overloads take no generator."""
_installing = threading.Lock()
_installed: list[Any] = []  # the libraries of kernels, which must live as long as the kernels


class RandomStream:
    """A generator that is made at its first use."""

    def __init__(self, make: Callable[[], torch.Generator]) -> None:
        self._make = make

    @cached_property
    def generator(self) -> torch.Generator:
        """The generator."""
        made = self._make()
        self._start = made.get_state()
        return made

    def has_drawn(self) -> bool:
        """Return True if numbers were drawn from the stream."""
        return "generator" in vars(self) and not torch.equal(self._start, self.generator.get_state())


def _seeded(origin: torch.Tensor, number: int, depth: int) -> torch.Generator:
    """Return the generator of a replica: the same one for the same state, number and depth of nesting."""
    seeds = torch.Generator()
    seeds.set_state(origin)
    seed = int(torch.randint(1 << 62, (number,), generator=seeds, device="cpu")[-1])
    return torch.Generator().manual_seed(seed + depth)


class _Fork:
    """The stream of a thread inside a backward pass, from setting a state until the former state is restored."""

    def __init__(self, generator: torch.Generator, before: torch.Tensor | None) -> None:
        self.task = torch._C._current_graph_task_id()
        self.before = before
        self.generator = generator

    def has_ended(self) -> bool:
        """Return True if its pass, or the node that began it, is over: the engine resets the key after each node."""
        return self.task != torch._C._current_graph_task_id() or not torch._C._dispatch_tls_is_dispatch_key_included(
            _KEY
        )


class _Read(NamedTuple):
    """The process's state as a thread last read it inside a backward pass, and the number of that pass."""

    state: torch.Tensor
    task: int


class _Thread(threading.local):
    stream: RandomStream | _Fork | None = None
    depth = 0  # number of nested replica calls that this thread is inside of
    read: _Read | None = None


_thread = _Thread()


def _current() -> RandomStream | _Fork | None:
    stream = _thread.stream
    if isinstance(stream, _Fork) and stream.has_ended():  # without having been restored
        _thread.stream = stream = None
    return stream


def _read_in_this_pass() -> torch.Tensor | None:
    """Return the process's state as this thread read it in the current backward pass: how a fork begins."""
    read = _thread.read
    return read.state if read is not None and read.task == torch._C._current_graph_task_id() else None


def _begin_fork(generator: torch.Generator) -> None:
    _thread.stream = _Fork(generator, _read_in_this_pass())
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)


def _generator() -> torch.Generator:
    """Return the generator that this thread draws from."""
    stream = _current()
    return torch.default_generator if stream is None else stream.generator


class ReplicaStreams:
    """The streams of the replicas of one call; made and ended in the caller's thread."""

    def __init__(self, count: int) -> None:
        _install()
        self._depth = _thread.depth + 1
        own = _thread.stream
        origin = _generator().get_state()
        first = own if isinstance(own, RandomStream) else None
        others = (RandomStream(partial(_seeded, origin, number, self._depth)) for number in range(1, count))
        self._streams: list[RandomStream | None] = [first, *others]

    def drawing_from(self, index: int) -> AbstractContextManager[None]:
        """Make this thread draw from a replica's stream inside the block."""
        return _drawing_from(self._streams[index], self._depth)

    def end(self) -> None:
        """Advance the caller's stream by one number if replicas have drawn from theirs: the next call must differ."""
        if any(stream is not None and stream.has_drawn() for stream in self._streams[1:]):
            torch.randint(2, (1,), generator=_generator(), device="cpu")


def drawing_from(generator: torch.Generator) -> AbstractContextManager[None]:
    """Make this thread draw from ``generator`` inside the block instead of the process's CPU generator."""
    _install()
    return _drawing_from(RandomStream(lambda: generator), _thread.depth)


@contextmanager
def _drawing_from(stream: RandomStream | None, depth: int) -> Iterator[None]:
    before = _thread.stream, _thread.depth
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    _thread.stream, _thread.depth = stream, depth
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, stream is not None)
    try:
        yield
    finally:
        _thread.stream, _thread.depth = before
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)


class _DefaultGenerator:
    """The stand-in for the process's CPU generator in ``torch.random``: acts on the generator of the asking thread."""

    def get_state(self) -> torch.Tensor:
        """Return the state of this thread's stream."""
        state = _generator().get_state()
        if _current() is None and _in_backward():
            _thread.read = _Read(state, torch._C._current_graph_task_id())
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state of this thread's stream; inside a backward pass, begin a fork that ends when it is restored."""
        stream = _current()
        if isinstance(stream, _Fork) and state is stream.before:
            _thread.stream = _thread.read = None
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
        elif stream is None and _in_backward() and state is not _read_in_this_pass():
            generator = torch.Generator()
            generator.set_state(state)
            _begin_fork(generator)
        else:  # also for a fork that ends after it has drawn, without having set a state or a seed
            _generator().set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed this thread's stream; inside a backward pass that has read the state, begin a fork."""
        if _current() is None and _in_backward() and _read_in_this_pass() is not None:
            _begin_fork(torch.Generator().manual_seed(seed))
            return _generator()
        return _generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator(), name)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _install() -> None:
    """Register the kernels and the stand-in, once per process."""
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
    """Return True if an operation takes tensors; operations that only make tensors call one that fills them."""
    return any(isinstance(argument.type, torch._C.TensorType) for argument in schema.arguments)


def _drawing(operation: Any, place: int, by_keyword: bool) -> Callable[..., Any]:
    """Return ``operation`` with the thread's generator passed where it would use the process's."""
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
    """Return ``operation``, which draws through others and takes no generator, so that dispatch modes do not see it.

    A mode runs operations below the key of this module, so they would draw from the process's generator.
    """
    below = torch._C._dispatch_keyset_full_after(_KEY)

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0 and _for_cpu(args, kwargs) is not None:
            with _disable_current_modes():
                return operation(*args, **kwargs)
        return operation.redispatch(keys & below, *args, **kwargs)

    return draw


def _is_traced() -> bool:
    """Return True if operations are recorded, not run; users' modes, as of selective checkpointing, do run them."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )


def _for_cpu(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the thread's own generator, if it has one and the operation is on CPU tensors and is not only traced."""
    stream = _current()
    if stream is None or _is_traced():
        return None
    devices = [value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if (device := kwargs.get("device")) is not None:
        devices.append(torch.device(device))
    return stream.generator if all(device.type == "cpu" for device in devices) else None


def _address(generator: torch.Generator) -> int:
    """Return the address of a generator; kernels get a new wrapper of it each time."""
    return int(generator._cdata)  # type: ignore[attr-defined]
