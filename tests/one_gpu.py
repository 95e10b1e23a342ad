"""Ranks as processes on GPUs, of which there may be only one: NCCL allows several ranks on one GPU from 2.30 on."""

from __future__ import annotations

import ctypes
import os

import torch

NCCL = "cpu:gloo,cuda:nccl"
LIMIT = 100.0
"""Seconds for processes that have CUDA and NCCL to start."""
CYCLES = 200_000_000
"""At 1 to 2 GHz a tenth of a second or more: far longer than any kernel of the tests."""
LONG = 10 * CYCLES
"""A second or more: longer than a step takes a host that does other work, too."""


def allows_several_ranks() -> bool:
    """Return True if NCCL takes two ranks on the GPUs of this machine."""
    if torch.cuda.device_count() > 1:
        return True
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value >= 23000


def place_of(rank) -> torch.device:
    """Return the rank's device, which becomes the current one; the CPU in a dry run. Products are exact in float32."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
