"""Reads the place of a process in its run from the environment variables that its launcher has set."""

import contextlib
import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep._base.debug import log_of
from lockstep.errors import OptionError
from lockstep.failures import proc

DEFAULT_PORT = 29500
"""The port at which ranks meet by default, the same as with ``torchrun``."""

_log = log_of("session")


@dataclass(frozen=True)
class Environment:
    """The place of a process in its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    """The number of this process on its host; None as long as it is not known."""
    local_world_size: int = 1
    """The number of processes on this host; 0 as long as it is not known."""
    alone: bool = True
    """True if no launcher has started this process as a rank: then there is no store to meet others at."""
    run: str = ""
    """The name of the run, the same on all ranks; empty if it has none."""
    address: str = ""
    """The host at which the ranks meet; empty if they find each other on their one host."""
    port: int = 0
    """The port at ``address`` at which the ranks meet."""
    address_variable: str = "MASTER_ADDR"
    """The variable that says ``address``, for messages."""
    launcher_has_store: bool = False
    """True if the launcher hosts the store there; else rank 0 does."""
    group_exists: bool = False
    """True if somebody else has made the default process group already."""

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher says which rank a process is."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str

    def place(self, variables: Mapping[str, str]) -> Environment | None:
        """Return the place that this launcher gives; None if it has not started this process."""
        if self.rank not in variables or self.world_size not in variables:
            return None
        rank, world = _rank_and_world_size(variables, self.rank, self.world_size)
        return Environment(
            rank=rank,
            world_size=world,
            local_rank=_number(variables, self.local_rank) if self.local_rank in variables else None,
            local_world_size=_number(variables, self.local_world_size, 0),
            alone=False,
        )

    def says(self, place: Environment) -> str:
        """Return the variables of this launcher and their values, as text."""
        return f"{self.name} says rank {place.rank} of {place.world_size} ({self.rank}, {self.world_size})"


SLURM = Launcher("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
LAUNCHERS = (
    SLURM,
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process, from the variables of the launcher that has started it.

    The variables of ``torchrun`` win. A process that no launcher has started is alone. Raises :class:`OptionError` if
    variables contradict each other, are not numbers, or show that there are other processes without the rank of this
    one.
    """
    if all(name in variables for name in _NEEDED):
        return _said_by_name(variables)
    found = _launchers(variables)
    if not found:
        _refuse_signs_of_others(variables)
        return Environment()
    launcher, place = found[0]
    _compare(variables, found)
    return place if place.world_size == 1 else _with_address(variables, launcher, place)


def _said_by_name(variables: Mapping[str, str]) -> Environment:
    """Return the place that ``RANK``, ``WORLD_SIZE`` and similar variables give."""
    rank, world = _rank_and_world_size(variables, "RANK", "WORLD_SIZE")
    return replace(
        read_local_rank(variables),
        rank=rank,
        world_size=world,
        alone=False,
        run=variables.get("TORCHELASTIC_RUN_ID", ""),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        launcher_has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def read_local_rank(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return a place that has only the number of this process on its host, if the variables give it."""
    local_rank = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else None
    return Environment(local_rank=local_rank, local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 0))


def _launchers(variables: Mapping[str, str]) -> list[tuple[Launcher, Environment]]:
    """Return the launchers that have started this process, and what each says.

    ``mpirun`` may use SLURM to start one process on each host, which then starts the ranks. So a SLURM step with one
    task for each host is ignored if another launcher gives a place.
    """
    found = [(launcher, place) for launcher in LAUNCHERS if (place := launcher.place(variables)) is not None]
    if found and found[0][0] is SLURM:
        tasks = tasks_of_hosts(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if len(found) > 1 and set(tasks) == {1} and not _agree(found):
            return found[1:]
        host = _number(variables, "SLURM_NODEID", 0)
        of_step = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
        found[0] = SLURM, replace(found[0][1], local_world_size=tasks[host] if host < len(tasks) else 0, run=of_step)
    return found


def _agree(found: list[tuple[Launcher, Environment]]) -> bool:
    return len({(place.rank, place.world_size) for _, place in found}) == 1


def _compare(variables: Mapping[str, str], found: list[tuple[Launcher, Environment]]) -> None:
    """Raise :class:`OptionError` if two launchers disagree, or a launcher and ``RANK`` or ``WORLD_SIZE``."""
    place = found[0][1]
    claims = [launcher.says(place) for launcher, place in found]
    by_name = {"RANK": place.rank, "WORLD_SIZE": place.world_size}
    others = [f"{name} is {variables[name]}" for name in by_name if name in variables]
    if not _agree(found) or any(_number(variables, name, value) != value for name, value in by_name.items()):
        raise OptionError(
            f"launchers disagree: {', '.join([*claims, *others])}. Start the processes with one of them, or set "
            f"{', '.join(_NEEDED)} of each"
        )


def _with_address(variables: Mapping[str, str], launcher: Launcher, place: Environment) -> Environment:
    """Add the address at which the ranks meet, if they are on several hosts or ``MASTER_ADDR`` is set."""
    if "MASTER_ADDR" in variables:
        port = _number(variables, "MASTER_PORT", _port(place.run))
        return replace(place, address=variables["MASTER_ADDR"], port=port)
    if place.is_one_host:
        return replace(place, run=place.run or _name_of_launcher(launcher, variables))
    hosts = variables.get("SLURM_STEP_NODELIST", "") if launcher is SLURM else ""
    if not hosts:
        raise OptionError(
            f"{launcher.says(place)}, but not at which address the ranks of several hosts meet: set MASTER_ADDR to the "
            "host of rank 0, on all of them"
        )
    port = _number(variables, "MASTER_PORT", _port(place.run))
    return replace(place, address=first_host(hosts), port=port, address_variable="SLURM_STEP_NODELIST")


def first_host(hosts: str) -> str:
    """Return the first name of a list of hosts as SLURM writes it, such as ``host[1-3,7],other``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def tasks_of_hosts(text: str) -> list[int]:
    """Return the number of tasks of each host, from a text as SLURM writes it, such as ``2(x3),1``."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _port(run: str) -> int:
    """Return the port for a run with a numeric name, such as 1234.0; runs with neighbouring numbers get other ports."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", run)
    return 12000 + (16 * int(numbers[1]) + int(numbers[2])) % 16384 if numbers else DEFAULT_PORT


def _name_of_launcher(launcher: Launcher, variables: Mapping[str, str]) -> str:
    """Return a name of the process that has started the ranks of this host: its process id and start time.

    It is the nearest ancestor that does not belong to this rank alone, as a shell in between does.
    """
    wanted = {f"{name}={variables[name]}".encode() for name in (launcher.rank, launcher.world_size)}
    process = os.getppid()
    with contextlib.suppress(OSError):  # there is no /proc, or the process is another user's
        while True:
            parent, *_, start = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1:20]
            if not wanted <= set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                return f"{process}-{start}"
            process = int(parent)
    return str(process)


_SIGNS = ("MASTER_ADDR", "PMIX_RANK", "PALS_RANKID", "JOB_COMPLETION_INDEX")
"""Variables that only a process among others has, whatever they say."""
_RANKS = (
    *("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "FLUX_TASK_RANK", "HOROVOD_RANK"),
    *("JSM_NAMESPACE_RANK", "PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
)
"""Numbers of a process or its host: above 0 there are others."""
_SIZES = (
    *("LOCAL_WORLD_SIZE", "NNODES", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "FLUX_JOB_SIZE", "HOROVOD_SIZE"),
    *("JSM_NAMESPACE_SIZE", "MPI_LOCALNRANKS"),
)
"""Numbers of processes or hosts: above 1 there are others. ``1:4`` is such a number, too."""
_WHOLE_RANKS = {
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
    "HOROVOD_RANK": "HOROVOD_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
    "PALS_RANKID": "",
    "JOB_COMPLETION_INDEX": "",
}
"""Variables that would do for ``RANK`` and ``WORLD_SIZE``, of launchers that no test here has run."""


def _refuse_signs_of_others(variables: Mapping[str, str]) -> None:
    """Raise :class:`OptionError` if there are other processes, but no variable gives the rank of this one."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        missing = [name for name in _NEEDED if name not in variables]
        raise OptionError(
            f"the environment has {', '.join(name for name in _NEEDED if name in variables)}, but not "
            f"{', '.join(missing)}: start the processes with torchrun, which sets all of them, or unset all of them to "
            "run alone"
        )
    if signs := _signs_of_others(variables):
        given = ", ".join(f"{name}={variables[name]}" for name in signs)
        raise OptionError(
            f"the environment has {given}, but does not say which rank of how many this process is: start it with "
            f"torchrun, srun or mpirun, which say it, or set {_what_to_set(variables)} of each process; or give "
            "session(alone=True) to train in this process alone"
        )
    _warn_of_slurm(variables)
    _warn_of_siblings()


def _signs_of_others(variables: Mapping[str, str]) -> list[str]:
    """Return the variables that show that there are other processes."""
    parts = [name for each in LAUNCHERS for name in (each.rank, each.world_size) if name != SLURM.rank]
    signs = [name for name in (*parts, *_SIGNS) if name in variables]
    signs += sorted(name for name in variables if name.startswith("PET_"))
    signs += ["SM_HOSTS"] if "," in variables.get("SM_HOSTS", "") else []  # of SageMaker: a list in JSON
    signs += [name for name in _RANKS if _is_above(variables, name, 0)]
    return signs + [name for name in _SIZES if _is_above(variables, name, 1)]


def _is_above(variables: Mapping[str, str], name: str, least: int) -> bool:
    text = variables.get(name, "")
    try:
        return int(text or least) > least
    except ValueError:
        return True


def _what_to_set(variables: Mapping[str, str]) -> str:
    """Return the variables to set, with the launcher's own ones that have the values."""
    rank, world = next(((rank, world) for rank, world in _WHOLE_RANKS.items() if rank in variables), ("", ""))
    values = {"RANK": rank, "WORLD_SIZE": world if world in variables else ""}
    *names, last = (f"{name} (to {values[name]})" if values.get(name) else name for name in _NEEDED)
    return f"{', '.join(names)} and {last}"


def _warn_of_siblings() -> None:
    """Warn if this process is one of several that ``multiprocessing`` has started: they may be meant as ranks."""
    if multiprocessing.parent_process() is None:
        return
    kind = _command(os.getpid())
    count = sum(_command(child) == kind for child in proc.children_of(os.getppid()))
    if count > 1:
        text = (
            "this process trains alone, among %d children of process %d (multiprocessing). To train as one run, start "
            "the program with `torchrun`, or set %s of each child, before its session, with MASTER_ADDR=127.0.0.1; "
            "session(alone=True) trains alone without this warning"
        )
        _log.warning(text, count, os.getppid(), _what_to_set({}))


def _command(process: int) -> bytes:
    """Return the command of a process; the same for all that ``multiprocessing`` has spawned."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        return _SPAWNED if _SPAWNED in command else command
    return b""


_SPAWNED = b"--multiprocessing-fork"


def _warn_of_slurm(variables: Mapping[str, str]) -> None:
    """Warn of a SLURM job for several processes in which this one was not started as one of them."""
    tasks = max(_number(variables, name, 1) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    if tasks > 1:
        text = "this process trains alone, in a SLURM job for %d: `srun python ...` starts all of them"
        _log.warning(text, tasks)


def _rank_and_world_size(variables: Mapping[str, str], rank_name: str, world_name: str) -> tuple[int, int]:
    rank, world = _number(variables, rank_name), _number(variables, world_name)
    if not 0 <= rank < world:
        raise OptionError(f"{rank_name} is {rank}, but {world_name} is {world}: ranks are 0 to {world - 1}")
    return rank, world


def _number(variables: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = variables.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(str(text))
    except ValueError:
        raise OptionError(f"the environment variable {name} is {text!r}, expected a whole number") from None
