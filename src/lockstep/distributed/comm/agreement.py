"""Exchanges small objects between the ranks, and compares their modules before any data moves.

:func:`all_gather_object` exchanges JSON values. If they are equal on all ranks, it takes one collective, whose size
does not depend on the number of ranks; otherwise what differs is gathered, in bounded memory.

Ranks describe the module that they are about to replicate in lines: options, parameters, buffers. They compare digests
of these descriptions; only if the digests differ, two descriptions are sent, and every rank raises the same error,
which names the rank, the line and both values. A rank that cannot describe its module sends its error instead, so that
no rank waits for it.
"""

import json
import zlib
from collections.abc import Collection, Sequence
from ctypes import string_at
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lockstep._base.buckets import contiguous_stride, dense_stride
from lockstep._base.digests import text_digest
from lockstep._base.dtensors import local_part
from lockstep._base.inner_tensors import describe, is_plain
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.record import are_alike, bits_of
from lockstep.errors import AgreementError

_WHAT_BYTES, _LENGTH_BYTES, _TEXT_BYTES = 4, 4, 120
"""Sizes in a rank's first message: a checksum of what is gathered, the length of its text, and the text, or its digest
if it is longer."""
_BYTES_AT_ONCE = 4 << 20
"""Bytes of long texts sent at once, of all ranks together."""
_HEAD_BYTES = _WHAT_BYTES + _LENGTH_BYTES


def all_gather_object(value: Any, what: str, collectives: Collectives) -> list[Any]:
    """Return the values of all ranks, in rank order; equal values may be one object.

    Communicates one all-reduce of 4 KiB, which tells if values are equal. If they differ, an all-gather of 128 bytes
    from each rank follows; if some are longer, all-gathers of the texts, 4 MiB of all ranks together each. A rank keeps
    one copy of equal texts. ``what`` is the same on all ranks, or they have made different calls, which they all raise.
    """
    text = json.dumps(value)
    data = text.encode()
    # Nearly always all ranks say the same, and a sum of their bits shows that at a cost that does not grow with them.
    shown = data if len(data) <= _TEXT_BYTES else text_digest(text, bits=256).to_bytes(32)
    of_what = zlib.crc32(what.encode()).to_bytes(_WHAT_BYTES)
    own = of_what + len(data).to_bytes(_LENGTH_BYTES) + shown.ljust(_TEXT_BYTES, b"\0")
    if same_on_all_ranks(own, what, collectives):
        return [json.loads(data)] * collectives.world
    heads = _all_gather(own, what, collectives)
    if any(not head.startswith(of_what) for head in heads):
        error = _different(what, collectives)
        raise collectives.failure(what, error) from error
    texts = {head: head[_HEAD_BYTES:][: _length(head)] for head in heads}
    if max(map(_length, heads)) > _TEXT_BYTES:
        texts = _whole_texts(heads, data, what, collectives)
    values = {head: json.loads(each) for head, each in texts.items()}
    return [values[head] for head in heads]


def same_on_all_ranks(data: bytes, what: str, collectives: Collectives) -> bool:
    """Return True if all ranks have the same bytes, of which all have equally many; communicates one all-reduce."""
    row = torch.frombuffer(bytearray(bits_of(int.from_bytes(data), 8 * len(data))), dtype=torch.uint8)
    total = row.to(collectives.device, torch.float32)
    collectives.all_reduce(total, what, blocking=True).wait()
    return are_alike(total.tolist(), collectives.world)


def objects_of(ranks: Sequence[int], value: Any, what: str, collectives: Collectives) -> list[Any]:
    """Return the values of some group ranks; communicates what :func:`all_gather_object` does."""
    gathered = all_gather_object(value if collectives.rank in ranks else None, what, collectives)
    return [gathered[rank] for rank in ranks]


def _whole_texts(heads: Sequence[bytes], data: bytes, what: str, collectives: Collectives) -> dict[bytes, bytes]:
    """Return the text for each head, from the first rank that has it."""
    texts = {head: bytearray() for head in heads}
    speakers = [heads.index(head) for head in texts]
    longest, size = max(map(_length, heads)), max(_TEXT_BYTES, _BYTES_AT_ONCE // collectives.world)
    for start in range(0, longest, size):
        piece = data[start : start + size].ljust(min(size, longest - start), b"\0")
        pieces = _all_gather(piece, what, collectives)
        for text, rank in zip(texts.values(), speakers, strict=True):
            text += pieces[rank]
    return {head: bytes(text[: _length(head)]) for head, text in texts.items()}


def _all_gather(data: bytes, what: str, collectives: Collectives) -> list[bytes]:
    """Return every rank's bytes, which all have the same length."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(collectives.device)
    gathered = torch.cat(collectives.all_gather(own, what)).cpu()
    joined = string_at(gathered.data_ptr(), gathered.nbytes)
    return [joined[start : start + len(data)] for start in range(0, len(joined), len(data))]


def _different(what: str, collectives: Collectives) -> AgreementError:
    """Return the error for ranks of which each gathers something else, such as a part of ``save`` and of ``resume``."""
    gathered = _all_gather(what.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), what, collectives)
    texts = [each.rstrip(b"\0").decode(errors="replace") for each in gathered]
    lines = [f"rank {rank}: {text}" for rank, text in zip(collectives.global_ranks, texts, strict=True)]
    return AgreementError(f"the ranks compare different things: {'; '.join(lines)}")


def _length(head: bytes) -> int:
    return int.from_bytes(head[_WHAT_BYTES:_HEAD_BYTES])


class Line(NamedTuple):
    """A property that must be the same on all ranks, and its value."""

    name: str
    value: str


def describe_tensor(tensor: Tensor, layout: bool = True) -> str:
    """Return dtype, shape, the placements of a DTensor, what is inside of one that is not plain, and with ``layout``
    strides that are not contiguous."""
    local = local_part(tensor)
    shape = tuple(local.shape)
    text = f"{str(local.dtype).removeprefix('torch.')} of shape {shape}"
    made_of = describe(local)
    if made_of:
        text += f", {made_of}"
    if layout and is_plain(local) and (strides := dense_stride(shape, local.stride())) != contiguous_stride(shape):
        text += f", strides {strides}"
    if tensor is not local:
        text += f", placed {tensor.placements}"  # type: ignore[attr-defined]
    return text


def check_same_on_all_ranks(
    lines: Sequence[Line],
    collectives: Collectives,
    numbers: Sequence[int] = (),
    error: str = "",
    what: str = "backward()",
) -> list[list[int]]:
    """Raise :class:`AgreementError`, on every rank, unless all have the same lines; return every rank's ``numbers``.

    ``what`` is the call of the program: ranks in different calls raise that.

    A rank without lines gives the reason in ``error``, which every rank raises. Communicates what
    :func:`all_gather_object` does, and once more if there is a difference.
    """
    digest = None if error else text_digest(json.dumps(lines))
    rows = all_gather_object([digest, *numbers], what, collectives)
    if digest is not None and first_differing(rows) is None:
        return [list(numbers)] * collectives.world
    digests = [each for each, *_ in rows]
    ranks = collectives.global_ranks
    if None in digests:
        failed = digests.index(None)
        (error,) = objects_of([failed], error, what, collectives)
        raise AgreementError(f"rank {ranks[failed]} cannot replicate its module: {error}")
    other = first_differing(digests)
    if other is not None:
        reference, differing = objects_of([0, other], lines, what, collectives)
        _raise_difference(reference, differing, (ranks[0], ranks[other]))
    return [each for _, *each in rows]


def first_differing(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value differs from that of the first rank."""
    if not values or values.count(values[0]) == len(values):
        return None
    return next(rank for rank, value in enumerate(values) if value != values[0])


def check_new_everywhere(names: Sequence[str], new: Sequence[Collection[int]], global_ranks: Sequence[int]) -> None:
    """Raise :class:`AgreementError`, on every rank, if a parameter is new on some ranks only.

    ``new``: for each rank, the indices of its new parameters in ``names``.
    """
    for index in sorted(set().union(*new)):
        having = [rank for rank, numbers in zip(global_ranks, new, strict=True) if index in numbers]
        if len(having) < len(new):
            lacking = next(rank for rank in global_ranks if rank not in having)
            raise AgreementError(
                f"parameter {names[index]} is another object than when the module was replicated on rank {having[0]}, "
                f"and still the same on rank {lacking}; load, replace and convert parameters on every rank alike"
            )


def _raise_difference(
    reference: Sequence[Sequence[str]], lines: Sequence[Sequence[str]], ranks: tuple[int, int]
) -> NoReturn:
    first, rank = ranks
    for mine, theirs in zip(reference, lines, strict=False):
        if mine != theirs:
            raise AgreementError(_difference(ranks, mine, theirs, {name for name, _ in reference}))
    here, there = (first, reference), (rank, lines)
    (longer, more), (shorter, less) = (here, there) if len(reference) > len(lines) else (there, here)
    name, value = more[len(less)]
    raise AgreementError(
        f"ranks differ: rank {longer} has {name} ({value}), rank {shorter} has no such "
        f"thing ({len(reference)} entries on rank {first}, {len(lines)} on rank {rank}); build the same module "
        "on every rank"
    )


def _difference(ranks: tuple[int, int], mine: Sequence[str], theirs: Sequence[str], known: set[str]) -> str:
    first, rank = ranks
    if mine[0] == theirs[0]:
        text = (
            f"ranks differ in {mine[0]}: rank {first} has {mine[1]}; rank {rank} has {theirs[1]}; make it the same on "
            "all ranks"
        )
        if mine[0].startswith("buffer "):
            text += (
                '. If each rank is to have its own, pass buffer_policy="local" for all buffers, or the module of this '
                "one as ignored_modules=[...]"
            )
        if "strides" in mine[1] + theirs[1]:
            text += f" ({mine[0]} of rank {rank} appears not to match strides of the same param in process {first})"
        return text
    hint = "in another order" if theirs[0] in known else "of another module"
    return (
        f"ranks differ: where rank {first} has {mine[0]} ({mine[1]}), rank {rank} has {theirs[0]} ({theirs[1]}), "
        f"{hint}; register the same parameters and buffers, in the same order, on every rank"
    )
