"""The programs of docs/programs.md: on one rank they print what the program for one process does; two train alike."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest
import torch

from example_programs import EXAMPLES, run_script_in_ranks

PAGE = (EXAMPLES.parent / "docs" / "programs.md").read_text()
CHANGES = dict(
    re.findall(r"^\[examples/(programs/\w+\.py)\]\(\S+\): [^`]*^```udiff\n(.*?)^```$", PAGE, re.M | re.S),
)
"""What the page shows of each program."""


def plain(script: str) -> str:
    """Return the program for one process: what is in the file, with the page's changes undone."""
    text, changed = (EXAMPLES / script).read_text(), 0
    for before, after in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)*)", CHANGES[script], re.M):
        old, new = (re.sub(r"^[-+]", "", lines, flags=re.M) for lines in (before, after))
        if not new:
            assert not old, "a line that is only left out has no place"
            continue
        place = text.index(f"\n{new}", changed) + 1  # in the order of the file
        text, changed = text[:place] + old + text[place + len(new) :], place + len(old) - 1
    return text


def printed_in_one_process(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [script, "saved"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: sums of several threads have other bits
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(plain(script), script, "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


def numbers(output: str) -> list[float]:
    """Return the last number of each line."""
    return [float(re.findall(r"[\d.]+", line)[-1]) for line in output.splitlines()]


def test_the_page_has_all_programs():
    assert sorted(CHANGES) == sorted(f"programs/{file.name}" for file in (EXAMPLES / "programs").glob("*.py"))
    assert not any("lockstep" in re.sub(r'""".*?"""', "", plain(script), flags=re.S) for script in CHANGES)


@pytest.mark.parametrize("script", sorted(CHANGES))
def test_one_rank_prints_what_the_program_for_one_process_prints(script, tmp_path, monkeypatch):
    output = printed_in_one_process(script, tmp_path, monkeypatch)
    assert run_script_in_ranks(1, script, str(tmp_path / "checkpoints")) == [output]
    assert len(output.splitlines()) >= 3


@pytest.mark.parametrize(
    ("script", "least", "most"),
    [
        ("programs/resnet.py", 90, 101),  # per cent right
        ("programs/gpt.py", 0, 2.3),  # loss of a character
        ("programs/gan.py", 0.8, 1.2),  # radius
        ("programs/actor_critic.py", 60, 10_000),  # steps of a game
        ("programs/simclr.py", 80, 101),  # per cent of neighbours
    ],
)
def test_two_ranks_learn_the_same(script, least, most, tmp_path):
    first, other = run_script_in_ranks(2, script, str(tmp_path))
    assert not other
    assert least < numbers(first)[-1] < most


def test_the_residual_network_goes_on_where_it_was_stopped(tmp_path):
    whole, _ = run_script_in_ranks(2, "programs/resnet.py", str(tmp_path))
    shutil.rmtree(max(tmp_path.glob("save-*")))  # as if it had been stopped before its last save
    again, _ = run_script_in_ranks(2, "programs/resnet.py", str(tmp_path))
    assert again.splitlines() == whole.splitlines()[-1:]
    assert run_script_in_ranks(2, "programs/resnet.py", str(tmp_path)) == ["", ""]  # all epochs are done
