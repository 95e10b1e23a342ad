"""What breaks the promise of shares, tried: one training on one rank, and again with one thing changed.

    python benchmarks/shares_breaks.py

For each change it prints whether the fingerprint of two small models after 10 steps is the same as without it. The
settings that lockstep compares are changed behind its back here: in a process of its own from the beginning.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHANGES: dict[str, tuple[str, dict[str, str]]] = {
    "nothing": ("", {}),
    "nothing, in another process with another heap": ("junk = [torch.empty(n * 997) for n in range(200)]", {}),
    "two intra-op threads": ("torch.set_num_threads(2)", {}),
    "two threads between operations": ("torch.set_num_interop_threads(2)", {}),
    "vector instructions: AVX2": ("", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "vector instructions: none": ("", {"ATEN_CPU_CAPABILITY": "default"}),
    "oneDNN limited to AVX2": ("", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "oneDNN switched off": ("torch.backends.mkldnn.set_flags(False)", {}),
    "MKL in another mode": ("", {"MKL_CBWR": "COMPATIBLE"}),
    "deterministic algorithms": ("torch.use_deterministic_algorithms(True)", {}),
    "attention without fused kernels": ("torch.backends.mha.set_fastpath_enabled(False)", {}),
    "four shares in place of eight": ("shares = 4", {}),
    "optimizer of another implementation": ("optimizer = 'foreach'", {}),
}
PROGRAM = """
import sys, torch
sys.path[:0] = {paths!r}
torch.set_num_threads(1)
shares, optimizer = 8, "fused AdamW"
{change}
import share_runs
from share_runs import CELLS, train
from threaded import run_ranks
if optimizer == "foreach":
    share_runs.make_optimizer = lambda name, model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
print(*(run_ranks(1, train, cell, 10, shares)[0][:8] for cell in (CELLS[1], CELLS[5])))
"""


def main() -> None:
    """Print the table."""
    root = Path(__file__).parents[1]
    first: list[str] = []
    print(__doc__)
    for name, (change, variables) in CHANGES.items():
        program = PROGRAM.format(change=change, paths=[str(root / "tests")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        found = done.stdout.split() or [done.stderr.strip().splitlines()[-1]] * 2
        first = first or found
        told = ["same bits" if one == other else "OTHER bits" for one, other in zip(found, first, strict=True)]
        print(f"{name:48} convolutions: {told[0]:10}  attention: {told[1]:10}", flush=True)


if __name__ == "__main__":
    main()
