"""What several files here need."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def compiler() -> Iterator[None]:
    """Nothing compiled before, nothing left. The compiler looks at .grad, and hides the warnings of it from users."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield
    torch._dynamo.reset()
