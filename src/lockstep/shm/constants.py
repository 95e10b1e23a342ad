"""Constants that several files of this room use."""

import torch

LIVENESS_SECONDS = 0.2
"""How often a rank that waits for others checks that they are alive."""
GRACE_SECONDS = 0.5
"""How long a rank that has lost another one waits for somebody to say why."""
FAILURE_KEY = "failed"
"""The key of a store under which a rank writes why the group has ended."""
GLOO_DTYPES = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
)
"""What Gloo can reduce."""
