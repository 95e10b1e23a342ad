"""What the tests of `shm` share: tensors in either kind of memory, collectives and what they give, errors."""

from __future__ import annotations

import functools
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lockstep.distributed import ProcessGroupShm, ShmOptions
from lockstep.shm import one_host

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FUNCTIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, *HALF)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
WHERE = ("private", "shared", "mixed")

ONE_EXCHANGE = one_host.ONE_EXCHANGE_BYTES // 4  # elements of float32
CHUNK = one_host.CHUNK_BYTES // 4
BIG = 100_000  # elements of float32 that do not go at once


# ------------------------------------------------------------------------------------------- values


def can_reduce(dtype, op):
    if op.startswith("B"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return (dtype, op) != (torch.bool, "AVG") and not (dtype.is_complex and op in ("MIN", "MAX"))


def combined(values, op="SUM"):
    """Return what becomes of the ranks' tensors, in rank order; half precision of more than two is rounded at the
    end."""
    dtype = values[0].dtype
    if op == "AVG" and dtype in INTEGERS:
        return torch.stack(values).long().sum(0).div_(len(values), rounding_mode="trunc").to(dtype)
    wide = dtype in HALF and len(values) > 2 and op in ("SUM", "AVG", "PRODUCT")
    first, *others = [value.float() for value in values] if wide else values
    result = functools.reduce(FUNCTIONS[op], others, first.clone())
    return (result.div_(len(values)) if op == "AVG" else result).to(dtype)


def drawn(rank, numel, dtype=torch.float32, seed=0):
    """A rank's values; any rank can have those of another. Sums of whole numbers may be larger than the dtype holds."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 256)}.get(dtype, (-128, 128))
    return torch.randint(low, high, (numel,), generator=generator).to(dtype)


def exact(rank, numel, dtype=torch.float32, seed=0):
    """Small numbers: whatever the order, their sum and product are exact in every dtype, and no zero has a sign."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * numel + rank)
    x = torch.randint(1 if dtype.is_complex else 0, 4, (numel,), generator=generator).to(dtype)
    return x * (1 + 1j) if dtype.is_complex else x


def same(got, wanted):
    """Asserts that two tensors are the same, bit for bit."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    bits = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (got, wanted)]
    assert torch.equal(*bits), f"{got} instead of {wanted}"


class Placed:
    """A copy of a tensor in private memory, or in the group's: then between a few elements of which none may change."""

    def __init__(self, rank, values, where):
        self.margin = 0
        if where == "private" or (where == "mixed" and rank.rank % 2):
            self.tensor = self.whole = values.clone()
            return
        self.margin = 1 + rank.rank
        self.whole = rank.group.allocate(values.numel() + 2 * self.margin, values.dtype).fill_(1)
        self.tensor = self.whole[self.margin : self.margin + values.numel()].copy_(values)

    def check(self, wanted):
        same(self.tensor, wanted)
        if self.margin:
            assert self.whole[: self.margin].eq(1).all()
            assert self.whole[self.margin + wanted.numel() :].eq(1).all()


# -------------------------------------------------------------------------------------- collectives


def options(kind, op=None, **others):
    made = kind()
    if op is not None:
        made.reduceOp = getattr(ReduceOp, op)
    for name, value in others.items():
        setattr(made, name, value)
    return made


def all_reduced(rank, x, op="SUM"):
    rank.group.allreduce([x], options(dist.AllreduceOptions, op)).wait()  # dist.all_reduce moves complex ones as pairs
    return x


class Run:
    """What one rank gives to a collective and gets: the methods begin one, and return its work and what is to be where.

    Every rank has for rank r, in what is scattered, what it gives to others, turned by r places.
    """

    def __init__(self, rank, given, op, where, root):
        self.rank, self.given, self.op, self.where, self.root = rank, given, op, where, root
        self.group, self.own, self.rest = rank.group, rank.rank, {"group": rank.group, "async_op": True}

    def put(self, values):
        return Placed(self.rank, values, self.where)

    def room(self, count=1):
        return self.put(self.given[0].new_zeros(count * self.given[0].numel()))

    def turned(self, by):
        return [self.given[(by + to) % len(self.given)] for to in range(len(self.given))]

    def all_reduce(self):
        x = self.put(self.given[self.own])
        work = self.group.allreduce([x.tensor], options(dist.AllreduceOptions, self.op))
        return work, [(x, combined(self.given, self.op))]

    def reduce(self):
        x = self.put(self.given[self.own])
        work = self.group.reduce([x.tensor], options(dist.ReduceOptions, self.op, rootRank=self.root))
        return work, [(x, combined(self.given, self.op) if self.own == self.root else self.given[self.own])]

    def broadcast(self):
        x = self.put(self.given[self.own])
        return dist.broadcast(x.tensor, group_src=self.root, **self.rest), [(x, self.given[self.root])]

    def all_gather(self):
        x, outputs = self.put(self.given[self.own]), [self.room() for _ in self.given]
        work = self.group.allgather([[output.tensor for output in outputs]], [x.tensor])
        return work, [(x, self.given[self.own]), *zip(outputs, self.given, strict=True)]

    def all_gather_single(self):
        x, whole = self.put(self.given[self.own]), self.room(len(self.given))
        work = all_gather_single(whole.tensor, x.tensor, **self.rest)
        return work, [(x, self.given[self.own]), (whole, torch.cat(self.given))]

    def reduce_scatter(self):
        parts, output = [self.put(part) for part in self.turned(self.own)], self.room()
        op = getattr(ReduceOp, self.op)
        work = dist.reduce_scatter(output.tensor, [part.tensor for part in parts], op, **self.rest)
        return work, [(output, self.scattered()), *zip(parts, self.turned(self.own), strict=True)]

    def reduce_scatter_single(self):
        whole, output = self.put(torch.cat(self.turned(self.own))), self.room()
        work = reduce_scatter_single(output.tensor, whole.tensor, getattr(ReduceOp, self.op), **self.rest)
        return work, [(output, self.scattered()), (whole, torch.cat(self.turned(self.own)))]

    def scattered(self):
        return combined([self.turned(source)[self.own] for source in range(len(self.given))], self.op)

    def barrier(self):
        return self.group.barrier(), []


COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single")
COLLECTIVES += ("reduce_scatter", "reduce_scatter_single", "barrier")


def finish(work, places):
    work.wait()
    for placed, wanted in places:
        placed.check(wanted)


def every_collective(rank, numel, dtype=torch.float32, op="SUM", where="private", root=0, drawn=exact):
    """Runs each native collective once and checks what it gives."""
    run = Run(rank, [drawn(each, numel, dtype) for each in range(rank.world)], op, where, root)
    for name in COLLECTIVES:
        finish(*getattr(run, name)())


# ------------------------------------------------------------------------------------------- errors


def error_of(call):
    """Return what a call raises, as type and text, and the seconds that took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error), str(error), time.monotonic() - begin
    return None, "", time.monotonic() - begin


def still_works(rank):
    x = torch.full((BIG,), rank.rank + 1.0)
    dist.all_reduce(x, group=rank.group)
    return x.unique().tolist() == [rank.world * (rank.world + 1) / 2]


def group_of(store, rank, world=2, timeout=10.0, host="a", **others):
    return ProcessGroupShm(store, rank, world, timedelta(seconds=timeout), ShmOptions(host=host), **others)


def begin_shm(rank, store, pg_options=None):
    """Make the default group, of all ranks; they meet in the file ``store``."""
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, rank.world),
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=60),
        pg_options=pg_options,
    )


def on_hosts(rank, hosts, store, between=None):
    """The default group anew, over several hosts."""
    dist.destroy_process_group()
    begin_shm(rank, store, ShmOptions(host=hosts[rank.rank], between=between))
    return dist.group.WORLD


def over_hosts(group):
    """Return True if the ranks of a group found themselves on several hosts."""
    return group._runtime.inter_host is not None
