"""Reads and sets the random generators of the process: Python's, NumPy's, PyTorch's on the CPU and accelerators."""

import random
import sys
from typing import Any

import torch

from lockstep._base.tree import tree_map

Streams = dict[str, Any]


def read_streams() -> Streams:
    """Return the state of every stream in use, as plain values."""
    version, numbers, gauss = random.getstate()
    streams: Streams = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        streams["numpy"] = tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, state)
    accelerator = _read_accelerator()
    if accelerator is not None:
        streams["accelerator"] = accelerator
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


def _read_accelerator() -> dict[str, Any] | None:
    """Return the states of the generators of the accelerators that this process uses; None if it has not used any yet.

    All devices count if there are several: replicas may use more than the current one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if accelerator is None else torch.get_device_module(accelerator.type)
    if accelerator is None or not hasattr(module, "get_rng_state"):
        return None
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    count = torch.accelerator.device_count()
    states = [module.get_rng_state(index) for index in range(count)] if count > 1 else [module.get_rng_state()]
    return {"type": accelerator.type, "states": states}
