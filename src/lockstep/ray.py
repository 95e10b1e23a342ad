"""Brings the workers of Ray Train together in ``lockstep.session()``; not imported by the rest of the library."""

import os
import socket
from typing import Any

import ray
from ray.train import get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig


class SessionConfig(TorchConfig):
    """The ``torch_config`` of a ``TorchTrainer`` whose workers begin a :func:`lockstep.session`, which makes the group.

    By itself Ray makes the process group, before the training function begins: a worker that fails meanwhile is waited
    for until the time-out, and backends of other packages are not known. With this each worker is told its place, in
    ``RANK`` and its like, and the session does the rest: backend, time-outs and errors are the session's.

    Example:
        >>> trainer = TorchTrainer(  # doctest: +SKIP
        ...     train, torch_config=lockstep.ray.SessionConfig(), scaling_config=ScalingConfig(num_workers=4)
        ... )
    """

    def __init__(self) -> None:
        super().__init__(backend="of lockstep.session()")  # without a name, TorchTrainer would give it one

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that Ray tells when workers have started."""
        return _Backend


class _Backend(Backend):
    share_cuda_visible_devices = True  # as with PyTorch's own: ranks of a host see each other's devices

    def on_start(self, worker_group: Any, backend_config: SessionConfig) -> None:
        """Tell each worker its place, and where all meet: at rank 0."""
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_place, address, port)


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as server:
        return address, server.getsockname()[1]


def _set_place(address: str, port: int) -> None:
    context = get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
