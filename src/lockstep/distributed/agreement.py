"""What ranks compare before they move data.

Ranks describe what they are about to replicate, line by line: options, parameters, buffers. One exchange of fixed size
compares digests of the descriptions; only if they differ are the descriptions themselves exchanged, and every rank
raises the same error, which names the rank, the line and both values. A rank that cannot even describe its module
sends its error instead, so nobody waits for it.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from lockstep.buckets import contiguous_stride, dense_stride
from lockstep.distributed.collectives import Collectives
from lockstep.dtensors import local_part
from lockstep.errors import AgreementError

_DIGEST_BYTES = 16


class Line(NamedTuple):
    """One thing that must be the same on all ranks: what it is, and its value."""

    name: str
    value: str


class Description(NamedTuple):
    """What a rank is about to replicate, or why it cannot."""

    lines: Sequence[Line]
    error: str = ""


def describe_tensor(tensor: Tensor, layout: bool = True) -> str:
    """Dtype and shape, a DTensor's placements, and the strides if ``layout`` counts and is out of the ordinary."""
    local = local_part(tensor)
    shape = tuple(local.shape)
    text = f"{str(local.dtype).removeprefix('torch.')} of shape {shape}"
    strides = dense_stride(shape, local.stride())
    if layout and strides != contiguous_stride(shape):
        text += f", strides {strides}"
    if tensor is not local:
        text += f", placed {tensor.placements}"  # type: ignore[attr-defined]
    return text


def agree(description: Description, numbers: Sequence[int], collectives: Collectives) -> list[list[int]]:
    """Raise :class:`AgreementError`, on every rank, unless all describe the same; returns everybody's ``numbers``.

    Communicates one all-gather of a few bytes for each rank, and three more only if there is a difference.
    """
    text = json.dumps([description.error, description.lines])
    digest = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES] if not description.error else bytes(_DIGEST_BYTES)
    own = [*digest, len(numbers)]
    rows = [row.tolist() for row in collectives.all_gather(_row(own, collectives), "digest of the module")]
    if any(row[:_DIGEST_BYTES] != rows[0][:_DIGEST_BYTES] for row in rows) or description.error:
        texts = [data.decode() for data in collectives.all_gather_bytes(text.encode(), "description of the module")]
        _raise_difference([json.loads(each) for each in texts], collectives.global_ranks)
    longest = max(int(row[-1]) for row in rows)
    if not longest:
        return [[] for _ in rows]
    padded = _row([*numbers, *[-1] * (longest - len(numbers))], collectives)
    gathered = collectives.all_gather(padded, "modules on this group")
    return [[int(n) for n in row.tolist() if n >= 0] for row in gathered]


def check_new_everywhere(names: Sequence[str], new: Sequence[Collection[int]], global_ranks: Sequence[int]) -> None:
    """Raise :class:`AgreementError`, on every rank, if a parameter is new on some ranks only.

    ``new``: of each rank, the numbers of its new parameters among ``names``.
    """
    for index in sorted(set().union(*new)):
        having = [rank for rank, numbers in zip(global_ranks, new, strict=True) if index in numbers]
        if len(having) < len(new):
            lacking = next(rank for rank in global_ranks if rank not in having)
            raise AgreementError(
                f"parameter {names[index]} is another object than when the module was replicated on rank {having[0]}, "
                f"and still the same on rank {lacking}; load, replace and convert parameters on every rank alike"
            )


def _row(numbers: Sequence[int], collectives: Collectives) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=collectives.device)


def _raise_difference(
    descriptions: Sequence[tuple[str, list[tuple[str, str]]]], global_ranks: Sequence[int]
) -> NoReturn:
    for rank, (error, _) in zip(global_ranks, descriptions, strict=True):
        if error:
            raise AgreementError(f"rank {rank} cannot replicate its module: {error}")
    first, reference = global_ranks[0], descriptions[0][1]
    for rank, (_, lines) in zip(global_ranks, descriptions, strict=True):
        for mine, theirs in zip(reference, lines, strict=False):
            if mine != theirs:
                raise AgreementError(_difference((first, rank), mine, theirs, {name for name, _ in reference}))
        if len(lines) != len(reference):
            here, there = (first, reference), (rank, lines)
            (longer, more), (shorter, less) = (here, there) if len(reference) > len(lines) else (there, here)
            name, value = more[len(less)]
            raise AgreementError(
                f"ranks differ: rank {longer} has {name} ({value}), rank {shorter} has no such "
                f"thing ({len(reference)} entries on rank {first}, {len(lines)} on rank {rank}); build the same module "
                "on every rank"
            )
    raise AgreementError("ranks differ, but describe the same; this is a bug in lockstep")


def _difference(ranks: tuple[int, int], mine: Sequence[str], theirs: Sequence[str], known: set[str]) -> str:
    first, rank = ranks
    if mine[0] == theirs[0]:
        text = (
            f"ranks differ in {mine[0]}: {mine[1]} on rank {first}, {theirs[1]} on rank {rank}; make it the same on all"
        )
        if "strides" in mine[1] + theirs[1]:
            text += f" ({mine[0]} of rank {rank} appears not to match strides of the same param in process {first})"
        return text
    hint = "in another order" if theirs[0] in known else "of another module"
    return (
        f"ranks differ: where rank {first} has {mine[0]} ({mine[1]}), rank {rank} has {theirs[0]} ({theirs[1]}), "
        f"{hint}; register the same parameters and buffers, in the same order, on every rank"
    )
