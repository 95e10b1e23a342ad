"""Do two ranks train the network of digits.py as one process does? ``lockstep check examples/check_digits.py:case``.

Batch normalisation with the statistics of each rank's rows is another computation: ``with_statistics`` is that case,
which is not equal, and the check says why. ``case`` normalises with the statistics of the rows of all ranks.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.check import Case

sys.path.insert(0, str(Path(__file__).parent))

from digits import make_model


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def with_statistics() -> Case:
    batches = [(torch.rand(32, 1, 8, 8), torch.randint(10, (32,))) for _ in range(3)]
    return Case(make_model(width=8), batches, loss, torch.optim.AdamW)


def case() -> Case:
    found = with_statistics()
    lockstep.local.SyncBatchNorm.convert_sync_batchnorm(found.model)
    return found


if __name__ == "__main__":
    from lockstep.check import compare_with_one_process

    print(compare_with_one_process(case))
