"""A Ray cluster on the loopback interface, whose nodes come and go: each is a process group of `ray start`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 60.0
"""For which a node may need to start or to end."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # for workers on a node that has just gone
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


class Cluster:
    """A head without room for workers; nodes that are added have room for some, as the resource `slot`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """That of programs which use the cluster."""
        return os.environ | ENVIRONMENT | {"RAY_TMPDIR": self._folder, "RAY_ADDRESS": self.address}

    def start(self) -> None:
        """Start the head."""
        port = self.address.partition(":")[2]
        self._start(
            "--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false", "--num-cpus=1"
        )

    def add_node(self, slots: int) -> subprocess.Popen[bytes]:
        """Start a node, and wait until it is there."""
        resources = f'{{"slot": {slots}}}'
        return self._start(f"--address={self.address}", f"--num-cpus={slots}", f"--resources={resources}")

    def remove_node(self, node: subprocess.Popen[bytes]) -> None:
        """End a node and all workers on it."""
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
        self._nodes.remove(node)

    def close(self) -> None:
        """End all nodes, the head last."""
        for node in reversed(list(self._nodes)):
            self.remove_node(node)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        ray = str(Path(sys.executable).parent / "ray")
        log = Path(self._folder, f"node-{len(self._nodes)}-{time.monotonic_ns()}.log")
        with log.open("wb") as output:
            node = subprocess.Popen(
                [ray, "start", "--block", "--node-ip-address=127.0.0.1", *options],
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + SECONDS
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return node


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Within: a cluster without room for workers."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # paths of sockets are short
        cluster = Cluster(folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
