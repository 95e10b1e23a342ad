"""Compares the values that all ranks are to have alike when they save: each rank tells a digest of its own."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep._base.inner_tensors import read_bytes
from lockstep.errors import AgreementError

LONGEST = 60
"""Number of characters up to which a value itself is told, for messages."""


def told(value: Any) -> str:
    """Return a short text that is the same for equal values: a short value itself, else its type and a digest."""
    text = repr(value)
    if isinstance(value, int | float | str | bool | None) and len(text) <= LONGEST:
        return text
    digest = hashlib.sha256()
    _add(digest, value)
    return f"{type(value).__name__} with the digest {digest.hexdigest()[:12]}"


def _add(digest: Any, value: Any) -> None:
    """Add a value to a digest, whatever its memory and the order of its keys."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(read_bytes(value))
        return
    digest.update(type(value).__name__.encode())
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        digest.update(str(len(value)).encode())
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, set | frozenset):
        digest.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            _add(digest, each)
    elif isinstance(value, int | float | complex | str | bytes | bool | None):
        digest.update(repr(value).encode())
    # Nothing is compared of other kinds, such as sparse tensors, than that they are of the same type.


def check_same_values(names: Sequence[int], values: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`AgreementError`, on every rank, if the ranks have told different values under one name."""
    for rank, theirs in zip(names, values, strict=True):
        for name, first in values[0].items():
            if theirs[name] != first:
                raise AgreementError(
                    f"save(): ranks differ in {name}: it is {first} on rank {names[0]}, and {theirs[name]} on rank "
                    f"{rank}. One file has it for all ranks: give the same on all (such as lockstep.mean() of it), or "
                    f"mark it, {name}=lockstep.checkpoints.per_rank(...), so that each rank saves its own"
                )
