"""``resume()``: finds the newest checkpoint that is whole on every rank, and restores the run from it."""

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep._base.debug import log_of
from lockstep._base.run_all import RunAll
from lockstep._base.store import all_in_background
from lockstep.checkpoints.folders import discard
from lockstep.checkpoints.layout import (
    OWN,
    Manifest,
    TornError,
    check_contents,
    entry_file,
    list_saved,
    rank_file,
    read_manifest,
)
from lockstep.checkpoints.lineage import remember
from lockstep.checkpoints.memory import MemoryFiles
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.state import (
    STATE_DICT,
    VALUE,
    Entry,
    Parts,
    check_named,
    check_target,
    common_parts,
    copy_of,
    entries_of,
    folder_named,
    put_back,
    restore_training,
)
from lockstep.checkpoints.streams import Streams, read_streams, set_streams
from lockstep.distributed.comm.groups import Group
from lockstep.errors import CheckpointError

DISK, MEMORY = "disk", "memory"
_ABSENT = {
    DISK: "it is not on this host's disk: save to a disk that all hosts see, or start the ranks on the hosts on which "
    "they have saved",
    MEMORY: "it is not in this host's memory",
}
"""Why a rank lacks a checkpoint that others have."""
_DIGESTS = 4
"""Number of threads that compute digests while files are loaded, from the same pages in memory."""


@dataclass(frozen=True)
class Resumed:
    """The point from which a run continues."""

    step: int | None
    """The step that was given to :func:`lockstep.save`."""
    folder: Path
    """The folder of the checkpoint."""
    world_size: int
    """Number of ranks that have saved it."""
    values: dict[str, Any] = field(default_factory=dict)
    """The plain values that were saved under names not given to :func:`lockstep.resume`; tensors are on the CPU."""


def resume(path: str | os.PathLike[str], *unnamed: object, group: Group | None = None, **state: Any) -> Resumed | None:
    """Continue the run that :func:`lockstep.save` has saved; call it on every rank, before the first step.

    All ranks take the newest checkpoint that is complete on every rank. A warning tells for each newer one what it
    lacks. Then every object is as it was at the save, and so are the random numbers: from there the run computes the
    same bits as a run that was never stopped. Hosts with disks of their own have to have the ranks that they had when
    it was saved: a new host with an empty disk has nothing to resume from.

    Args:
        path: The folder that was given to :func:`lockstep.save`.
        group: The ranks; the default group if None, this process alone if there is none.
        **state: The objects to load into, with the names of :func:`lockstep.save`: objects with ``load_state_dict()``,
            generators, and dicts, lists and tensors, which are changed in place. Call :func:`lockstep.replicate` on
            modules first. Other saved names are not loaded, except for plain values, which are in
            :attr:`lockstep.checkpoints.Resumed.values`.

    Returns:
        The point from which the run continues, or None for a new run: nothing was saved there.

    If the number of ranks has changed since the save, only the state that is the same on all ranks is loaded. Then
    random numbers go on as they are, and local buffers get the first rank's values. A warning names the state that is
    not loaded.

    It reads the disk alone: snapshots in the memory of hosts, which may be newer, are for a session's
    ``run.resume()``.

    All files are read by ``torch.load(weights_only=True)``, so no code of a checkpoint is run.

    Raises:
        CheckpointError: There are checkpoints, but none can be used: they are torn on some rank, or have other names or
            kinds of objects, or some object does not accept its state. Then all objects are as they were, on every
            rank, except for loaders, which each rank has for itself.
        AgreementError: Ranks give different names.
        CommunicationError: A rank does not answer.

    Communicates at most seven small all-gathers, and one more for each checkpoint that turns out to be torn when it is
    read. Needs memory for the loaded state and for a copy of the objects' former state.

    Example:
        >>> import tempfile, torch, lockstep
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert resume(folder, model=model) is None
        ...     folder_of_step = lockstep.save(folder, model=model, history=[0.5], step=120)
        ...     found = resume(folder, model=model)
        >>> found.step, found.values
        (120, {'history': [0.5]})

    Stands for: ``torch.load`` and a ``load_state_dict`` for each object, from a file that may be incomplete.
    """
    check_named(unnamed, "resume()")
    return Resuming(folder_named(path, "resume()"), Ranks(group)).resume(state)


class Resuming:
    """One resume, on one rank: from a folder of checkpoints, and from the snapshots in ``memory`` if it is given.

    Checkpoints have names such as ``disk/save-000001`` or ``memory/save-000002``. Afterwards ``number`` is the number
    of the checkpoint that was taken, 0 without one.
    """

    def __init__(self, path: Path, ranks: Ranks, memory: Path | None = None) -> None:
        self._path = path
        self._ranks = ranks
        self._roots = {DISK: path} if memory is None else {DISK: path, MEMORY: memory}
        self.number = 0
        self.in_memory = False
        self._whole: dict[str, Manifest] = {}
        self._entries: list[Entry] = []
        self._own: dict[str, Any] = {}
        self._loaded_from = Path()
        self._parts: dict[str, Parts] = {}
        self._before: list[tuple[Entry, Parts]] = []
        self._streams_before: Streams | None = None

    def __repr__(self) -> str:
        return f"Resuming({self._path}, number {self.number}, rank {self._ranks.rank}, whole: {[*self._whole]})"

    def resume(self, state: Mapping[str, Any]) -> Resumed | None:
        """See :func:`lockstep.resume`."""
        ranks = self._ranks
        answers = ranks.together("resume()", lambda: self._look(state))
        ranks.check_equal("resume()", [{"the names to be filled": answer["names"]} for answer in answers])
        name, torn = self._choose(answers)
        if name is None and any(answer["finished"] for answer in answers):
            with ranks.in_unison():
                raise CheckpointError(
                    f"{self._path}: there are checkpoints, and none is whole on every rank: {'; '.join(torn)}. Put "
                    "back what is missing, or start a new run in another folder"
                )
        if name is not None:
            self._fill()
            manifest = self._whole[name]
            self.number = manifest.number
            self.in_memory = name.startswith(MEMORY)
            if ranks.rank == 0:
                remember(self._path, manifest.run, max((each.number for each in list_saved(self._path)), default=0))
                self._warn_of_own_parts(manifest)
        log_of("checkpoints").debug("rank %d: resumes from %s", ranks.rank, "none" if name is None else name)
        if ranks.rank == 0:
            for text in torn:
                warnings.warn(f"{self._path}: skipped {text}", stacklevel=3)
        return None if name is None else self._resumed(name)

    # ------------------------------------------------------------------------------------- choosing

    def _look(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoints that this rank sees, with the manifests of those that are complete."""
        self._entries = entries_of(state)
        saved, torn = [], {}
        for root, path in self._roots.items():
            for each in list_saved(path):
                name = f"{root}/{each.folder.name}"
                try:
                    manifest = self._whole[name] = read_manifest(each.folder)
                except TornError as error:
                    if root == MEMORY:  # a process was killed there
                        discard(MemoryFiles(), each.folder)
                        continue
                    torn[name] = str(error)
                else:
                    if self._own_file(manifest) is None:
                        torn[name] = self._why_not_own(manifest)
                saved.append([each.number, name])
        return {
            "names": [entry.name for entry in self._entries],
            "host": self._ranks.host,
            "places": {root: [self._ranks.host, str(path.resolve())] for root, path in self._roots.items()},
            "saved": saved,
            "finished": any(each.is_finished for each in list_saved(self._path)),
            "ids": {name: manifest.id for name, manifest in self._whole.items()},
            "torn": torn,
        }

    def _why_not_own(self, manifest: Manifest) -> str:
        rank = self._ranks.rank
        name, host = self._ranks.names[rank], manifest.hosts[min(rank, manifest.world_size - 1)]
        return (
            f"{rank_file(rank)} is not here, since rank {name} has saved it on host {host}, to a disk of its own: "
            "start that rank there, or save to a disk that all hosts see"
        )

    def _folder(self, name: str) -> Path:
        root, _, folder = name.partition("/")
        return self._roots[root] / folder

    def _choose(self, answers: Sequence[dict[str, Any]]) -> tuple[str | None, list[str]]:
        """Load the newest checkpoint that is whole on every rank; also return why newer ones are not."""
        ranks, torn = self._ranks, list[str]()
        saved = {(number, name) for answer in answers for number, name in answer["saved"]}
        for _, name in sorted(saved, reverse=True):
            reasons = self._reasons(name, answers)
            if not any(reasons):
                places = [answer["places"][name.partition("/")[0]] for answer in answers]
                # The first rank of each place compares the digests of what is the same on all ranks.
                compares = places.index(places[ranks.rank]) == ranks.rank
                reasons = ranks.together("resume()", partial(self._load, name, compares))
            if not any(reasons):
                return name, torn
            hosts = [answer["host"] for answer in answers]
            torn.append(f"{name.removeprefix(DISK + '/')}: {self._explain(reasons, hosts)}")
        return None, torn

    def _reasons(self, name: str, answers: Sequence[dict[str, Any]]) -> list[str]:
        """Return for each rank why a checkpoint cannot be used, "" if it can."""
        absent = _ABSENT[name.partition("/")[0]]
        reasons = [answer["torn"].get(name, "" if name in answer["ids"] else absent) for answer in answers]
        ids = {answer["ids"][name] for answer in answers if name in answer["ids"]}
        if any(reasons) or len(ids) == 1:
            return reasons
        return [f"it is the one with id {answer['ids'].get(name)}, others have another" for answer in answers]

    def _explain(self, reasons: Sequence[str], hosts: Sequence[str]) -> str:
        if len(set(reasons)) == 1:
            return reasons[0]
        places = zip(self._ranks.names, hosts, reasons, strict=True)
        return ", and ".join(f"rank {rank} (host {host}): {reason}" for rank, host, reason in places if reason)

    # -------------------------------------------------------------------------------------- loading

    def _load(self, name: str, compares: bool) -> str:
        """Read all files into memory; return why the checkpoint is not complete, "" if it is.

        Other threads compute digests meanwhile, so that nothing is read from the disk twice.
        """
        folder, manifest = self._folder(name), self._whole[name]
        self._check_entries(folder, manifest)
        own = self._own_file(manifest)
        files = (manifest.shared_files if compares else set()) | ({own} if own else set())
        calls = [partial(check_contents, folder, {each: manifest.files[each]}) for each in files]
        checks = all_in_background(calls, _DIGESTS)
        try:
            try:
                self._read_parts(folder, manifest, own)
            finally:
                wait(checks)
                for check in checks:
                    check.result()
        except TornError as error:
            return str(error)
        return ""

    def _check_entries(self, folder: Path, manifest: Manifest) -> None:
        for entry in self._entries:
            if entry.name not in manifest.entries:
                there = ", ".join(manifest.entries) or "nothing but random numbers"
                raise CheckpointError(f"{folder} has no {entry.name!r}; it has {there}")
            check_target(entry, manifest.entries[entry.name])

    def _read_parts(self, folder: Path, manifest: Manifest, own: str | None) -> None:
        loaded: dict[str, Any] = {"own": {}} if own is None else _read(folder / own)
        if manifest.world_size != self._ranks.size:
            loaded = {"own": {name: common_parts(parts) for name, parts in loaded["own"].items()}}
        given = {entry.name for entry in self._entries}
        self._own, self._loaded_from = loaded, folder
        self._parts = {}
        for name, kind in manifest.entries.items():
            if name in given or kind.startswith(VALUE):
                shared = None if kind.endswith(OWN) else _read(folder / entry_file(name))
                self._parts[name] = Parts(shared, loaded["own"].get(name, {}))

    def _own_file(self, manifest: Manifest) -> str | None:
        """Return this rank's own file, or any rank's if the number of ranks has changed; None if it is not here."""
        if manifest.world_size != self._ranks.size:
            return min(manifest.own_files, default=None)  # a part of it serves every rank
        own = rank_file(self._ranks.rank)
        return own if own in manifest.files else None

    # -------------------------------------------------------------------------------------- filling

    def _fill(self) -> None:
        """Load the state into the objects on every rank; if one fails on some rank, restore all."""
        begun = False
        try:
            self._ranks.together("resume()", self._put_back)
            begun = True
            self._ranks.together("resume()", self._restore_training)
        except BaseException as error:
            self._undo(error, training=begun)
            raise
        for entry in self._entries:
            restore_training(entry, self._parts[entry.name], RunAll(), ready=False)  # is only noted, and cannot fail

    def _put_back(self) -> None:
        self._streams_before = read_streams()
        parts = self._parts
        filled = [each for each in self._entries if parts[each.name].shared is not None or parts[each.name].own]
        # The position of a rank's own loader does not concern the others, and reading it may start its workers.
        self._before = [(each, copy_of(each)) for each in filled if each.kind != STATE_DICT + OWN]
        for entry in filled:
            try:
                put_back(entry, parts[entry.name])
            except Exception as error:
                what = (
                    f"the {entry.name} in {self._loaded_from} cannot be loaded into this {type(entry.target).__name__}"
                )
                raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error

    def _restore_training(self) -> None:
        """Restore all rounds and hooks, even if some fail, since the next round may have to begin with an agreement."""
        steps = RunAll()
        for entry in self._entries:
            restore_training(entry, self._parts[entry.name], steps, ready=True)
        with steps:
            if "streams" in self._own:
                set_streams(self._own["streams"])
        steps.end()

    def _undo(self, error: BaseException, *, training: bool) -> None:
        """Restore the objects' former state; with ``training`` also rounds and hooks, which are unchanged otherwise."""
        steps = RunAll()
        for entry, parts in self._before:
            with steps:
                put_back(entry, parts)
            if training:
                restore_training(entry, parts, steps, ready=True)
        with steps:
            if self._streams_before is not None:
                set_streams(self._streams_before)
        try:
            steps.end()
        except Exception as problem:
            error.add_note(f"what was filled before that could not be given back: {type(problem).__name__}: {problem}")

    # ----------------------------------------------------------------------------------- the result

    def _resumed(self, name: str) -> Resumed:
        manifest, given = self._whole[name], {entry.name for entry in self._entries}
        plain = {name: parts for name, parts in self._parts.items() if name not in given}
        values = {name: parts.own.get("state", parts.shared) for name, parts in plain.items()}
        return Resumed(manifest.step, self._folder(name), manifest.world_size, values)

    def _warn_of_own_parts(self, manifest: Manifest) -> None:
        if manifest.world_size == self._ranks.size:
            return
        names = ["", *(name for name, kind in manifest.entries.items() if kind.endswith(OWN))]
        warnings.warn(
            f"{self._path}: saved by {manifest.world_size} rank(s) and resumed by {self._ranks.size}, so that what "
            "each rank had of its own is not loaded: random numbers, state of communication hooks" + ", ".join(names),
            stacklevel=4,
        )


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)
