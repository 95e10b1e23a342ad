"""True if the digits example goes on with a run that is there, or begins anew."""

import os
import shutil
from argparse import Namespace
from pathlib import Path

import lockstep
from options import BadOption


def settings_of(options: Namespace) -> dict[str, float | None]:
    """Return what the final weights depend on; a run goes on only under the settings it began with."""
    return {name: getattr(options, name) for name in ("epochs", "batch_size", "lr", "seed", "shares")}


def check_same(folder: Path, there: dict | None, here: dict) -> None:
    """Raise if there is nothing to resume, or a run of other settings."""
    if there is None:
        raise BadOption(f"there is no checkpoint in {folder} to resume from")
    different = [
        f"{name.replace('_', ' ')} {there[name]} there and {value} here"
        for name, value in here.items()
        if there[name] != value
    ]
    if different:
        raise BadOption(f"{folder} is of a run with other settings: {', '.join(different)}")


def go_on(run: lockstep.Session, folder: Path, options: Namespace, state: dict) -> bool:
    """Return True if the run goes on, as asked, or because torchrun has started the processes again; else it begins
    anew."""
    started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    found = run.resume(folder, **state) if options.resume or started_again else None
    if options.resume or found:
        check_same(folder, found and found.values["settings"], settings_of(options))
    elif run.is_main:
        set_aside(folder)
    return bool(found)


def set_aside(folder: Path) -> None:
    """Begin without checkpoints; those of the run before stay, under another name, until the next run begins."""
    before = folder.with_name(f"{folder.name}-before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
