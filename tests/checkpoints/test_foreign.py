"""A checkpoint that somebody else has made, by accident or on purpose: no path leads out of its folder."""

from __future__ import annotations

import hashlib
import json
import os
import re

import pytest
import torch

import lockstep
from lockstep.checkpoints.layout import Manifest, TornError, read_manifest
from lockstep.errors import CheckpointError


def saved(folder, step):
    return lockstep.save(folder, step=step, model=torch.nn.Linear(2, 2), own=lockstep.checkpoints.per_rank(3))


def forge(folder, manifest):
    """Write a manifest, and the marker that seals it."""
    data = json.dumps(manifest).encode() if not isinstance(manifest, bytes) else manifest
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMPLETE").write_text(hashlib.sha256(data).hexdigest() + "\n")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def with_file(manifest, name):
    manifest["files"][name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest(), "rank": 0, "host": "a"}


def with_entry(manifest, name):
    manifest["entries"][name] = "value"
    manifest["files"][f"{name}.pt"] = manifest["files"]["model.pt"]


def with_id(manifest, name):
    manifest["id"] = name


def with_run(manifest, name):
    """The next save of the run makes a folder whose name has the run's id."""
    manifest["run"] = name


OUTSIDE = ["../x.pt", "../../x.sh", "/tmp/x.pt", "a/b.pt", "rank-0000.pt/../x.pt", ".."]
NAMES = {
    with_file: [*OUTSIDE, ".pt", "x\0.pt", "rank-1.pt", "x.sh", "manifest.json", "COMPLETE", "rank-٣٣٣٣.pt"],
    with_entry: ["../x", "../../x", "/tmp/x", "a/b", "", ".", "..", "rank-0000", "x\0"],
    with_id: ["../x", "", "/tmp/x", "a\n"],
    with_run: ["../x", "", "/tmp/x", "a\n"],
}


@pytest.mark.parametrize(("change", "name"), [(change, name) for change, names in NAMES.items() for name in names])
def test_a_name_that_may_lead_elsewhere_is_refused(change, name, tmp_path):
    folder = saved(tmp_path / "run", 1)
    (tmp_path / "run" / "x.pt").write_bytes(b"secret")
    manifest = manifest_of(folder)
    change(manifest, name)
    forge(folder, manifest)
    words = re.escape(f"manifest.json cannot be understood: {name!r} is none of its names")
    with pytest.raises(CheckpointError, match=words):
        lockstep.resume(tmp_path / "run")


def test_a_file_that_the_manifest_says_nothing_of_is_not_read(tmp_path):
    folder = saved(tmp_path, 1)
    manifest = manifest_of(folder)
    del manifest["files"]["model.pt"]
    forge(folder, manifest)
    with pytest.raises(CheckpointError, match=r"it says nothing of model\.pt"):
        lockstep.resume(tmp_path, model=torch.nn.Linear(2, 2))


VALUES = [None, True, -1, 1.5, 3, "x", "", [], {}, [[]], [3], {"x": 3}, {"x": {}}]


@pytest.mark.parametrize("value", [*VALUES, b"\xff", b"[" * 100_000, b"{", b"1" * 10_000])
def test_json_that_is_no_manifest_is_skipped(value, tmp_path):
    saved(tmp_path, 1)
    forge(saved(tmp_path, 2), value)
    with pytest.warns(UserWarning, match=r"skipped save-000002.*manifest\.json cannot be understood"):
        assert lockstep.resume(tmp_path).step == 1


def places(manifest):
    """Every place in a manifest, as the keys that lead to it."""
    for key, value in manifest.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *more) for more in places(value))


def test_whatever_stands_in_a_manifest_it_is_understood_or_refused(tmp_path):
    folder = saved(tmp_path, 1)
    right = manifest_of(folder)
    refused = 0
    for place in places(right):
        for value in (*VALUES, "missing"):
            changed = json.loads(json.dumps(right))
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            if value == "missing":
                del inside[place[-1]]
            else:
                inside[place[-1]] = value
            forge(folder, changed)
            try:
                found = read_manifest(folder)
            except TornError:
                refused += 1
            else:
                assert Manifest.parse(found.to_bytes()) == found
    assert refused > 200
    forge(folder, right)
    read_manifest(folder)


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "model.pt", "rank-0000.pt"])
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_is_refused(what, name, tmp_path):
    """Its content is that of the file, so that only its kind can be the reason; a pipe would be waited for."""
    saved(tmp_path / "run", 1)
    file = saved(tmp_path / "run", 2) / name
    file.rename(tmp_path / "elsewhere")
    if what == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.warns(UserWarning, match=f"skipped save-000002.*{name}.* is a link, or no regular file"):
        assert lockstep.resume(tmp_path / "run").step == 1


def test_a_whole_checkpoint_may_lie_on_another_disk(tmp_path):
    folder = saved(tmp_path / "run", 1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert lockstep.resume(tmp_path / "run").step == 1


def test_the_place_of_snapshots_beside_the_checkpoints_is_a_file(tmp_path):
    with lockstep.session() as run:
        run.save(tmp_path / "run", step=1)
        os.mkfifo(tmp_path / "run" / ".snapshots")
        assert run.resume(tmp_path / "run").step == 1
