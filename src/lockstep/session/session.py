"""``session()``: starts and ends data-parallel training in this process."""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from lockstep import loop
from lockstep._base.debug import leave_out_own_frames
from lockstep._base.seeds import derive_seed
from lockstep._base.wrapper import naming_options
from lockstep.checkpoints import Resumed
from lockstep.checkpoints.state import check_named, folder_named
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import leave_companions, state_of
from lockstep.distributed.comm.groups import Group
from lockstep.distributed.reduction.report.decisions import Decisions
from lockstep.distributed.replication.training_alone import training_alone
from lockstep.errors import LockstepError, OptionError
from lockstep.failures.channel import LINK_SECONDS
from lockstep.failures.progress import PHASES_OF_A_STEP, Phase, Progress
from lockstep.failures.stacks import answering
from lockstep.loop.stop_and_skip import groups_of
from lockstep.phases import Phases
from lockstep.session.environment import Environment, read_environment
from lockstep.session.run_state import RunState
from lockstep.session.start import SessionOptions, join, name_of_run, place_in_group
from lockstep.session.step_counter import StepCounter
from lockstep.session.stop_requests import STOP_SIGNALS, StopRequests, known_signals
from lockstep.session.values_at_end import ValuesAtEnd
from lockstep.session.watch import is_orderly

T = TypeVar("T")


_ELSEWHERE = {
    "all_gather": "torch.distributed.all_gather_object(list, object, group=run.group)",
    "all_reduce": "torch.distributed.all_reduce(tensor, group=run.group), lockstep.mean() or lockstep.loop.total()",
    "autocast": "torch.autocast(run.device.type)",
    "backward": "loss.backward()",
    "barrier": "torch.distributed.barrier(run.group)",
    "broadcast": "torch.distributed.broadcast(tensor, 0, group=run.group)",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), limit), after backward()",
    "gather": "torch.distributed.gather_object(object, list, group=run.group)",
    "is_main_process": "run.is_main",
    "join": "run.batches(loader), which gives equally many batches to all ranks",
    "local_world_size": "int(os.environ['LOCAL_WORLD_SIZE']), which torchrun sets",
    "log": "your logger under `if run.is_main:`, with values of lockstep.mean()",
    "mean": "lockstep.mean()",
    "prepare": "lockstep.replicate(model) and run.batches(loader); the optimizer stays as it is",
    "print": "print() under `if run.is_main:`",
    "replicate": "lockstep.replicate(module)",
    "wait_for_everyone": "torch.distributed.barrier(run.group)",
}
"""What users of other libraries look for in a session, and where it is."""


class CountedBatches(loop.Batches[T]):
    """The iterable that ``run.batches()`` returns. Its length, if it has one, is the same on all ranks."""

    def __init__(
        self,
        loader: Iterable[T],
        groups: Sequence[Group],
        padding: T | None,
        progress: Progress,
        check: Callable[[], object],
    ) -> None:
        super().__init__(loader, groups, padding)
        self._progress = progress
        self._check = check

    def __iter__(self) -> Iterator[T]:
        progress, trains = self._progress, torch.is_grad_enabled()
        before, batches = progress.current_phase, super().__iter__()
        if before in PHASES_OF_A_STEP:  # left by an evaluation, which ends with a forward
            before = Phase.TRAINING
        while True:
            self._check()
            if before == Phase.TRAINING:
                progress.current_phase = Phase.DATA
            try:
                batch = next(batches)
            except StopIteration:
                progress.current_phase = before
                return
            if trains:
                progress.begin_batch()
            progress.current_phase = before
            yield batch


_NO_ROWS = (
    "This rank has run out of batches, and repeats its last one. gather_rows() gives it none of the rows then: take "
    "its own rows from the result, rows[own]"
)


class Session:
    """The value of ``with`` :func:`session`: the rank, device and group of this process, and functions for training."""

    def __init__(self, options: SessionOptions, environment: Environment) -> None:
        self.rank: int = environment.rank
        """This process's number, from 0."""
        self.world_size: int = environment.world_size
        """The number of processes that take part."""
        self.progress = Progress(name_of_run(environment), self.rank, self.world_size)
        """The progress of this rank, which other processes can read."""
        self.generator: torch.Generator = generator(options.seed, f"generator of rank {self.rank}")
        """A generator on the CPU whose random numbers differ by rank."""
        self.shared_generator: torch.Generator = generator(options.seed, "shared")
        """A generator on the CPU whose random numbers are the same on all ranks, as long as all draw the same."""
        seed_this_rank(options.seed, self.rank)
        with contextlib.ExitStack() as resources:
            resources.callback(self.progress.close)
            resources.enter_context(answering())
            joined = join(options, environment, self.progress, resources)
        self.local_rank: int = joined.local_rank
        """This process's number on its host, from 0."""
        self.device: torch.device = joined.device
        """The device of this rank's model and batches."""
        self.backend: str = joined.backend
        """The name of the group's backend."""
        self._watch = joined.watch
        self._keeps_group = environment.group_exists
        self.group: Group = dist.group.WORLD
        """The process group, which is the default one."""
        self._requests = StopRequests(options.time_limit, f"rank {self.rank}", options.stop_signals)
        self._decisions: Decisions | None = None
        self._state = RunState(self.group, self._watch.channel, options.timeout)
        self._collectives = Collectives(self.group, Phases())
        channel = self._watch.channel
        self._values = None if channel is None else ValuesAtEnd(channel, self._collectives)
        if self.world_size > 1:
            training_alone().session_begins(self._collectives)
        self._steps = StepCounter(self.progress, self._watch.enter)
        self.progress.current_phase = Phase.TRAINING
        self._watch.end_with_the_program(self.end)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}, {self.backend}"

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints, and writes files, for all ranks."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """The number of batches that this rank has begun in loops over :meth:`batches`; without such loops, the number
        of steps that its optimizer has made.

        A resumed run counts on from the step of its checkpoint. Of several optimizers the one that has made most steps
        counts, and one that is used later begins with the step at which the run is then. Optimizers are those of
        ``torch.optim``, and classes derived from ``torch.optim.Optimizer``, that have a parameter of a replicated
        module (if there is no such module: all). A step that ``GradScaler`` leaves out does not count, because it is
        not called.
        """
        return self.progress.step

    def check(self) -> None:
        """Raise :class:`~lockstep.errors.PeerFailure` if another rank has failed; nothing is communicated."""
        self._watch.check()

    def batches(self, loader: Iterable[T], *modules: torch.nn.Module, padding: T | None = None) -> CountedBatches[T]:
        """Return :func:`lockstep.batches` over the session's group: equally many on all ranks, counted by :attr:`step`.

        With ``modules``, the batches are over the group of these modules. An evaluation under ``torch.no_grad()`` is
        neither padded nor counted. Raises :class:`~lockstep.errors.PeerFailure` if another rank has failed.

        For type checkers a batch has the type that the loader's iterator yields. For PyTorch's ``DataLoader`` that is
        ``Any``: annotate the loader as ``Iterable[tuple[Tensor, Tensor]]``, for example, to get a type.
        """
        groups = groups_of(modules, None if modules else self.group, "batches")
        return CountedBatches(loader, groups, padding, self.progress, self.check)

    def agree(self, flag: object) -> bool:
        """Return True if the flag is true on any rank: :func:`lockstep.loop.agree` over the session's group."""
        return loop.agree(flag, self.group)

    @overload
    def shard(  # type: ignore[overload-overlap]
        self, dataset: "IterableDataset[T] | Iterator[T]"
    ) -> "IterableDataset[T]": ...
    @overload
    def shard(self, dataset: "Dataset[T]") -> "Subset[T]": ...
    def shard(self, dataset: Any) -> Any:
        """Return this rank's part of a data set or stream: :func:`lockstep.loop.shard` over the session's group."""
        return loop.shard(dataset, self.group)

    @property
    def should_stop(self) -> bool:
        """True if any rank has been asked to stop, by SIGTERM, SIGINT or ``time_limit``; the same on all ranks.

        Requests travel with other messages between the ranks: in ``backward()``, at the beginning of a loop over
        :meth:`batches` (also in an evaluation), in :func:`lockstep.mean`, :func:`lockstep.loop.total` and
        :meth:`agree`. The session handles the signals once the program has read ``should_stop`` for the first time;
        before that they have their usual effect. A second SIGINT raises ``KeyboardInterrupt``.
        """
        if self._decisions is None:
            self._requests.take_over()
            self._decisions = loop.stop_when(lambda: self._requests.requested, self.group)
        return self._decisions.should_stop

    def skip_batch(self, *modules: torch.nn.Module) -> None:
        """Skip this batch on all ranks: :func:`lockstep.loop.skip_batch` over the session's group."""
        loop.skip_batch(*modules, group=None if modules else self.group)

    def skip_on(self, *errors: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        """Skip a batch that raises one of ``errors``: :func:`lockstep.loop.skip_on` over the session's group."""
        return loop.skip_on(*errors, group=self.group)

    @property
    def skipped(self) -> bool:
        """True if any rank has skipped this batch, so that all have: :func:`lockstep.loop.skipped`."""
        return loop.skipped()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Name this rank's activity inside the block, such as ``evaluation``; errors on other ranks show the name."""
        return self.progress.phase(name)

    def save(
        self,
        path: "str | os.PathLike[str]",
        *unnamed: object,
        keep: int = 3,
        step: int | None = None,
        wait: bool = True,
        check: bool = True,
        **state: Any,
    ) -> Path:
        """Call :func:`lockstep.save` with the session's group, its generators, and :attr:`step` if none is given.

        With ``wait=False`` the training goes on as soon as the state is copied to memory of the CPU, and a thread
        writes the checkpoint behind the training. The rank that writes keeps that memory, as much as the state takes,
        for its next saves, until the session ends. As always, the checkpoint counts once it is whole. One save is in
        flight at a time: a second one waits for it. If the save fails, the next :meth:`save` or :meth:`resume`, or the
        end of the session, raises its error on every rank. A session that ends without an error, or by
        ``sys.exit(0)``, waits for the save.

        Behind the training, each rank communicates some small values through the store at which the ranks have met.
        Returns the folder of the checkpoint, which may not exist yet.
        """
        check_named(unnamed, "save()")
        step = self.step if step is None else step
        with self.phase(Phase.CHECKPOINT):
            return self._state.save(
                folder_named(path, "save()"), keep, step, self._generators() | state, wait=wait, check=check
            )

    def snapshot(
        self,
        path: "str | os.PathLike[str]",
        *unnamed: object,
        every: int | None = None,
        at_most: float = 0.02,
        step: int | None = None,
        **state: Any,
    ) -> bool:
        """Copy the state into each host's memory, where it outlives the ranks; :meth:`resume` continues from there.

        Call it on every rank after each step. If the launcher (``torchrun --max-restarts``, Ray, SLURM, Kubernetes)
        starts killed ranks again, they continue from the newest snapshot that is whole on all hosts, or from the newest
        checkpoint on the disk if that is newer, or if a new host has no snapshot.

        Args:
            path: The folder that is given to :meth:`save` and :meth:`resume`.
            every: Take a snapshot at every N-th call. If None, take one as often as ``at_most`` allows.
            at_most: The share of the time that snapshots may take: 0.02 means 2 %. The first one comes after the
                second call, which ends the first step that can be timed. After each snapshot the ranks agree on the
                call at which the next one is due.
            step: The step of the run; :attr:`step` if None.
            **state: As for :meth:`save`.

        Returns:
            True if this call has taken a snapshot.

        A snapshot has the layout of a checkpoint. It lies in ``/dev/shm``, in a folder that only this user can read.
        The last snapshot is removed when the next one is whole on every host, so each host needs memory for two copies
        of the state, beside the memory of the ranks; the first snapshot fails if there is less. The snapshots are
        removed when the session ends without an error, unless the run was asked to stop (:attr:`should_stop`) and has
        not saved since.

        Raises:
            CheckpointError: The snapshot could not be taken on some rank, or there is no ``/dev/shm``.
            AgreementError: As :meth:`save`.
            OutOfSyncError: A module that is replicated over a part of the ranks differs on others.

        A call that takes a snapshot communicates what :func:`lockstep.save` does; other calls communicate nothing.
        """
        check_named(unnamed, "snapshot()")
        path = folder_named(path, "snapshot()")
        if not self._state.snapshot_is_due(path, every, at_most):
            return False
        step = self.step if step is None else step
        with self.phase(Phase.CHECKPOINT):
            self._state.snapshot(path, every, at_most, step, self._generators() | state)
        return True

    def resume(
        self,
        path: "str | os.PathLike[str]",
        *unnamed: object,
        **state: Any,
    ) -> Resumed | None:
        """Restore the newest state that :meth:`save` or :meth:`snapshot` has kept; :attr:`step` continues, too.

        This is :func:`lockstep.resume`, which here also looks into the memory of all hosts. It takes the newest state
        that is whole on every rank, in the memory of its host or on the disk.
        """
        check_named(unnamed, "resume()")
        if gone := {"give_up_after", "skip_poison"} & state.keys():
            raise OptionError(
                f"resume() has no option {min(gone)}. The launcher counts starts (torchrun --max-restarts 3), and the "
                "log of each ends with the rank that failed, its step and its error; samples that fail each time are "
                "left out by the data set"
            )
        with self.phase(Phase.CHECKPOINT):
            found = self._state.resume(folder_named(path, "resume()"), self._generators() | state)
        if found is not None and found.step is not None:
            self._steps.go_on_from(found.step)
        return found

    def _generators(self) -> dict[str, Any]:
        return {"session_generator": self.generator, "session_shared_generator": self.shared_generator}

    def end(self, error: BaseException | None) -> None:
        """End the session: take everything down, in order."""
        self._end_with(error, None)

    def _end_block(self, error: BaseException | None) -> None:
        """End the session with its block; if that has ended without an error on all ranks, compare replicas."""
        self._end_with(error, self._values if error is None else None)

    def _end_with(self, error: BaseException | None, values: ValuesAtEnd | None) -> None:
        try:
            self._state.end(None if is_orderly(error) else error)
        except BaseException as problem:  # of a save behind the training, which every rank has; or Ctrl-C
            self._end(problem, None)
            raise
        self._end(error, values)

    def _end(self, error: BaseException | None, values: ValuesAtEnd | None) -> None:
        if error is None:
            self.progress.current_phase = Phase.TEAR_DOWN
        elif state_of(self.group).has_no_rows and not isinstance(error, LockstepError):
            error.add_note(_NO_ROWS)
        stopped = self._decisions is not None and self._decisions.should_stop
        # Before the handlers are restored: the launcher ends this rank as soon as it has noticed one that failed.
        last_words = self._watch.last_words(error, self._requests.former(signal.SIGTERM))
        self._requests.end()
        self._steps.close()
        if self.world_size > 1:
            training_alone().session_ends(self._collectives, warns=error is None)
        try:
            self._watch.end(error, self._release, values, last_words)
        except BaseException:
            self._state.close(remove=False)
            raise
        channel = self._watch.channel
        others_failed = channel is not None and channel.knows_failure  # as this rank left them: they may begin again
        self._state.close(remove=is_orderly(error) and not others_failed, unless_newer=stopped)

    if not TYPE_CHECKING:  # type checkers know what a session has

        def __getattr__(self, name: str) -> NoReturn:
            hint = f"; write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"the session has no attribute {name!r}{hint}")

    def _release(self) -> None:
        self._decisions = None
        if dist.is_initialized() and not self._keeps_group and self._watch.may_destroy_groups():
            state_of(self.group).session_ended = True
            dist.destroy_process_group()
            leave_companions()


class session:
    """Start and end data-parallel training in this process: a context manager, whose value is a :class:`Session`.

    The session reads this process's rank from the environment that ``torchrun``, SLURM's ``srun`` or ``mpirun`` has
    set. Without a launcher it trains with one rank, and opens no sockets. It makes the default process group, seeds the
    random generators, and watches the ranks: if one of them fails, all others raise
    :class:`~lockstep.errors.PeerFailure`, which has that rank, its step and phase, and its traceback. The end of the
    block undoes all of this, also after an error.

    If the block ends without an error on all ranks, the session compares the parameters of the modules that are
    replicated over all of its ranks, and the numbers and the state of the optimizers that have stepped them, as
    :func:`lockstep.save` does. That reads all of it once.

    If Ray, Lightning or the program has made the default process group already, the session uses it, and leaves it as
    it is. Then a ``backend`` or a ``device`` that differs from the group's is an error. The group keeps its time-out
    and interfaces; ``timeout`` is then the limit for the start and the end of the session only.

    Args:
        backend: The backend of the process group. If None: ``shm`` for ranks on the CPU (on Linux; with ``gloo``
            between hosts), ``nccl`` for CUDA (with ``gloo`` for tensors on the CPU), else ``gloo``.
        device: The device of this rank. If None: the accelerator with this rank's number on its host, or the CPU on a
            host without accelerators. More ranks than accelerators on a host are an error on all ranks of the host;
            ``"cpu"`` trains on the CPU instead.
        timeout: Seconds that ranks wait for each other at the start, in one collective, and at the end.
        seed: The seed of all random generators. The generators of PyTorch, Python and NumPy are seeded **differently on
            each rank**, so that dropout and augmentation differ. Use ``run.shared_generator`` for random numbers that
            are the same on all ranks, such as an order of samples that the ranks split. (The initial weights may
            differ: :func:`lockstep.replicate` gives rank 0's weights to all ranks.)
        stall_factor: A rank fails if it keeps another rank waiting for this many times the median step. Then all ranks
            raise an error that shows where the rank is. None: no such limit. During the start, the first steps,
            compilation and ``run.phase()`` the limit is nine tenths of ``timeout``. It is never more than that.
        stall_minimum: The smallest value of that limit, in seconds.
        time_limit: Seconds from the start after which ``run.should_stop`` is true. None: no limit.
        link_timeout: Seconds, at least 1. If nothing arrives from another host for this time, not even its system's
            answer to a probe, the ranks of that host have failed. After a pause of the network that is two seconds
            shorter (which it takes to try the host once more) training goes on.
        alone: If True, train with one rank, and ignore the environment.
        stop_signals: The signals that make ``run.should_stop`` true. Schedulers can send SIGUSR1 or SIGUSR2 some time
            before the end of a job (``sbatch --signal=USR1@120``).

    Communicates what a new process group takes, and what :func:`lockstep.watch` lists; at the end a digest of each
    module and optimizer, outside of the group.

    Raises :class:`~lockstep.errors.OptionError` for an environment that contradicts itself,
    :class:`~lockstep.errors.DeviceError` for a device that this host does not have,
    :class:`~lockstep.errors.CommunicationError` if a rank does not join within the time-out, and
    :class:`~lockstep.errors.PeerFailure` if a rank joins and fails. At its end raises
    :class:`~lockstep.errors.OutOfSyncError`, on every rank, if replicas have drifted apart.

    Example:
        >>> import lockstep
        >>> with lockstep.session() as run:
        ...     model = lockstep.replicate(torch.nn.Linear(2, 2).to(run.device))
        ...     model(torch.ones(4, 2, device=run.device)).sum().backward()
        >>> run.world_size, run.is_main
        (1, True)

    In PyTorch: ``init_process_group()``, ``destroy_process_group()``, ``torch.accelerator.set_device_index()``, reading
    ``RANK`` and its like, and seeding.
    """

    @naming_options
    def __init__(
        self,
        backend: str | None = None,
        device: str | torch.device | None = None,
        timeout: float = 600.0,
        seed: int = 0,
        stall_factor: float | None = 20.0,
        stall_minimum: float = 60.0,
        time_limit: float | None = None,
        link_timeout: float = LINK_SECONDS,
        alone: bool = False,
        stop_signals: Iterable[int] = STOP_SIGNALS,
    ) -> None:
        self._options = SessionOptions(
            backend,
            device,
            timeout,
            seed,
            stall_factor,
            stall_minimum,
            time_limit,
            link_timeout,
            known_signals(stop_signals),
        )
        self._alone = alone
        self._session: Session | None = None

    def __enter__(self) -> Session:
        if self._session is not None:
            raise OptionError("this session has begun already: make another one")
        self._session = Session(self._options, self._place())
        return self._session

    if not TYPE_CHECKING:  # type checkers know that the attributes of a run are not here

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"session() has no attribute {name!r}: a run begins with `with lockstep.session() as run:`; ask `run`"
            )

    def _place(self) -> Environment:
        if not (dist.is_available() and dist.is_initialized()):
            return Environment() if self._alone else read_environment()
        place = place_in_group()
        if self._alone and place.world_size > 1:
            raise OptionError(
                f"session(alone=True), but there is a process group of {place.world_size} ranks already: end it before"
            )
        return place

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._session is not None
        try:
            self._session._end_block(error)
        except BaseException as told:
            leave_out_own_frames(told)
            raise
        leave_out_own_frames(error)


def seed_this_rank(seed: int, rank: int) -> None:
    """Seed the generators of PyTorch, Python and, if it is imported, NumPy, differently on each rank.

    So augmentation and dropout differ between ranks.
    """
    own = derive_seed("session", seed, f"rank {rank}")
    torch.manual_seed(own)  # of the accelerators, too
    random.seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a new random generator on the CPU, seeded for its purpose."""
    return torch.Generator().manual_seed(derive_seed("session", seed, stream))
