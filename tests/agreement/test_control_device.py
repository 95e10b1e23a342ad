"""Where the small tensors lie with which ranks agree."""

from __future__ import annotations

from processes import output_of

SCRIPT = """
from types import SimpleNamespace
import torch
from lockstep.distributed.comm.collectives import control_device
found = control_device(SimpleNamespace(name=lambda: "custom")).type
expected = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
print(found == expected)
"""


def test_a_build_for_accelerators_that_finds_none_agrees_on_the_cpu():
    """In a process of its own: tests simulate accelerators in this one."""
    assert output_of(SCRIPT) == "True\n"
