"""``lockstep runs``: lists the snapshots that runs have in the memory of this host, and removes them."""

import argparse
import json
from typing import Any

from lockstep.checkpoints import history
from lockstep.checkpoints.layout import TornError, list_saved, read_manifest
from lockstep.checkpoints.memory import MemoryFolder, all_folders

DESCRIPTION = """
List the snapshots (run.snapshot()) that this user's runs have in the memory of this host, with the history of each run:
when its ranks began, and which rank failed. A run that has failed continues from its snapshot when it starts again.
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "runs", help="list the snapshots in the memory of this host, with their histories", description=DESCRIPTION
    )
    parser.add_argument("--clean", action="store_true", help="remove the snapshots of runs that have ended")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="remove the histories, but no snapshots: a run that a CrashLoopError has stopped may then start again",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each run, one on each line")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the list, and remove what the options ask for."""
    folders = list(all_folders())
    if not folders and not options.json:
        print("no run has snapshots in the memory of this host")
    for memory in folders:
        removed = options.clean and not memory.is_used
        description = describe(memory) | {"removed": removed}
        if removed:
            memory.remove()
        elif options.forget:
            history.forget(memory.folder)
        print(json.dumps(description) if options.json else as_text(description))
    return 0


def describe(memory: MemoryFolder) -> dict[str, Any]:
    """Return a run's snapshot and history, for JSON."""
    snapshot = None
    for saved in list_saved(memory.folder):
        try:
            manifest = read_manifest(saved.folder)
        except TornError:
            continue
        snapshot = {"step": manifest.step, "time": manifest.time, "ranks": manifest.world_size}
    return {
        "path": memory.path,
        "folder": str(memory.folder),
        "bytes": memory.size,
        "runs": memory.is_used,
        "snapshot": snapshot,
        "history": [event.describe() for event in history.read(memory.folder)],
    }


def as_text(description: dict[str, Any]) -> str:
    """Return the description of a run as lines of text."""
    state = "removed" if description["removed"] else "runs" if description["runs"] else "has ended"
    snapshot, size = description["snapshot"], f"{description['bytes'] / 2**20:,.1f} MiB"
    what = "no whole snapshot"
    if snapshot is not None:
        what = f"snapshot after step {snapshot['step']}, {snapshot['time']}, of {snapshot['ranks']} ranks"
    lines = [f"{description['path'] or description['folder']}: {state}; {what}; {size} in {description['folder']}"]
    return "\n".join([*lines, *(f"  {event}" for event in description["history"])])
