"""Models of other people's packages on a GPU: two ranks end with the weights of PyTorch's DDP.

Over NCCL where it allows two ranks on the GPUs that there are, else over Gloo. Ranks are processes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from client_programs import PACKAGES, need
from lockstep.check.case import batches_of_rank, make_optimizer
from one_gpu import LIMIT, NCCL, allows_several_ranks, place_of
from processes import run_processes

CLIENTS = str(Path(__file__).parents[1] / "clients")
PROGRAMS = (
    "gpt2",
    "gpt2_checkpointed",
    "gpt2_with_adapters",
    "llama",
    "mixtral",
    "t5",
    "bert",
    "timm_vit",
    "timm_convnext",
    "torchvision_swin",
    "graphs",
    "equivariant",
    "lightning_module",
)
WAYS = (
    lambda module: nn.parallel.DistributedDataParallel(module, find_unused_parameters=True),
    lockstep.replicate,
    lockstep.DistributedDataParallel,
)


def on(device, value):
    if isinstance(value, tuple):
        return tuple(on(device, each) for each in value)
    return value.to(device)


def train(rank, program):
    """The weights that each way ends with."""
    device = place_of(rank)
    warnings.simplefilter("ignore")  # the packages have several
    sys.path.insert(0, CLIENTS)
    import checked_programs

    torch.set_default_dtype(torch.float64)
    return [train_in_one_way(rank, device, getattr(checked_programs, program), way) for way in WAYS]


def train_in_one_way(rank, device, make, way):
    torch.manual_seed(3)
    case = make()
    module = case.model.to(device)
    model = way(module)
    optimizer = make_optimizer(case, model.parameters())
    for step, batch in enumerate([*batches_of_rank(case, rank.rank, rank.world, "even")] * 2):
        torch.manual_seed(100 * step + rank.rank)
        optimizer.zero_grad()
        case.loss(model, on(device, batch if case.collate is None else case.collate(batch))).backward()
        optimizer.step()
    return [each.detach().cpu() for each in module.parameters()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_ranks_end_with_the_weights_of_the_reference(home, program):
    need(PACKAGES[program])
    backend = NCCL if home.type == "cuda" and allows_several_ranks() else "gloo"
    wanted, *found = run_processes(2, train, program, timeout=LIMIT, backend=backend)[0]
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-14)
