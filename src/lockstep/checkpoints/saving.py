"""``save()``: writes a checkpoint, which counts only after all of it is on the disk."""

import operator
import os
import secrets
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep._base.debug import log_of
from lockstep.checkpoints import loadable
from lockstep.checkpoints.files import FileSystem, make_folders
from lockstep.checkpoints.folders import NewFolder, remove_old, remove_unfinished
from lockstep.checkpoints.layout import (
    OWN,
    Manifest,
    StoredFile,
    entry_file,
    folder_name,
    list_saved,
    rank_file,
    unfinished_name,
)
from lockstep.checkpoints.lineage import lineage_of, remember
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.same_values import check_same_values, told
from lockstep.checkpoints.state import (
    STATE_DICT,
    VALUE,
    Entry,
    HostCopies,
    Parts,
    check_named,
    entries_of,
    folder_named,
    read,
)
from lockstep.checkpoints.streams import Streams, read_streams
from lockstep.distributed.comm.groups import Group, global_ranks
from lockstep.distributed.replication.in_sync import Values, compared_in_save, group_of
from lockstep.errors import CheckpointError, OptionError


def save(
    path: str | os.PathLike[str],
    *unnamed: object,
    keep: int = 3,
    step: int | None = None,
    group: Group | None = None,
    check: bool = True,
    **state: Any,
) -> Path:
    """Save a training run, so that :func:`lockstep.resume` continues it with the same bits; call it on every rank.

    The first rank writes the state that is the same on all ranks, each name to a file of its own (such as ``model.pt``,
    which ``torch.load`` reads). Each rank writes its own state to one more file: its random numbers (Python's, NumPy's,
    PyTorch's on the CPU and the accelerators), random generators, loaders and samplers, values marked by
    :func:`lockstep.checkpoints.per_rank`, local buffers and ignored parameters of a replicated module, and the state of
    its communication hooks. Gradients are not saved: call it between steps.

    Args:
        path: The folder for the checkpoints of this run. It is made if it does not exist.
        keep: The number of checkpoints of this run to keep, the newest ones. Checkpoints of other runs stay.
        step: The step of the run; :func:`lockstep.resume` returns it.
        group: The ranks; the default group if None, this process alone if there is none.
        check: If True, first compare the parameters of replicated modules, and the numbers and the state of the
            optimizers that step them, between the ranks, as :func:`lockstep.check_in_sync` does. That reads all of it
            once. A model whose replicas have drifted apart is not saved; nor is one that is replicated over a part of
            the ranks and differs on others, since one file would have it for all: save it as ``per_rank``.
        **state: Modules (wrapped, compiled or plain), optimizers, schedulers, scalers, samplers and other objects with
            ``state_dict()`` and ``load_state_dict()``; generators; tensors, numbers, strings, and dicts, lists and
            tuples of these. Each name is the name of a file, without ``.pt``.

    Returns:
        The folder of the new checkpoint.

    A checkpoint is written under a temporary name. It is renamed after all files are on the disk (``fsync``), and a
    marker with a digest of all files is written last. If a save fails on one rank (a full disk, no permission), every
    rank raises an error. Older checkpoints stay whole then, and also if a process is killed or the machine goes down at
    any moment.

    If all ranks see one file system, there is one folder. If hosts have disks of their own, each host has a folder with
    the state that is the same on all ranks, and with the own state of its ranks.

    Raises:
        CheckpointError: The checkpoint could not be written on some rank, or could not be read back; the message has
            the rank and the reason. Or another run has written to ``path`` meanwhile.
        OutOfSyncError: Replicas have drifted apart; nothing has been written.
        AgreementError: Ranks save different names or kinds of objects, different values, or (with ``check``)
            different states of schedulers and the like, that are not marked by :func:`lockstep.checkpoints.per_rank`,
            or at different steps.
        CommunicationError: A rank does not answer. All ranks wait for the ranks that write, so the group's time-out has
            to be longer than a save takes.

    Communicates at most ten small all-gathers. A sharded optimizer takes one more, and what
    :func:`lockstep.full_state_dict` communicates.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, model=model, step=120).name
        'save-000001-step-00000120'

    Stands for: ``if rank == 0: torch.save(...)``.
    """
    check_named(unnamed, "save()")
    return Saving(folder_named(path, "save()"), FileSystem(), Ranks(group)).save(state, keep, step, check=check)


class Saving:
    """One save, on one rank.

    The number of this save is greater than ``above``, and than all numbers in the folder.
    """

    def __init__(self, path: Path, files: FileSystem, ranks: Ranks, above: int = 0) -> None:
        self._path = path
        self._files = files
        self._ranks = ranks
        self._above = above
        self._alike: dict[str, Any] = {}
        self._parts: dict[str, Parts] = {}
        self._kinds: dict[str, str] = {}
        self._gathered: list[Entry] = []
        self._streams: Streams = {}
        self._answers: list[dict[str, Any]] = []
        self._leaders: list[int] = []
        self._new: NewFolder | None = None
        self._keep = 1
        self._step: int | None = None
        self._checks = False
        self.number = 0
        """The number of this save, from :meth:`begin` on."""

    def __repr__(self) -> str:
        return f"Saving({self._path}, number {self.number}, step {self._step}, rank {self._ranks.rank})"

    def save(self, state: Mapping[str, Any], keep: int, step: int | None, *, check: bool = False) -> Path:
        """See :func:`lockstep.save`."""
        self.begin(state, keep, step, check=check)
        return self.write(self._ranks)

    def begin(
        self,
        state: Mapping[str, Any],
        keep: int,
        step: int | None,
        *,
        copies: HostCopies | None = None,
        check: bool = False,
    ) -> None:
        """Take the state for :meth:`write`; with ``copies`` a copy, so that the training may go on meanwhile.

        ``check``: compare what is to be alike on all ranks."""
        ranks, self._streams, self._keep, self._step = self._ranks, read_streams(), keep, step
        self._checks = check
        try:
            answers = ranks.together("save()", lambda: self._prepare(state))
            ranks.check_equal("save()", [answer["same"] for answer in answers])
            with ranks.in_unison():
                check_same_values(ranks.names, [answer["values"] for answer in answers])
                ranks.check_alike(*self._compared())
            self._answers = answers
            self.number = 1 + max(answer["highest"] for answer in answers)
            if ranks.rank:
                self._new = NewFolder(self._files, self._path / unfinished_name(self.run, answers[0]["id"]))
            else:
                self._remember()  # now: when it is written, another thread may look before this one goes on
            self._leaders = self._find_leaders()
            if self._gathered:
                ranks.together("save()", self._gather)
            if copies is not None:
                ranks.together("save()", lambda: self._copy(copies))
        except BaseException as error:
            self._give_up(error)
            raise

    def _copy(self, copies: HostCopies) -> None:
        """Copy the state that this rank writes; the state that is the same on all ranks only if this rank writes it."""
        if self._leaders[self._ranks.rank] != self._ranks.rank:
            self._parts = {name: Parts(None, parts.own) for name, parts in self._parts.items()}
        self._parts = copies.of(self._parts)

    def write(self, ranks: Ranks) -> Path:
        """Write the state that :meth:`begin` has taken; on another thread, with ``ranks`` that do not use the group."""
        self._ranks, leaders, new, folder = ranks, self._leaders, self._new, self.folder
        leads = leaders[ranks.rank] == ranks.rank
        assert new is not None  # begin() has made it
        try:
            written = ranks.together("save()", lambda: self._write(leaders, new))
            ranks.together("save()", lambda: new.sync(self._manifest(written, leaders) if leads else None))
            ranks.together("save()", lambda: new.finish(folder))
        except BaseException as error:
            self._give_up(error)
            raise
        log_of("checkpoints").debug("rank %d: %s is whole", ranks.rank, folder)
        if leads:
            self._clear()
        return folder

    @property
    def folder(self) -> Path:
        """The folder that the checkpoint has, or will have."""
        return self._path / folder_name(self.number, self._step)

    @property
    def run(self) -> str:
        """The run that saves, as all ranks know it after :meth:`begin`."""
        return str(self._answers[0]["run"])

    # ------------------------------------------------------------- what is otherwise for a folder in memory

    def _compared(self) -> tuple[Values, list[Optimizer]]:
        """Return what the ranks compare before anything is written."""
        return compared_in_save(self._alike) if self._checks else ([], [])

    def _own_run(self) -> str:
        return lineage_of(self._path).run

    def _remember(self) -> None:
        remember(self._path, self.run, self.number)

    def _clear(self) -> None:
        """Remove old checkpoints; this one is whole on every rank."""
        for why in remove_old(self._files, self._path, self.run, self.number, self._keep):
            warnings.warn(f"{self._path}: an old checkpoint could not be removed: {why}", stacklevel=5)

    # --------------------------------------------------------------------------------------------- steps

    def _prepare(self, state: Mapping[str, Any]) -> dict[str, Any]:
        keep, step = self._keep, self._step
        if operator.index(keep) < 1 or (step is not None and operator.index(step) < 0):
            raise OptionError(f"keep={keep} and step={step}: at least one checkpoint is kept, and steps count from 0")
        entries = entries_of(state)
        self._kinds = {entry.name: entry.kind for entry in entries}
        self._alike = {entry.name: entry.target for entry in entries if not (entry.is_own or entry.is_gathered)}
        self._parts = {entry.name: read(entry) for entry in entries if not entry.is_gathered}
        self._gathered = [entry for entry in entries if entry.is_gathered]
        self._check_loadable()
        same = {"keep": keep, "step": step} | {f"what is saved as {name!r}": kind for name, kind in self._kinds.items()}
        layouts = [f"{name} {each.dtype} {tuple(each.shape)}" for name, each in self._compared()[0]]
        same["what is replicated, which is saved once for all ranks"] = told(layouts)
        for name, target in [(each.name, each.target) for each in self._gathered if self._checks]:
            own = f"lockstep.checkpoints.per_rank(lockstep.full_state_dict({name}, all_ranks=True))"
            group: Any = group_of([], [target])
            ranks = "this process" if group is None else str(list(global_ranks(group)))
            same[f"the ranks over which {name} is sharded, which is saved once for all (else save {own})"] = ranks
        values = {
            name: told(self._parts[name].shared) for name, each in self._alike.items() if self._is_told(name, each)
        }
        answer = {"same": same, "values": values, "host": self._ranks.host}
        if not self._ranks.rank:
            make_folders(self._files, self._path)
            run, id = self._own_run(), secrets.token_hex(8)
            folder = self._path / unfinished_name(run, id)
            remove_unfinished(self._files, self._path, run, folder)
            self._new = NewFolder(self._files, folder)
            self._files.make_folder(folder)
            answer |= {"run": run, "id": id}
        saved = max((each.number for each in list_saved(self._path)), default=0)
        return answer | {"highest": max(self._above, saved)}

    def _is_told(self, name: str, target: Any) -> bool:
        """Return True if a save compares the whole state of an object: not of modules and optimizers, which may be
        large, and of which :meth:`Ranks.check_alike` compares what is replicated, nor of a sampler that sees to it."""
        compared = self._checks and not (isinstance(target, Optimizer) or getattr(target, "same_on_all_ranks", False))
        return self._ranks.size > 1 and self._kinds[name] in ((VALUE, STATE_DICT) if compared else (VALUE,))

    def _gather(self) -> None:
        """Gather the state that the ranks have parts of, on the ranks that write the state that is the same on all."""
        keeps = self._leaders[self._ranks.rank] == self._ranks.rank
        for entry in self._gathered:
            self._parts[entry.name] = Parts(entry.target.gathered_state_dict(keeps), {})
        self._check_loadable()

    def _check_loadable(self) -> None:
        found = []
        for name, parts in self._parts.items():
            if self._ranks.rank == 0:
                found += loadable.problems(parts.shared, name, whole=True)
            for part, value in parts.own.items():
                what = name if part == "state" else f"{name}, {part}"
                found += loadable.problems(value, what, whole=False)
        if found:
            raise CheckpointError(f"{'; '.join(found)}. {loadable.advice(found)}")

    def _find_leaders(self) -> list[int]:
        """Return, for each rank, the rank that writes the common files on its file system.

        If a rank sees the folder that the first rank began, that is the first rank; else it is the first rank of its
        host.
        """
        sees = self._new is not None and self._new.path.is_dir()
        answers = self._ranks.tell([sees, self._ranks.host], "who sees the first rank's folder")
        first = {host: rank for rank, (sees, host) in reversed(list(enumerate(answers))) if not sees}
        return [0 if sees else first[host] for sees, host in answers]

    def _write(self, leaders: list[int], new: NewFolder) -> dict[str, Any]:
        """Write this rank's files, which stay open; return their entries in the manifest."""
        rank = self._ranks.rank
        if leaders[rank] != 0:  # on another file system than the first rank's
            remove_unfinished(self._files, self._path, self.run, new.path)
            make_folders(self._files, new.path)
        values: dict[str, Any] = {}
        if leaders[rank] == rank:
            shared = {name: kind for name, kind in self._kinds.items() if not kind.endswith(OWN)}
            values = {entry_file(name): self._parts[name].shared for name in shared}
        own = {name: parts.own for name, parts in self._parts.items() if parts.own}
        values[rank_file(rank)] = {"rank": rank, "streams": self._streams, "own": own}
        return {"files": {name: asdict(self._write_file(new.create(name), value)) for name, value in values.items()}}

    def _write_file(self, file: Any, value: Any) -> StoredFile:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise (file.error or error) from error
        return StoredFile(file.bytes, file.sha256, self._ranks.rank, self._ranks.host)

    def _manifest(self, written: list[dict[str, Any]], leaders: list[int]) -> bytes:
        first, own = self._answers[0], leaders[self._ranks.rank]
        # The files in the folder of this rank's file system.
        in_folder = [each["files"] for each, leader in zip(written, leaders, strict=True) if leader == own]
        manifest = Manifest(
            number=self.number,
            step=self._step,
            id=first["id"],
            run=first["run"],
            world_size=self._ranks.size,
            hosts=[answer["host"] for answer in self._answers],
            entries=self._kinds,
            files={name: StoredFile(**fields) for files in in_folder for name, fields in files.items()},
            versions={"torch": torch.__version__},
            time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        )
        return manifest.to_bytes()

    def _give_up(self, error: BaseException) -> None:
        """Remove an unfinished folder, and a finished one if the save failed on some rank.

        If another rank does not answer any more, a finished folder stays: the checkpoint may be complete everywhere.
        """
        if self._new is None:
            return
        self._new.close()
        if not self._new.is_renamed or isinstance(error, CheckpointError):
            self._new.discard()
