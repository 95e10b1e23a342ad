"""The process group of an example: all processes that torchrun started, or the one that runs alone."""

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import lockstep  # noqa: F401  (registers the backend "shm")


@contextmanager
def process_group() -> Iterator[None]:
    """All processes that torchrun started, or this one alone; each kind of device has its backend.

    Without an accelerator they share memory, where the system can do that.
    """
    backend = "shm" if sys.platform == "linux" and not torch.accelerator.is_available() else None
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])  # all on this machine: not a word leaves it
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a replicated model that is still there keeps the group's threads alive, while the program ends
        dist.destroy_process_group()
