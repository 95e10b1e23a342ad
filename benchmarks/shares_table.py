"""The table of docs/reproducibility.md: fingerprints of trainings with eight shares, on many numbers of ranks.

    python benchmarks/shares_table.py --steps 200 --worlds 1 2 3 4 8

Each cell is a model (a network for the digits of scikit-learn, with batch normalisation and dropout; a character
transformer with dropout), a precision, an optimizer, with gradients clipped and, in bfloat16, accumulated over two
batches. Each is trained on processes over Gloo, on processes over `shm`, and on threads as ranks. One line a setting;
at the end, how many fingerprints each cell has had: one, or the claim is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import machine
from rank_processes import launch
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from share_runs import CELLS, train
from threaded import Rank, run_ranks


def data_of(model: str) -> Dataset[Any]:
    """Handwritten digits, or text: what scikit-learn says of its data sets."""
    from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

    if model == "digits":
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        return TensorDataset(images, torch.tensor(digits.target, dtype=torch.int64))
    text = "".join(load().DESCR for load in (load_breast_cancer, load_digits, load_iris, load_wine))
    codes = torch.tensor(list(text.encode())) % 32
    windows = codes[: len(codes) // 17 * 17].view(-1, 17)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


def cells_on(rank: Rank, steps: int) -> list[str]:
    """The fingerprint of each cell."""
    torch.set_num_threads(1)
    return [train(rank, cell, steps, 8, data_of(cell.model), 64) for cell in CELLS]


def in_process(number: int, world: int, backend: str, steps: int) -> list[str]:
    """The same in a process of its own."""
    return cells_on(Rank(number, world, dist.new_group(backend=backend)), steps)


def main() -> None:
    """Train all cells everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 3, 4, 8])
    parser.add_argument("--ways", nargs="*", default=["gloo", "shm", "threads"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(__doc__)
    print(machine(), f"\n{args.steps} steps\n", flush=True)
    found: list[set[str]] = [set() for _ in CELLS]
    for way in args.ways:
        for world in args.worlds:
            start = time.perf_counter()
            if way == "threads":
                rows = run_ranks(world, cells_on, args.steps, timeout=7200, group_timeout=1800)
            else:
                rows = launch(in_process, world, way, args.steps, world=world)
            for row in rows:
                for prints, one in zip(found, row, strict=True):
                    prints.add(one)
            line = " ".join(one[:8] for one in rows[0])
            print(f"{world} ranks, {way:7}  {line}  {time.perf_counter() - start:6.0f} s", flush=True)
    print()
    for cell, prints in zip(CELLS, found, strict=True):
        accumulated = "accumulated over 2 batches" if cell.accumulates else "each batch"
        print(f"{cell.model}, {cell.dtype}, {cell.optimizer}, clipped, {accumulated}: {len(prints)} fingerprint(s)")
    sys.exit(any(len(prints) != 1 for prints in found))


if __name__ == "__main__":
    main()
