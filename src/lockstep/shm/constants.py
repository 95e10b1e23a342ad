"""Constants that several files of this room use."""

import torch

LIVENESS_SECONDS = 0.2
"""Seconds between two checks that the other ranks are alive, on a rank that waits for them."""
GRACE_SECONDS = 0.5
"""Seconds that a rank that has lost another one waits for any rank to say why."""
FAILURE_KEY = "failed"
"""The store key under which a rank writes why the group has ended."""
GLOO_DTYPES = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
)
"""The dtypes that Gloo can reduce."""
