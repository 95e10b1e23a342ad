"""`lockstep check` of programs that are right: it says that they are equal to one process, whatever wraps them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from client_programs import PACKAGES, need
from lockstep.check.checking import check, make_options
from lockstep.check.job import PRECISIONS
from lockstep.check.processes import started
from lockstep.check.sources import Source

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="module")
def processes():
    with started(120) as found:
        yield found


def is_equal(processes, program, **options):
    need(PACKAGES[program])
    case = Source(str(HERE / "checked_programs.py"), "checked_programs", program)
    precision = options.get("precision", "float64")
    report = check(make_options(case, **options), processes, PRECISIONS[precision])
    assert report.is_equal, str(report)


@pytest.mark.parametrize("program", PACKAGES)
def test_a_right_program_is_equal(processes, program):
    is_equal(processes, program)


@pytest.mark.parametrize("program", ["gpt2", "bert", "timm_vit", "gaussian_process", "schedule_free"])
def test_it_is_equal_with_pytorchs_wrapper(processes, program):
    is_equal(processes, program, wrap="ddp")


@pytest.mark.parametrize("program", ["gpt2", "llama", "bert", "timm_vit", "diffusion"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_it_is_equal_in_a_lower_precision(processes, program, precision):
    is_equal(processes, program, precision=precision)


@pytest.mark.parametrize("wrap", ["accelerate", "fsdp2"])
def test_it_is_equal_under_other_wrappers(processes, wrap):
    need("accelerate")
    is_equal(processes, "gpt2", wrap=wrap)


@pytest.mark.parametrize("program", ["lightning_module", "timm_vit"])
def test_masks_by_row_are_equal(processes, program):
    is_equal(processes, program, dropout="rows")
