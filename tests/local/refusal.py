"""What is asked of every error: that it says enough, and hurts nothing else."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import LockstepError, StructureError


def workers() -> int:
    """Threads that run replicas; others may begin and end in earlier tests of this process."""
    return sum(thread.name.startswith("lockstep-worker") for thread in threading.enumerate())


@contextlib.contextmanager
def refused(kind, *words):
    """The block raises `kind` with all of `words` (text, or a pattern) in its message, and leaves no thread.

    Another wrapper runs as before.
    """
    healthy, x = DataParallel(nn.Linear(1, 1), ["cpu"] * 3), torch.arange(3.0)[:, None]
    expected, before = healthy(x), workers()
    with pytest.raises(kind) as caught:
        yield caught
    if issubclass(kind, LockstepError):
        assert type(caught.value) is kind
        assert isinstance(caught.value, ValueError if kind is StructureError else RuntimeError)  # as PyTorch's are
    message = "".join(traceback.format_exception_only(caught.value))  # with its notes
    for word in words:
        found = word.search(message) if isinstance(word, re.Pattern) else word in message
        assert found, f"{word!r} is not in: {message}"
    assert torch.equal(healthy(x), expected)
    assert workers() <= max(before, 3)
