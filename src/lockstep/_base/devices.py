"""Checks and resolves device lists, warns of unbalanced devices, and tests that copies between two devices work."""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from lockstep.errors import DeviceError, LengthError, OptionError

DeviceLike = int | str | torch.device
CPU = torch.device("cpu")
_LIKE = (int, str, torch.device)


def accelerator() -> torch.device | None:
    """Return the type of accelerator that this process can use, or None; one that was found stays."""
    return _found or _find()


_found: torch.device | None = None


def _find() -> torch.device | None:
    global _found
    _found = torch.accelerator.current_accelerator(check_available=True)
    return _found


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream of an accelerator is being captured into a graph."""
    asks = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise :class:`OptionError` if the current stream of an accelerator is being captured into a graph.

    ``what``: the part of a step that would be captured. A replay repeats what was sent to the device, but nothing that
    the host has done: the ranks would tell each other nothing.
    """
    if is_capturing(device):
        raise OptionError(
            f"{what} cannot be captured into a graph of {device.type}: a replay would repeat the collectives without "
            "what the ranks tell each other, so failures and ranks that differ would go unnoticed. Make the graphs of "
            "forward and backward with torch.cuda.make_graphed_callables() before the module is replicated, and leave "
            "backward() and step() of the whole outside of the capture"
        )


def wait_for_accelerator(check: Callable[[], object]) -> None:
    """Return when the current stream of the accelerator has done all its work; raise the device's error, if it has one.

    Call ``check`` again and again while waiting, and raise what it raises: a collective on the device ends only if all
    ranks take part, so it may never end.
    """
    if not _is_used():
        return
    stream, seconds = torch.accelerator.current_stream(), _FIRST_LOOK
    while not stream.query():
        check()
        time.sleep(seconds)
        seconds = min(2 * seconds, _LATER_LOOKS)


_FIRST_LOOK, _LATER_LOOKS = 1e-4, 0.01


def current_index() -> int | None:
    """Return the number of this thread's accelerator, or None."""
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


def has_work(device: int | None) -> bool:
    """Return True if the default stream of the accelerator with a number has not done all its work; any thread may ask,
    but not while another one captures a graph."""
    try:
        return device is not None and _is_used() and not torch.accelerator.current_stream(device).query()
    except RuntimeError:  # the device has failed
        return False


def _is_used() -> bool:
    """Return True if this process has used its accelerator; False if it cannot tell, as with MPS."""
    found = accelerator()
    is_initialized = found and getattr(torch.get_device_module(found.type), "is_initialized", None)
    return bool(is_initialized and is_initialized())


def resolve_device(device: DeviceLike) -> torch.device:
    """Return the device meant by an index of the current accelerator type, a string or a ``torch.device``.

    ``"cuda"`` without an index means the current CUDA device. Raises :class:`DeviceError` for a device that does not
    exist, naming it and the devices there are.
    """
    if isinstance(device, bool) or not isinstance(device, _LIKE):
        raise DeviceError(
            f"expected a device as int, str or torch.device, got {device!r} of type {type(device).__name__}"
        )
    if isinstance(device, int):
        return _accelerator_at(device)
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"expected a device such as 'cpu' or 'cuda:0', got {device!r}: {error}") from error
    if named.type == "cpu":
        return CPU
    found = accelerator()
    if found is None or named.type != found.type:
        raise DeviceError(f"device {named} is not available; {_available()}")
    return _accelerator_at(torch.accelerator.current_device_index() if named.index is None else named.index)


@cache
def _accelerator_at(index: int) -> torch.device:
    found = accelerator()
    if found is None or not 0 <= index < torch.accelerator.device_count():
        raise DeviceError(f"there is no accelerator with index {index}; {_available()}")
    return torch.device(found.type, index)


def _available() -> str:
    found = accelerator()
    if found is None:
        return "this process has no accelerator: use 'cpu', as often as replicas are wanted"
    count = torch.accelerator.device_count()
    return f"this process has 'cpu' and {found.type}:0 to {found.type}:{count - 1}"


def resolve_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Return :func:`resolve_device` of each; raise for an empty list or a single device, with a message for each."""
    if isinstance(devices, int | str | torch.device):
        raise DeviceError(f"expected a list of devices, got {devices!r}; write [{devices!r}]")
    resolved = [resolve_device(device) for device in devices]
    if not resolved:
        raise LengthError("expected at least one device, got an empty device list")
    return resolved


def resolve_destination(
    destination: DeviceLike | None, tensors: Sequence[torch.Tensor] = (), *, stacklevel: int = 3
) -> torch.device:
    """Return the device for a result: ``-1`` is the CPU, None the current device of the tensors' type."""
    if destination is None:
        on_cpu = accelerator() is None or (bool(tensors) and all(t.device.type == "cpu" for t in tensors))
        return CPU if on_cpu else _accelerator_at(torch.accelerator.current_device_index())
    if isinstance(destination, int) and destination == -1:
        warnings.warn(
            "Using -1 to represent CPU tensor is deprecated. Please use a device object or string instead, "
            'e.g., "cpu".',
            FutureWarning,
            stacklevel=stacklevel,
        )
        return CPU
    return resolve_device(destination)


def all_accelerators() -> list[torch.device]:
    """Return all accelerators of this process, by index; empty on a machine without any."""
    found = accelerator()
    return [] if found is None else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]


def replica_devices(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    """Return the devices for replicas: those of a list, or all accelerators if there is none.

    Without accelerators, an empty list and a list of nothing but accelerators give no devices: the module runs as it
    is, as with ``torch.nn.DataParallel``. ``device_ids=range(torch.cuda.device_count())`` is in many programs.
    """
    if device_ids is None:
        return all_accelerators()
    is_list = not isinstance(device_ids, int | str | torch.device)
    if is_list and accelerator() is None and all(map(_names_accelerator, device_ids)):
        return []
    return resolve_devices(device_ids)


def _names_accelerator(device: DeviceLike) -> bool:
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return False
    if isinstance(device, torch.device):
        return is_accelerator(device)
    return isinstance(device, int) and not isinstance(device, bool)


def device_label(device: torch.device) -> str:
    """Return the name of a device in messages: an accelerator's index, as in PyTorch's own messages, or ``cpu``."""
    return device.type if device.index is None else str(device.index)


def warn_if_unbalanced(devices: Sequence[torch.device]) -> None:
    """Warn once, by name, if devices differ by more than a quarter in memory or in processors."""
    for attribute, noun in (("total_memory", "memory"), ("multi_processor_count", "processors")):
        values = {device: _property(device, attribute) for device in dict.fromkeys(devices)}
        known = {device: value for device, value in values.items() if value}
        if not known or min(known.values()) >= 0.75 * max(known.values()):
            continue
        least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        warnings.warn(
            f"There is an imbalance between your devices: {least} has {known[least]} and {most} has {known[most]} "
            f"({noun}). The slower one sets the pace of every step. Leave it out of device_ids, or give it fewer "
            "rows with split=[...].",
            stacklevel=4,  # __init__ and what checks its arguments stand between
        )
        return


def _property(device: torch.device, attribute: str) -> int:
    if device.type == "cpu":
        return 0
    get_properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return 0 if get_properties is None else int(getattr(get_properties(device.index), attribute, 0) or 0)


def is_accelerator(device: torch.device) -> bool:
    """Return True for a device whose kernels run on streams: neither the CPU nor ``meta``."""
    return device.type not in ("cpu", "meta")


_side_streams: dict[torch.device, torch.Stream] = {}
_side_streams_lock = threading.Lock()


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream for copies from the host to this device; None for the CPU, which has no streams."""
    if device.type == "cpu":
        return None
    with _side_streams_lock:
        if device not in _side_streams:
            _side_streams[device] = torch.Stream(device=device)
        return _side_streams[device]


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return the current stream of each accelerator among the devices, once."""
    return [torch.accelerator.current_stream(device) for device in dict.fromkeys(devices) if is_accelerator(device)]


@contextmanager
def on_streams(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """Make each stream the current one of its device, in this thread, inside the block; the current device stays.

    (``with stream:`` keeps what it restores on the stream itself: threads that share one swap their streams. It also
    makes a context on the current device, which may be none of the program's.)
    """
    before = []
    try:
        for stream in streams:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                before.append(current)
                _set_stream(stream)
        yield
    finally:
        for stream in before:
            _set_stream(stream)


def _set_stream(stream: torch.Stream) -> None:
    with torch.accelerator.device_index(stream.device.index):  # a stream's device becomes the current one
        torch.accelerator.set_stream(stream)


@cache
def direct_copy_works(source: torch.device, target: torch.device) -> bool:
    """Return True if a direct copy between two accelerators delivers what was sent; tried once for each pair.

    On some machines peer-to-peer copies silently deliver something else (pytorch/pytorch#52142). Copies between a pair
    that fails go through the host, and a warning names it.
    """
    if "cpu" in (source.type, target.type) or source == target:
        return True
    sent = torch.arange(1, 1 << 14, dtype=torch.int32, device=CPU)  # whatever the default device is
    arrived = sent.to(source).to(target, non_blocking=True).to(CPU)
    if torch.equal(arrived, sent):
        return True
    warnings.warn(
        f"a direct copy from {source} to {target} did not deliver what was sent; copies between the two go through "
        "the host, which is slower. Look at the machine's peer-to-peer settings (for NVIDIA: IOMMU, ACS, drivers).",
        stacklevel=2,
    )
    return False
