"""The causes in docs/not_equal.md: each wrong function is named by the cause under which it stands; each right one is
equal to one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.check.checking import check, make_options
from lockstep.check.diagnosis import SECTIONS
from lockstep.check.processes import started
from lockstep.check.sources import parse_source

PAGE = (Path(__file__).parents[2] / "docs" / "not_equal.md").read_text()
_PAIR = r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n((?:(?!^```).)*?^def wrong.*?)^```$"
BLOCKS = dict(re.findall(_PAIR, PAGE, re.M | re.S))
CAUSES = {heading: cause for cause, heading in SECTIONS.items()}

CASE = """

import inspect
import torch
from lockstep.check import Case


def network():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def labelled():
    x, y = torch.randn(12, 6), torch.randint(3, (12,))
    y[:6], y[6:9] = 0, 1  # one rank has fewer rows that are no padding
    y[0] = 2
    return [(x, y)] * 2


def loss_of(model, batch):
    ignored = globals().get("PADDING", -100)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=ignored)


def case_of(function):
    place = {
        "model, batch": "loss", "model, optimizer, batch": "step", "parameters": "optimizer", "rank, ranks": "batches",
        "": "model",
    }.get(", ".join(inspect.signature(function).parameters))
    values = {"model": network, "batches": labelled(), "loss": loss_of}
    if place:
        values[place] = function
    if place == "step" and "clip" in inspect.getsource(function):
        del values["loss"]
    if place == "batches":
        values["steps"] = 4
    return Case(**{**values, "model": values["model"]()})


def wrong_case():
    return case_of(wrong)


def right_case():
    return case_of(right)
"""


@pytest.fixture(scope="module")
def processes():
    with started(60) as found:
        yield found


def slug(heading):
    return re.sub(r"[^\w-]+", "-", heading.lower()).strip("-")


def test_each_cause_has_its_section():
    headings = {slug(each) for each in re.findall(r"^## ([^\n]+)$", PAGE, re.M)}
    assert set(SECTIONS.values()) == headings
    assert {slug(each) for each in BLOCKS} == headings - {"a-difference-in-rounding"}


def reported(processes, heading, name, folder):
    """What a check says of one function of a section."""
    file = folder / f"{slug(heading).replace('-', '_')}.py"
    file.write_text(BLOCKS[heading] + CASE)
    wraps = f"def {name}(model):" in BLOCKS[heading]
    with_lockstep = "lockstep." in BLOCKS[heading] or "buffer" in BLOCKS[heading]
    wrap = parse_source(f"{file}:{name}", "wrap") if wraps else "lockstep" if with_lockstep else "ddp"
    return check(make_options(parse_source(f"{file}:{name}_case", "case"), wrap=wrap), processes, 1e-6)


@pytest.mark.parametrize("heading", BLOCKS)
def test_a_wrong_function_is_named_by_its_cause(processes, heading, tmp_path):
    report = reported(processes, heading, "wrong", tmp_path)
    assert [each.cause for each in report.findings][:1] == [CAUSES[slug(heading)]], str(report)
    assert report.findings[0].section == f"not_equal.md#{slug(heading)}"
    assert f"see https://torch-lockstep.github.io/lockstep/not_equal.html#{slug(heading)}" in str(report)


@pytest.mark.parametrize("heading", [each for each, block in BLOCKS.items() if "def right" in block])
def test_a_right_function_is_equal(processes, heading, tmp_path):
    report = reported(processes, heading, "right", tmp_path)
    assert report.is_equal, str(report)
