"""The place of a process in its run, as its launcher says it; and ranks that meet by nothing but that."""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CommunicationError, OptionError
from lockstep.session.environment import Environment, first_host, read_environment, tasks_of_hosts
from processes import in_child, on_processes, run_processes

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29511"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
ALLOCATION = {
    "SLURM_JOB_ID": "1234",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
}
DAEMONS = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def variables_of(names, *numbers):
    return dict(zip(names.split(), map(str, numbers), strict=True))


def by_mpi(rank, world, local_rank, local_size, prefix="OMPI_COMM_WORLD"):
    names = f"{prefix}_RANK {prefix}_SIZE {prefix}_LOCAL_RANK {prefix}_LOCAL_SIZE"
    return variables_of(names, rank, world, local_rank, local_size)


def by_mpich(rank, world, local_rank, local_size):
    return variables_of("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", rank, world, local_rank, local_size)


def by_slurm(rank, world, local_rank, local_size):
    names = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID"
    return SLURM | variables_of(names, rank, world, local_rank, local_size, 0)


OPEN_MPI, PMI = by_mpi(3, 4, 1, 2), by_mpich(1, 3, 1, 3)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Environment()),
        (TORCHRUN | LOCAL, Environment(5, 8, 1, 4, False, "", "node1", 29511)),
        (TORCHRUN | SLURM, Environment(5, 8, None, 0, False, "", "node1", 29511)),
        (SLURM, Environment(3, 5, 1, 2, False, "1234.2", "gpu007", 12000 + 3362, "SLURM_STEP_NODELIST")),
        (SLURM | {"MASTER_ADDR": "other"}, Environment(3, 5, 1, 2, False, "1234.2", "other", 12000 + 3362)),
        (SLURM | {"MASTER_PORT": "7"}, Environment(3, 5, 1, 2, False, "1234.2", "gpu007", 7, "SLURM_STEP_NODELIST")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}, Environment(3, 5, 1, 5, False, "1234.2")),
        (SLURM | {"WORLD_SIZE": "5", "MASTER_ADDR": "a"}, Environment(3, 5, 1, 2, False, "1234.2", "a", 12000 + 3362)),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, Environment(3, 4, 1, 2, False, "", "a", 29500)),
        (OPEN_MPI | DAEMONS | {"MASTER_ADDR": "a"}, Environment(3, 4, 1, 2, False, "", "a", 29500)),
        (PMI | {"MASTER_ADDR": "a"}, Environment(1, 3, 1, 3, False, "", "a", 29500)),
        (ALLOCATION, Environment()),
        (ALLOCATION | {"SLURM_PROCID": "0"}, Environment()),  # the script of sbatch
    ],
)  # fmt: skip
def test_what_a_launcher_says(variables, place):
    assert read_environment(variables) == place


RECORDED = {
    "Open MPI 5.0.11": """
        OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1
        OMPI_COMM_WORLD_SIZE=3 OMPI_UNIVERSE_SIZE=4 OMPI_WORLD_LOCAL_SIZE=3 OMPI_WORLD_SIZE=3
        PMIX_NAMESPACE=prterun-node0-26491@1 PMIX_RANK=1 PMIX_VERSION=5.0.11rc1 PRTE_LAUNCHED=1
    """,
    "MPICH": "MPI_LOCALNRANKS=3 MPI_LOCALRANKID=1 PMI_FD=10 PMI_HOSTNAME=node0 PMI_RANK=1 PMI_SIZE=3",
}
"""What launchers have set for the second of three processes, in their own words."""


@pytest.mark.parametrize("launcher", RECORDED)
def test_what_launchers_have_set(launcher):
    place = read_environment(dict(variable.split("=") for variable in RECORDED[launcher].split()))
    assert (place.rank, place.world_size, place.local_rank, place.is_one_host, place.alone) == (1, 3, 1, True, False)


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD"])
def test_ranks_of_one_host_need_no_address(launcher):
    place = read_environment(by_mpi(1, 2, 1, 2, launcher))
    assert (place.rank, place.world_size, place.local_rank, place.is_one_host, place.address) == (1, 2, 1, True, "")
    assert place.run.startswith(f"{os.getppid()}-")


def test_one_process_of_a_launcher_needs_none():
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node1"}
    assert read_environment(one).world_size == 1
    assert read_environment(ALLOCATION | one).world_size == 1  # the shell of salloc may be a step


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "the environment has RANK, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start the processes"),
        ({"WORLD_SIZE": "4"}, "the environment has WORLD_SIZE, but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "node1"}, "the environment has MASTER_ADDR=node1, but does not say which rank of how many"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}, "the environment has PET_NNODES=2, PET_NPROC_PER_NODE=1, but"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "the environment has OMPI_COMM_WORLD_SIZE=4, but does not say"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "the environment has SLURM_STEP_NUM_TASKS=4, but does not say"),
        ({"PMI_SIZE": "4"}, "start it with torchrun, srun or mpirun, which say it, or set RANK, WORLD_SIZE, MASTER_A"
                           r"DDR and MASTER_PORT of each process; or give session\(alone=True\)"),
        ({"PMIX_RANK": "1"}, "the environment has PMIX_RANK=1, but does not say"),
        ({"LOCAL_WORLD_SIZE": "2"}, "the environment has LOCAL_WORLD_SIZE=2, but does not say"),
        ({"LOCAL_RANK": "1"}, "the environment has LOCAL_RANK=1, but"),
        ({"NNODES": "2"}, "the environment has NNODES=2, but"),
        ({"NNODES": "1:4"}, "the environment has NNODES=1:4, but"),
        ({"NODE_RANK": "1"}, "the environment has NODE_RANK=1, but"),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}, "the environment has GROUP_WORLD_SIZE=2, but"),
        ({"ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2"}, "the environment has ROLE_RANK=1, ROLE_WORLD_SIZE=2, but"),
        ({"JOB_COMPLETION_INDEX": "0"}, r"RANK \(to JOB_COMPLETION_INDEX\), WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, r"RANK \(to FLUX_TASK_RANK\), WORLD_SIZE \(to FLUX_JOB_SIZE\)"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}, r"RANK \(to JSM_NAMESPACE_RANK\), WORLD_SIZE \(to"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}, r"has PALS_RANKID=0, .* RANK \(to PALS_RANKID\),"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, r"set RANK \(to HOROVOD_RANK\), WORLD_SIZE \(to HOROVOD_SIZE\)"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, r"SLURM_PROCID=2, .*\(to SLURM_NTASKS\)"),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "has MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2, but"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "the environment has SM_HOSTS="),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8: ranks are 0 to 7"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE is 'two', expected a whole number"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID is -1, but SLURM_STEP_NUM_TASKS is 5"),
        (OPEN_MPI, r"Open MPI says rank 3 of 4 \(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE\), but not at which "
                   "address the ranks of several hosts meet: set MASTER_ADDR to the host of rank 0, on all of them"),
        (SLURM | OPEN_MPI, r"launchers disagree: SLURM says rank 3 of 5 \(SLURM_PROCID, SLURM_STEP_NUM_TASKS\), "
                           r"Open MPI says rank 3 of 4 \(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE\)\. Start the"),
        (OPEN_MPI | PMI, "launchers disagree: Open MPI says rank 3 of 4 .*, MPI says rank 1 of 3"),
        (SLURM | {"WORLD_SIZE": "4"}, "launchers disagree: SLURM says rank 3 of 5 .*, WORLD_SIZE is 4. Start the"),
    ],
)  # fmt: skip
def test_what_is_no_place_is_no_world_of_one(variables, words):
    with pytest.raises(OptionError, match=words):
        read_environment(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NNODES": "1", "NODE_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "-1", "NODE_RANK": ""},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"MASTER_PORT": "29500", "SGE_TASK_ID": "7"},
    ],
)
def test_what_is_said_of_one_process_is_no_sign_of_others(variables):
    assert read_environment(variables) == Environment()


def reads(here, said):
    """What a child is told: all are there when the first one reads."""
    lines = logging.handlers.BufferingHandler(9)
    logging.getLogger("lockstep").addHandler(lines)
    here.wait(30)
    read_environment({})
    said.put([each.getMessage() for each in lines.buffer])
    here.wait(30)


def has_children(rank, count):
    context = multiprocessing.get_context("fork")
    here, said = context.Barrier(count), context.Queue()
    children = [context.Process(target=reads, args=(here, said)) for _ in range(count)]
    for each in children:
        each.start()
    told = [said.get() for _ in children]
    for each in children:
        each.join()
    return os.getpid(), told


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_children_of_multiprocessing_are_told_that_each_trains_alone():
    [(parent, told)] = run_processes(1, has_children, 3)
    for [line] in told:
        assert line.startswith(f"this process trains alone, among 3 children of process {parent} (multiprocessing). To")
        assert "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of each child, before its session" in line
    assert run_processes(1, has_children, 1)[0][1] == [[]]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@on_processes(2, launched=True)
def test_a_process_that_a_rank_has_started_does_not_join_its_run_as_that_rank(rank):
    def child():
        said = rf"process {parent}, which has started this one, is rank {rank.rank} of 2 .*session\(alone=True\)"
        with mock.patch.object(dist, "is_initialized", return_value=False), pytest.raises(OptionError, match=said):
            lockstep.session(timeout=5.0).__enter__()
        return 0

    parent = os.getpid()
    with lockstep.session() as run:
        assert in_child(child) == 0
        assert not run.agree(False)


def test_a_process_beside_the_steps_of_a_job_is_told_how_to_start(caplog):
    with caplog.at_level(logging.WARNING, "lockstep"):
        read_environment(ALLOCATION)
    assert "trains alone, in a SLURM job for 5: `srun python ...` starts all" in caplog.text
    caplog.clear()
    read_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"})
    assert not caplog.records


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("host[1-3,7],other", "host1"),
        ("node1", "node1"),
        ("a,b[1-2]", "a"),
        ("gpu[007-010]", "gpu007"),
        ("rack[2,4]n[01-08]-ib,x", "rack2n01-ib"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(("text", "tasks"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("", [])])
def test_tasks_of_hosts(text, tasks):
    assert tasks_of_hosts(text) == tasks


LAUNCHERS = {"Open MPI": by_mpi, "MPICH": by_mpich, "SLURM": by_slurm}


def be_started(launcher, rank, world, folder):
    """Become a rank of a launcher on this host, in whose folder ranks tell each other."""
    os.environ.update(LAUNCHERS[launcher](rank, world, rank, world))
    tempfile.tempdir = str(folder)


def trains(**options):
    with lockstep.session(timeout=60.0, **options) as run:
        model = lockstep.replicate(nn.Linear(2, 1))
        model(torch.full((1, 2), float(run.rank))).sum().backward()
        return run.rank, run.world_size, run.local_rank, model.weight.grad[0, 0].item()


def meets(rank, launcher, folder):
    """In each of two sessions: the rank's place, and a mean over the ranks."""
    dist.destroy_process_group()
    be_started(launcher, rank.rank, rank.world, folder)
    return [trains() for _ in range(2)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_one_host_meet_twice_and_leave_nothing(launcher, tmp_path):
    assert run_processes(3, meets, launcher, tmp_path) == [[(rank, 3, rank, 1.0)] * 2 for rank in range(3)]
    assert [list(each.iterdir()) for each in tmp_path.iterdir()] == [[]]


@pytest.fixture
def folder_of_ranks(tmp_path):
    """The folder in which ranks of one host meet."""
    folder = tmp_path / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700)
    return folder


def test_what_a_killed_job_has_left_does_not_matter(folder_of_ranks, tmp_path):
    """A file that nobody has locked is of a process that has ended."""
    (folder_of_ranks / "1234.2").write_text("9\n")
    assert run_processes(2, meets, "SLURM", tmp_path)[0] == [(0, 2, 0, 0.5)] * 2


def comes_alone(rank, folder):
    dist.destroy_process_group()
    be_started("MPICH", 1, 2, folder)
    with pytest.raises(CommunicationError) as raised, lockstep.session(timeout=1.0):
        pass
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    [told] = run_processes(1, comes_alone, tmp_path)
    assert told.startswith("rank 1: rank 0 of 2 did not come within 1 s; look at the errors of that process. The ranks")


def test_a_folder_that_others_can_write_to_is_refused(folder_of_ranks, tmp_path):
    folder_of_ranks.chmod(0o777)
    [told] = run_processes(1, comes_alone, tmp_path)
    assert told.startswith(f"the ranks cannot meet in {tmp_path}/lockstep-")


@on_processes(1)
def test_alone_is_alone_whatever_the_environment_says(rank):
    dist.destroy_process_group()
    os.environ.update(PMI | {"MASTER_ADDR": "nowhere"})
    assert trains(alone=True) == (0, 1, 0, 0.0)


PROGRAM = """
import sys, torch, lockstep
with lockstep.session(timeout=60.0) as run:
    model = lockstep.replicate(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(run.rank))).sum().backward()
    sys.stdout.write(f"{run.rank} {run.world_size} {model.weight.grad[0, 0].item()}\\n")
"""
JOB = """
for rank in 0 1; do
    export PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_RANK=$rank MPI_LOCALRANKID=$rank
    sh -c '"$0" -c "$1"; exit $?' "$0" "$1" &
done
wait
"""


@pytest.mark.around
def test_jobs_beside_each_other_do_not_meet(tmp_path):
    """Each has a shell as its launcher, which the variables do not name, and in it one for each rank."""
    jobs = [
        subprocess.Popen(
            ["sh", "-c", JOB, sys.executable, PROGRAM],
            env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for each in jobs:
        output, errors = each.communicate(timeout=100)
        assert sorted(output.splitlines()) == ["0 2 0.5", "1 2 0.5"], errors


def loses_a_rank(rank, folder):
    """As under mpirun, which ends all processes as soon as it has noticed that one has ended."""
    dist.destroy_process_group()
    be_started("MPICH", rank.rank, rank.world, folder)
    with lockstep.session(timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(1, 2)).sum().backward()
        except lockstep.errors.PeerFailure:
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
            raise
    assert run.rank


def test_a_rank_says_why_before_mpirun_ends_it(tmp_path):
    first, second = run_processes(2, loses_a_rank, tmp_path, errors=True)
    assert second.returncode == -signal.SIGKILL
    assert isinstance(first.error, lockstep.errors.PeerFailure)
    assert "rank 0 stops, because rank 1" in first.stderr
