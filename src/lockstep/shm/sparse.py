"""Sums of sparse tensors: every rank gathers the entries of all, and adds them up in the order of the ranks."""

import torch
from torch import Tensor

from lockstep.errors import AgreementError, LayoutError, OptionError
from lockstep.shm.algorithm import Algorithm
from lockstep.shm.messages import Op


def check_sparse(tensors: list[Tensor], op: Op) -> None:
    """Raise unless it is one sparse tensor in coordinates, on the CPU, to be summed."""
    x = tensors[0]
    if len(tensors) != 1 or x.layout != torch.sparse_coo or x.device.type != "cpu":
        given = ", ".join(f"{each.layout} on {each.device}" for each in tensors)
        raise LayoutError(f"all_reduce: expected a dense tensor, or one sparse_coo tensor, on the CPU; got {given}")
    if op is not Op.SUM:
        raise OptionError(f"all_reduce: sparse tensors can be summed only, got {op.name}; use .to_dense()")


def all_reduce_sparse(algorithm: Algorithm, global_ranks: list[int], x: Tensor) -> None:
    """Sum a sparse tensor over all ranks, in place; the result is coalesced. Three all-gathers."""
    size = len(global_ranks)
    mine = x.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    header = torch.tensor([values.shape[0], x.sparse_dim(), *x.shape], dtype=torch.int64, device="cpu")
    headers = [each.tolist() for each in _gathered(algorithm, size, header)]
    if any(each[1:] != headers[0][1:] for each in headers):
        said = "; ".join(
            f"rank {rank}: {tuple(each[2:])} with {each[1]} sparse dimensions"
            for rank, each in zip(global_ranks, headers, strict=True)
        )
        raise AgreementError(
            f"the ranks sum sparse tensors of different shapes, and no result has been written: {said}"
        )
    counts = [each[0] for each in headers]
    most = max(counts)
    all_values = _gathered(algorithm, size, _padded(values, most))
    all_indices = _gathered(algorithm, size, _padded(indices.t(), most))
    found = torch.cat([each[:count] for each, count in zip(all_indices, counts, strict=True)]).t()
    summed = torch.cat([each[:count] for each, count in zip(all_values, counts, strict=True)])
    total = torch.sparse_coo_tensor(found, summed, x.shape, check_invariants=False).coalesce()
    with torch.no_grad():
        x.copy_(total)


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


def _gathered(algorithm: Algorithm, size: int, rows: Tensor) -> list[Tensor]:
    gathered = rows.new_empty((size, rows.numel()))
    algorithm.all_gather(gathered.unbind(), rows.view(-1))
    return [each.view(rows.shape) for each in gathered.unbind()]
