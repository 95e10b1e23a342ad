"""What PyTorch expects to find at `torch.sim`: the device module, as `torch.cuda` is for CUDA."""

from __future__ import annotations

import dataclasses

import torch
from torch import Event, Stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "is_current_stream_capturing",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


@dataclasses.dataclass(frozen=True)
class Properties:
    """What a simulated device says about itself."""

    name: str = "Simulated accelerator"
    total_memory: int = 16 << 30
    multi_processor_count: int = 64
    major: int = 8
    minor: int = 0


_initialized = True  # asked by torch.utils.checkpoint before it saves the state of the generators
_properties: dict[int, Properties] = {}  # of the devices whose properties a test has set


def _index(which: torch.device | str | int | None = None) -> int:
    """The number of a device; of the current one where none is named."""
    if isinstance(which, str):
        which = torch.device(which)
    if isinstance(which, torch.device):
        if which.type != "sim":
            raise ValueError(f"expected a sim device, but got {which}")
        which = which.index
    return current_device() if which is None else which


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return torch._C._accelerator_hooks_device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | str | int) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(torch.accelerator.device_index):
    """The context in which a device is the current one."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        super().__init__(None if device is None else _index(device))


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def is_current_stream_capturing() -> bool:
    return False  # nothing is captured; tests that need one say otherwise


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.device | str | int | None = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def set_stream(stream: Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: Stream) -> Stream:
    return stream  # a torch.Stream is its own context manager


def get_device_properties(device: torch.device | str | int | None = None) -> Properties:
    index = _index(device)
    if not 0 <= index < device_count():
        raise AssertionError(f"invalid device id {index}")
    return _properties.get(index, Properties())


def get_device_name(device: torch.device | str | int | None = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: torch.device | str | int | None = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def mem_get_info(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """The free and the total memory of a device, in bytes."""
    return torch.accelerator.get_memory_info(_index(device))


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    pass  # nothing is cached


def manual_seed(seed: int) -> None:
    _seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _seed(index, seed)


def _seed(index: int, seed: int) -> None:
    seed = int(seed) % 2**64
    torch.ops.lockstep_sim.seed(index, seed - 2**64 if seed >= 2**63 else seed)


def seed() -> None:
    manual_seed(torch.seed())


def seed_all() -> None:
    manual_seed_all(torch.seed())


def initial_seed() -> int:
    return torch.ops.lockstep_sim.initial_seed(current_device()) % 2**64


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return torch.ops.lockstep_sim.rng_state(_index(device))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    torch.ops.lockstep_sim.set_rng_state(_index(device), new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
