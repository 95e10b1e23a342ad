"""Start a program in several processes of this machine, by torchrun, which ends as quietly here as what it runs.

    python examples/launch.py [--processes N] [--max-restarts N] [--hosts N --meet HOST] PROGRAM [ARGUMENT ...]

As many processes as the machine has accelerators, or two on the CPU where it has at most one. More processes than
accelerators train on the CPU: the program is told by `--device cpu`, unless its arguments have a `--device`.

On several machines type the same on each, with their number, and the name or the address of one of them. Under
another launcher (srun, mpirun, Kubernetes) start the program itself by that one.

When its processes are stopped, torchrun shows its own traceback below what they have said, and when one fails a page
about it below theirs. Here the first costs no line and the second costs one.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TOLD = {2, 128 + signal.SIGINT, 128 + signal.SIGTERM}  # the program has said why: bad options, or stopped
COUNTS = ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PET_NNODES"]
HERE = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]


def choose(processes: int | None, arguments: Sequence[str]) -> tuple[int, list[str], str]:
    """How many processes, what the program is told beside its own arguments, and where it trains, in words."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    processes = processes or (count if count > 1 else 2)
    there = f"{count or 'no'} accelerator{'' if count == 1 else 's'} here"
    device = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    device.add_argument("--device")
    asked = device.parse_known_args(arguments)[0].device
    if asked is not None or processes <= count:
        return processes, [], f"on {asked or 'an accelerator each'}, {there}"
    return processes, ["--device", "cpu"] if count else [], f"on the CPU, {there}"


def meeting(hosts: int, meet: str | None, variables: Mapping[str, str]) -> list[str]:
    """Return what torchrun is told of how many machines there are, and where they meet; exits where that makes no
    sense."""
    if hosts > 1 and meet:
        return ["--nnodes", str(hosts), "--rdzv-backend", "c10d", "--rdzv-id", "launch", "--rdzv-endpoint", meet]
    if hosts > 1 or meet:
        sys.exit("launch.py: --hosts 2 and --meet HOST go together, the same on each of the hosts")
    others = [f"{name}={variables[name]}" for name in COUNTS if variables.get(name, "1") != "1"]
    if others:
        sys.exit(
            f"launch.py starts processes of this machine, and would do so in each process of another launcher, which "
            f"has set {', '.join(others)}. Start the program itself by that one (`srun python PROGRAM`, `mpirun python "
            "PROGRAM`, `torchrun PROGRAM` in Kubernetes), or give --hosts and --meet"
        )
    return HERE


def main(arguments: Sequence[str]) -> int:
    """The exit status: that of the process that ended first with one, or 128 and the number of a signal."""
    parser = argparse.ArgumentParser(description="Start a program in several processes of this machine.")
    parser.add_argument("--processes", type=int, help="default: one for each accelerator; two on the CPU")
    parser.add_argument("--hosts", type=int, default=1, help="on how many machines this is typed")
    parser.add_argument("--meet", metavar="HOST", help="the name or address of one of them, the same on all")
    parser.add_argument("--max-restarts", type=int, default=0, help="start all of them again so often when one fails")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    place = meeting(options.hosts, options.meet, os.environ)
    processes, more, where = choose(options.processes, options.arguments)
    beside = f", beside {options.hosts - 1} more" if options.hosts > 1 else ""
    print(f"{processes} process{'es' if processes > 1 else ''} {where}{beside}", flush=True)
    logging.disable(logging.ERROR)  # of the launcher alone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        restarts = ["--max-restarts", str(options.max_restarts), "--monitor-interval", "0.1"]
        run.main([*place, "--nproc-per-node", str(processes), *restarts, options.program, *options.arguments, *more])
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if status not in TOLD:
            how = "failed with" if failure.exitcode >= 0 else f"was ended by {signal.Signals(-failure.exitcode).name},"
            print(f"process {rank} {how} exit status {status}", file=sys.stderr)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
