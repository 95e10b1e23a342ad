"""The nine programs of docs/gallery.md: PyTorch's wrapper differs from one process, lockstep does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.check.checking import check, make_options
from lockstep.check.processes import started
from lockstep.check.sources import parse_source

PAGE = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", PAGE, re.M | re.S))
WRONG = {
    "A layer is unfrozen": ("not-synchronised", "0.weight, 0.bias of 4 tensors"),
    "A layer is added": ("not-synchronised", "1.weight of 3 tensors"),
    "Weights are assigned": ("not-synchronised", "no gradient is synchronised"),
    "The model is called past the wrapper": ("not-synchronised", "no gradient is synchronised"),
    "Forward inside no_sync, backward outside": ("not-synchronised", "no gradient is synchronised"),
    "Two backwards after one forward": ("not-synchronised", "no gradient is synchronised"),
    "A parameter is not used": ("not-synchronised", "each rank has that of its own rows"),
    "The optimizer steps in hooks": ("drift", "in step 0"),
    "Ranks have different numbers of tokens": ("mean-of-means", "0.25 : 0.75"),
}


@pytest.fixture(scope="module")
def processes():
    with started(60) as found:
        yield found


def test_the_page_has_these_programs():
    assert PROGRAMS.keys() == WRONG.keys()
    assert len(re.findall(r"^\| \d", PAGE, re.M)) == len(WRONG)


@pytest.mark.parametrize("title", WRONG)
def test_a_program_of_the_gallery(processes, title, tmp_path):
    file = tmp_path / f"case_{list(WRONG).index(title)}.py"
    file.write_text(PROGRAMS[title])
    cause, words = WRONG[title]
    report = check(make_options(parse_source(f"{file}:case", "case"), wrap="ddp"), processes, 1e-6)
    assert [each.cause for each in report.findings] == [cause], str(report)
    assert words in report.findings[0].text
    right = "weighted" if "def weighted" in PROGRAMS[title] else "case"
    options = make_options(parse_source(f"{file}:{right}", "case"), wrap=lockstep.DistributedDataParallel)
    report = check(options, processes, 1e-6)
    assert report.is_equal, str(report)
