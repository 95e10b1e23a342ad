"""Reads and sets the random generators of the process: Python's, NumPy's, PyTorch's on the CPU and accelerators."""

import random
import sys
from typing import Any

import torch

Streams = dict[str, Any]


def read_streams() -> Streams:
    """Return the state of every stream in use, as plain values."""
    version, numbers, gauss = random.getstate()
    streams: Streams = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        streams["numpy"] = plain(numpy.random.get_state(legacy=False))
    module = _accelerator_module()
    if module is not None:
        streams["accelerator"] = _read_accelerator(module)
    return streams


def set_streams(streams: Streams) -> None:
    """Continue from states that :func:`read_streams` returned; states of accelerators that are not here are ignored."""
    version, numbers, gauss = streams["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(streams["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in streams:
        numpy.random.set_state(streams["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    saved = streams.get("accelerator")
    if saved is not None and accelerator is not None and saved["type"] == accelerator.type:
        module: Any = torch.get_device_module(accelerator.type)
        for index, state in list(enumerate(saved["states"]))[: torch.accelerator.device_count()]:
            module.set_rng_state(state, *([index] if len(saved["states"]) > 1 else []))


def plain(value: Any) -> Any:
    """Return a value with lists in place of NumPy's arrays, and Python's numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _accelerator_module() -> Any:
    """Return the module of the accelerator that this process uses; None if it has not used any yet."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator.type)
    return module if getattr(module, "is_initialized", lambda: True)() and hasattr(module, "get_rng_state") else None


def _read_accelerator(module: Any) -> dict[str, Any]:
    """Return the states of all devices if there are several: replicas may use more than the current one."""
    count = torch.accelerator.device_count()
    states = [module.get_rng_state(index) for index in range(count)] if count > 1 else [module.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return {"type": accelerator.type, "states": states}
