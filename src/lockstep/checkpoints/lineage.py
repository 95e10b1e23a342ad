"""Distinguishes this run's checkpoints in a folder from other runs' checkpoints, and notices a second writer."""

import contextlib
import secrets
import warnings
from pathlib import Path
from typing import NamedTuple

from lockstep.checkpoints.layout import Saved, TornError, list_saved, read_manifest
from lockstep.errors import CheckpointError


class Lineage(NamedTuple):
    """The state that this process remembers of a folder."""

    run: str
    """The run that writes there: a new one, or the one that this process continues."""
    highest: int
    """The highest number of a checkpoint there when this process last looked."""


_lineages: dict[Path, Lineage] = {}  # by folder; only the first rank of a group asks


def remember(path: Path, run: str, highest: int) -> None:
    """Record that this process has saved to a folder, or continues from a checkpoint in it."""
    _lineages[path.resolve()] = Lineage(run, highest)


def lineage_of(path: Path) -> Lineage:
    """Return the lineage of a folder before saving to it.

    Raises :class:`CheckpointError` if another run has saved there since this one last saved or resumed.
    """
    key, saved = path.resolve(), [each for each in list_saved(path) if each.is_finished]
    if key not in _lineages:
        if saved:
            warnings.warn(
                f"{path} holds checkpoints of an earlier run, the newest is {saved[-1].folder.name}, and this run has "
                "not resumed from it. They are kept, beside those of this run, which are newer for resume(); call "
                "resume() first to go on with a run, or give each run a folder",
                stacklevel=2,
            )
        _lineages[key] = Lineage(secrets.token_hex(8), saved[-1].number if saved else 0)
    known = _lineages[key]
    if saved and saved[-1].number > known.highest:
        raise CheckpointError(
            f"another run writes to {path}: {_author(saved[-1])} is newer than all that this run has written or "
            "resumed from. Two runs would go on from each other's checkpoints: end one of them, or give each a folder"
        )
    return known


def of_run(saved: Saved, run: str) -> bool:
    """Return True if a checkpoint belongs to a run; one that cannot be read does not."""
    with contextlib.suppress(TornError):
        return read_manifest(saved.folder).run == run
    return False


def _author(saved: Saved) -> str:
    with contextlib.suppress(TornError):
        manifest = read_manifest(saved.folder)
        return f"{saved.folder.name}, saved by host {manifest.hosts[0]} at {manifest.time},"
    return saved.folder.name
