"""resume(): the newest checkpoint that is whole on every rank, and the run as it was then."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoints.layout import (
    Manifest,
    TornError,
    check_contents,
    entry_file,
    list_saved,
    rank_file,
    read_manifest,
)
from lockstep.checkpoints.lineage import remember
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.state import OWN, VALUE, Entry, Parts, check_target, common_parts, entries_of, put_back
from lockstep.checkpoints.streams import set_streams
from lockstep.distributed.collectives import Group
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    step: int | None
    """What :func:`lockstep.save` was told."""
    folder: Path
    """The checkpoint."""
    world_size: int
    """How many ranks have saved it."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was saved as plain values under names that :func:`lockstep.resume` was not given; tensors are on the CPU."""


def resume(path: str | os.PathLike[str], *, group: Group | None = None, **state: Any) -> Resumed | None:
    """Go on with the run that :func:`lockstep.save` has saved; call it on every rank, before the first step.

    All ranks take the newest checkpoint that is whole on every one of them; for each newer one there is a warning
    that says what it lacks. Then every object is as it was, random numbers included, and what the run computes from
    there has the bits of one that was never stopped.

    Args:
        path: The folder that was given to :func:`lockstep.save`.
        group: The ranks; the default group if None, this process alone if there is none.
        **state: Objects to be filled, under the names under which they were saved: whatever has ``load_state_dict()``,
            generators, and dicts, lists and tensors, which are changed in place. Modules go through
            :func:`lockstep.replicate` before. What is left out is not loaded, but for plain values: see
            :attr:`Resumed.values`.

    Returns:
        Where the run is, or None if nothing was saved there: a run that begins.

    On another number of ranks than has saved it, what is the same on all ranks is loaded, and what was each rank's own
    is not: random numbers go on as they are, local buffers have the first rank's values. A warning names what is left.

    Only files that ``torch.load(weights_only=True)`` reads are read, so no code of a checkpoint is run.

    Raises:
        CheckpointError: There are checkpoints and none can be used: they are torn on some rank, or not there on some
            host, or hold other things than are to be filled. Some objects may have been filled by then.
        AgreementError: Ranks are to fill other things.
        CommunicationError: A rank does not answer.

    Communicates four small all-gathers, and two for each checkpoint that turns out not to be whole when it is read.

    Example:
        >>> import tempfile, torch, lockstep
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert resume(folder, model=model) is None
        ...     folder_of_step = lockstep.save(folder, model=model, history=[0.5], step=120)
        ...     found = resume(folder, model=model)
        >>> found.step, found.values
        (120, {'history': [0.5]})

    Stands for: ``torch.load`` and one ``load_state_dict`` after the other, of a file that may be half of one.
    """
    return Resuming(Path(path), Ranks(group)).resume(state)


class Resuming:
    """One resume, on one rank."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        self._whole: dict[str, Manifest] = {}
        self._entries: list[Entry] = []

    def resume(self, state: Mapping[str, Any]) -> Resumed | None:
        """See :func:`lockstep.resume`."""
        ranks = self._ranks
        answers = ranks.together("resume()", lambda: self._look(state))
        ranks.check_equal("resume()", [{"the names to be filled": answer["names"]} for answer in answers])
        name, torn = self._choose(answers)
        if name is None and any(answer["finished"] for answer in answers):
            raise CheckpointError(
                f"{self._path}: there are checkpoints, and none is whole on every rank: {'; '.join(torn)}. Put back "
                "what is missing, or start a new run in another folder"
            )
        loaded: list[Resumed] = []
        if name is not None:
            manifest = self._whole[name]
            ranks.together("resume()", lambda: loaded.append(self._load(self._path / name, manifest)))
            if ranks.rank == 0:
                remember(self._path, manifest.run, max(each.number for each in list_saved(self._path)))
                self._warn_of_other_ranks(manifest)
        if ranks.rank == 0:
            for text in torn:
                warnings.warn(f"{self._path}: skipped {text}", stacklevel=3)
        return loaded[0] if loaded else None

    # ------------------------------------------------------------------------------------- choosing

    def _look(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What there is, as this rank sees it."""
        self._entries = entries_of(state)
        saved, torn = list_saved(self._path), {}
        for each in saved:
            try:
                self._whole[each.folder.name] = read_manifest(each.folder)
            except TornError as error:
                torn[each.folder.name] = str(error)
        return {
            "names": [entry.name for entry in self._entries],
            "host": self._ranks.host,
            "saved": [[each.number, each.folder.name] for each in saved],
            "finished": any(each.is_finished for each in saved),
            "ids": {name: manifest.id for name, manifest in self._whole.items()},
            "torn": torn,
        }

    def _choose(self, answers: Sequence[dict[str, Any]]) -> tuple[str | None, list[str]]:
        """The newest checkpoint that is whole on every rank, and why newer ones are not."""
        hosts = [answer["host"] for answer in answers]
        torn: list[str] = []
        saved = {(number, name) for answer in answers for number, name in answer["saved"]}
        for _, name in sorted(saved, reverse=True):
            reasons = [
                answer["torn"].get(name, "" if name in answer["ids"] else "it is not there") for answer in answers
            ]
            if not any(reasons) and len({answer["ids"][name] for answer in answers}) > 1:
                reasons = [f"it is the one with id {answer['ids'][name]}, others have another" for answer in answers]
            if not any(reasons):
                reads_all = hosts.index(self._ranks.host) == self._ranks.rank
                check = partial(self._check, name, reads_all)
                reasons = self._ranks.together("resume()", check)
            if not any(reasons):
                return name, torn
            torn.append(f"{name}: {self._explain(reasons, hosts)}")
        return None, torn

    def _check(self, name: str, reads_all: bool) -> str:
        """Why a checkpoint is not whole; the first rank of each host reads for all what is the same on all ranks."""
        manifest = self._whole[name]
        own = self._own_file(manifest)
        files = {entry_file(entry) for entry in manifest.entries} if reads_all else set()
        if own not in manifest.files:
            host = manifest.hosts[self._ranks.rank]
            return f"{own} is not on this host: it was written on host {host}, to a disk of its own"
        files.add(own)
        try:
            check_contents(self._path / name, {each: manifest.files[each] for each in files & manifest.files.keys()})
        except TornError as error:
            return str(error)
        return ""

    def _explain(self, reasons: Sequence[str], hosts: Sequence[str]) -> str:
        if len(set(reasons)) == 1:
            return reasons[0]
        places = zip(self._ranks.names, hosts, reasons, strict=True)
        return ", and ".join(f"rank {rank} (host {host}): {reason}" for rank, host, reason in places if reason)

    # -------------------------------------------------------------------------------------- loading

    def _load(self, folder: Path, manifest: Manifest) -> Resumed:
        """Fill the objects, and set this rank's random numbers."""
        for entry in self._entries:
            if entry.name not in manifest.entries:
                there = ", ".join(manifest.entries) or "nothing but random numbers"
                raise CheckpointError(f"{folder} has no {entry.name!r}; it has {there}")
            check_target(entry, manifest.entries[entry.name])
        own = self._own(folder, manifest)
        for entry in self._entries:
            parts = self._parts(folder, entry.name, manifest.entries[entry.name], own)
            if parts.shared is not None or parts.own:
                put_back(entry, parts)
        given = {entry.name for entry in self._entries}
        plain = {name: kind for name, kind in manifest.entries.items() if kind.startswith(VALUE) and name not in given}
        found = {name: self._parts(folder, name, kind, own) for name, kind in plain.items()}
        values = {name: parts.own.get("state", parts.shared) for name, parts in found.items()}
        if "streams" in own:
            set_streams(own["streams"])
        return Resumed(manifest.step, folder, manifest.world_size, values)

    def _own(self, folder: Path, manifest: Manifest) -> dict[str, Any]:
        """What this rank has saved of its own; of another number of ranks, what all of them have saved."""
        own: dict[str, Any] = _read(folder / self._own_file(manifest))
        if manifest.world_size != self._ranks.size:
            return {"own": {name: common_parts(parts) for name, parts in own["own"].items()}}
        return own

    def _own_file(self, manifest: Manifest) -> str:
        """The file of this rank; any rank's, if another number of ranks has saved it."""
        if manifest.world_size == self._ranks.size:
            return rank_file(self._ranks.rank)
        return min(manifest.files.keys() - {entry_file(entry) for entry in manifest.entries})

    def _warn_of_other_ranks(self, manifest: Manifest) -> None:
        if manifest.world_size != self._ranks.size:
            names = ["", *(name for name, kind in manifest.entries.items() if kind.endswith(OWN))]
            warnings.warn(
                f"{self._path}: saved by {manifest.world_size} rank(s) and resumed by {self._ranks.size}, so that what "
                "each rank had of its own is not loaded: random numbers, state of communication hooks"
                + ", ".join(names),
                stacklevel=4,
            )

    def _parts(self, folder: Path, name: str, kind: str, own: dict[str, Any]) -> Parts:
        shared = None if kind.endswith(OWN) else _read(folder / entry_file(name))
        return Parts(shared, own["own"].get(name, {}))


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)
