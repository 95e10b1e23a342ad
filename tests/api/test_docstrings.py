"""The examples in the docstrings of public names run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import lockstep
from lockstep import local
from lockstep.local import comm

MODULES = [lockstep, local, comm]
CALLS = ["broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather"]


def public_objects():
    """Each public class and function of this package once, by the name under which it is defined."""
    found = {}
    for module in MODULES:
        for name in dir(module):
            value = getattr(module, name)
            of_ours = getattr(value, "__module__", "").startswith("lockstep")
            if not name.startswith("_") and of_ours and (inspect.isclass(value) or inspect.isfunction(value)):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


PUBLIC = public_objects()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_examples_of_a_public_name_run(name):
    value = PUBLIC[name]
    assert value.__doc__
    globals_ = vars(importlib.import_module(value.__module__)).copy()
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    report = []
    for example in doctest.DocTestFinder().find(value, name, globs=globals_):
        runner.run(example, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)


MUST_HAVE_EXAMPLES = [
    lockstep.DataParallel,
    lockstep.local.data_parallel,
    local.replicate,
    local.parallel_apply,
    local.scatter,
    local.scatter_kwargs,
    local.gather,
    local.Broadcast,
    local.ReduceAddCoalesced,
    local.Gather,
    local.Scatter,
    local.ReduceAdd,
    *(getattr(comm, name) for name in CALLS),
]


@pytest.mark.parametrize("value", MUST_HAVE_EXAMPLES, ids=lambda value: f"{value.__module__}.{value.__qualname__}")
def test_what_stands_for_a_name_of_torch_says_so_and_has_an_example(value):
    assert "Stands for" in value.__doc__
    assert any(test.examples for test in doctest.DocTestFinder().find(value, value.__qualname__))
