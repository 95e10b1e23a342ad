"""The collectives that run in shared memory itself, with PyTorch's names and arguments.

Each method checks its tensors and begins a collective; tensors are flattened when it runs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lockstep._base.compiler import outside_compiler
from lockstep.errors import AgreementError, LayoutError, OptionError
from lockstep.shm.arguments import check_numel, check_tensors, check_writable, flatten, unflatten, with_overloads
from lockstep.shm.many_hosts import Algorithm
from lockstep.shm.messages import Op
from lockstep.shm.works import ShmWork

A = TypeVar("A")
B = TypeVar("B")


class NativeCollectives:
    """The collectives as methods; the process group provides its rank and size, and :meth:`_begin`."""

    rank: Callable[[], int]
    size: Callable[[], int]

    _global_ranks: list[int]
    """The group's ranks as ranks of the default group, for use in messages."""

    @abstractmethod
    def _begin(self, what: str, run: Callable[[Algorithm], object], outputs: list[Tensor], opts: Any) -> ShmWork:
        """Begin a collective that calls ``run``; profilers show it under the name ``what``."""

    # ----------------------------------------------------------------------- reduce and broadcast

    @outside_compiler
    @with_overloads(dist.AllreduceOptions, ["tensors tensor"], ["op", "timeout"])
    def allreduce(
        self, tensors: list[Tensor], opts: Any, *, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> Any:
        """Reduce a tensor over all ranks, in place; it may be sparse.

        This rank's tensor is multiplied by ``factor`` during the reduction, without a further pass. Factors may differ.
        ``rounded_to``: a dtype to which each rank's values are rounded before they are reduced, and the result after
        it; the ranks have to share memory.
        """
        _check_single(tensors, "all_reduce")
        return self._all_reduce(tensors, opts, factor, rounded_to)

    def _all_reduce_sparse(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        check_sparse(tensors, _op(opts))
        global_ranks = self._global_ranks

        def run(algorithm: Algorithm) -> None:
            all_reduce_sparse(algorithm, global_ranks, tensors[0])

        return self._begin("all_reduce", run, tensors, opts)

    @outside_compiler
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors of one dtype over all ranks, in place, moved as one."""
        check_tensors(tensors, "all_reduce")
        return self._all_reduce(tensors, opts)

    def _all_reduce(
        self, tensors: list[Tensor], opts: Any, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> ShmWork:
        if tensors and tensors[0].layout != torch.strided:
            return self._all_reduce_sparse(tensors, opts)
        if factor != 1 and tensors and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            raise OptionError(f"all_reduce: a factor needs a floating-point or complex tensor, got {tensors[0].dtype}")
        op, count = _op(opts), len(tensors)
        return self._in_place("all_reduce", lambda a, x: a.all_reduce(x, op, count, factor, rounded_to), tensors, opts)

    def _in_place(
        self, what: str, move: Callable[[Algorithm, Tensor], object], tensors: list[Tensor], opts: Any, to: bool = True
    ) -> ShmWork:
        """Begin a collective that calls ``move`` with all elements of the tensors in one dimension, and writes the
        result back if it comes ``to`` this rank."""
        check_tensors(tensors, what)
        if to:
            check_writable(tensors, what)

        def run(algorithm: Algorithm) -> None:
            x = flatten(tensors)
            move(algorithm, x)
            if to:
                unflatten(x, tensors)

        return self._begin(what, run, tensors, opts)

    @outside_compiler
    @with_overloads(dist.ReduceOptions, ["tensors tensor"], ["root", "op", "timeout"])
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce a tensor over all ranks; the root gets the result."""
        _check_single(tensors, "reduce")
        op, root = _op(opts), _root(opts, self.size(), "reduce")
        return self._in_place("reduce", lambda a, x: a.reduce(x, op, root), tensors, opts, to=self.rank() == root)

    @outside_compiler
    @with_overloads(dist.BroadcastOptions, ["tensors tensor"], ["root", "timeout"])
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy the root's tensor to every rank, in place."""
        _check_single(tensors, "broadcast")
        root = _root(opts, self.size(), "broadcast")
        return self._in_place("broadcast", lambda a, x: a.broadcast(x, root), tensors, opts, to=self.rank() != root)

    @outside_compiler
    @with_overloads(dist.BarrierOptions, [], ["timeout"])
    def barrier(self, opts: Any) -> Any:
        """Wait for every rank."""
        return self._begin("barrier", lambda algorithm: algorithm.barrier(), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; as after any collective, the error names all ranks that did not come."""
        self.barrier(timeout=timeout).wait()

    # ------------------------------------------------------------------------------------- gather

    @outside_compiler
    @with_overloads(AllgatherOptions, ["output_tensors", "input_tensors input_tensor"], ["timeout"])
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Give every rank the tensors of all ranks, each in a tensor of its own."""
        return self._all_gather(outputs, inputs, opts)

    @outside_compiler
    @with_overloads(AllgatherOptions, ["output_lists", "input_list"])
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Give every rank several tensors of all ranks, with one list of outputs for each rank."""
        _check_count(outputs, self.size(), "all_gather_coalesced")
        for given in outputs:
            _pairs(given, inputs, "all_gather_coalesced")
        return self._all_gather([list(given) for given in zip(*outputs, strict=True)], inputs, opts)

    def _all_gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        for given, x in _pairs(outputs, inputs, "all_gather"):
            check_tensors([x, *given], "all_gather")
            check_writable(given, "all_gather")
            _check_count(given, self.size(), "all_gather")
            check_numel(given, x.numel(), "all_gather")

        def run(algorithm: Algorithm) -> None:
            for given, x in zip(outputs, inputs, strict=True):
                parts = [flatten([each]) for each in given]
                algorithm.all_gather(parts, flatten([x]), len(inputs))
                for part, each in zip(parts, given, strict=True):
                    unflatten(part, [each])

        return self._begin("all_gather", run, [each for given in outputs for each in given], opts)

    @outside_compiler
    @with_overloads(AllgatherOptions, ["output", "input"], single=False)
    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any) -> Any:
        """Give every rank the tensors of all ranks, concatenated in one tensor."""
        return self._all_gather_single([output], [x], opts)

    @outside_compiler
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give every rank several tensors of all ranks; each output has the ranks' tensors for one input."""
        return self._all_gather_single(outputs, inputs, opts)

    def _all_gather_single(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        for output, x in _pairs(outputs, inputs, "all_gather_single"):
            check_tensors([x, output], "all_gather_single")
            check_writable([output], "all_gather_single")
            check_numel([output], x.numel() * self.size(), "all_gather_single")

        def run(algorithm: Algorithm) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                whole = flatten([output])
                algorithm.all_gather(whole.view(self.size(), -1).unbind(), flatten([x]), len(inputs))
                unflatten(whole, [output])

        return self._begin("all_gather_single", run, outputs, opts)

    # -------------------------------------------------------------------------------- reduce-scatter

    @outside_compiler
    @with_overloads(dist.ReduceScatterOptions, ["output_tensors output", "input_tensors input"], ["op", "timeout"])
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Reduce a list of tensors, one for each rank, over all ranks; each rank gets the result for itself."""
        op = _op(opts)
        for output, given in _pairs(outputs, inputs, "reduce_scatter"):
            check_tensors([output, *given], "reduce_scatter")
            check_writable([output], "reduce_scatter")
            _check_count(given, self.size(), "reduce_scatter")
            check_numel(given, output.numel(), "reduce_scatter")

        def run(algorithm: Algorithm) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                result = flatten([output])
                algorithm.reduce_scatter(result, [flatten([each]) for each in given], op, len(outputs))
                unflatten(result, [output])

        return self._begin("reduce_scatter", run, outputs, opts)

    @outside_compiler
    @with_overloads(dist.ReduceScatterOptions, ["outputTensor output", "inputTensor input"], single=False)
    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> Any:
        """Reduce one tensor over all ranks and give each rank its part; the parts for all ranks are in one tensor."""
        return self._reduce_scatter_single([output], [x], opts)

    @outside_compiler
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over all ranks, each with the parts for all ranks; each rank gets its part of each."""
        return self._reduce_scatter_single(outputs, inputs, opts)

    def _reduce_scatter_single(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        op = _op(opts)
        for output, x in _pairs(outputs, inputs, "reduce_scatter_single"):
            check_tensors([output, x], "reduce_scatter_single")
            check_writable([output], "reduce_scatter_single")
            check_numel([x], output.numel() * self.size(), "reduce_scatter_single")

        def run(algorithm: Algorithm) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                result = flatten([output])
                algorithm.reduce_scatter(result, flatten([x]).view(self.size(), -1).unbind(), op, len(outputs))
                unflatten(result, [output])

        return self._begin("reduce_scatter_single", run, outputs, opts)

    # The names that PyTorch used before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


_OPS = {int(getattr(dist.ReduceOp, op.name)): op for op in Op}


def _op(opts: Any) -> Op:
    if opts is None:
        return Op.SUM
    reduce_op: Any = getattr(opts, "reduceOp", opts)
    reduce_op = getattr(reduce_op, "op", reduce_op)
    try:
        return _OPS[int(reduce_op)]
    except KeyError:
        names = ", ".join(op.name for op in Op)
        raise OptionError(f"the shm process group does not know {reduce_op}; it knows {names}") from None


def _root(opts: Any, size: int, what: str) -> int:
    root = int(opts.rootRank)
    if not 0 <= root < size:
        raise OptionError(f"{what}: expected a rank of the group from 0 to {size - 1}, got {root}")
    return root


def _check_single(tensors: Sequence[Tensor], what: str) -> None:
    """Raise for several tensors: Gloo would reduce these with each other, as if they belonged to several ranks."""
    if len(tensors) > 1:
        raise LayoutError(
            f"{what}: expected one tensor, got {len(tensors)}; call it for each, or allreduce_coalesced for all"
        )


def _pairs(outputs: Sequence[A], inputs: Sequence[B], what: str) -> list[tuple[A, B]]:
    """Pair each output with its input; raise unless there are equally many."""
    if len(outputs) != len(inputs):
        raise LayoutError(f"{what}: expected as many outputs as inputs, got {len(outputs)} and {len(inputs)}")
    return list(zip(outputs, inputs, strict=True))


def _check_count(given: Sequence[object], size: int, what: str) -> None:
    if len(given) != size:
        raise LayoutError(f"{what}: expected {size} tensors, one for each rank, got {len(given)}")


# ----------------------------------------------------------------------------------- sums of sparse tensors


def check_sparse(tensors: list[Tensor], op: Op) -> None:
    """Raise unless there is exactly one tensor, sparse COO and on the CPU, and the reduction is a sum."""
    x = tensors[0]
    if len(tensors) != 1 or x.layout != torch.sparse_coo or x.device.type != "cpu":
        layouts = ", ".join(f"{each.layout} on {each.device}" for each in tensors)
        raise LayoutError(f"all_reduce: expected a dense tensor, or one sparse_coo tensor, on the CPU; got {layouts}")
    if op is not Op.SUM:
        raise OptionError(f"all_reduce: sparse tensors can be summed only, got {op.name}; use .to_dense()")


def all_reduce_sparse(algorithm: Algorithm, global_ranks: list[int], x: Tensor) -> None:
    """Sum a sparse tensor over all ranks, in place; the result is coalesced.

    Every rank gathers the entries of all, in three all-gathers, and adds them up in the order of the ranks.
    """
    size = len(global_ranks)
    own_entries = x.detach().coalesce()
    indices, values = own_entries.indices(), own_entries.values()
    header = torch.tensor([values.shape[0], x.sparse_dim(), *x.shape], dtype=torch.int64, device="cpu")
    headers = [each.tolist() for each in _gathered(algorithm, size, header)]
    if any(each[1:] != headers[0][1:] for each in headers):
        shapes = "; ".join(
            f"rank {rank}: {tuple(each[2:])} with {each[1]} sparse dimensions"
            for rank, each in zip(global_ranks, headers, strict=True)
        )
        raise AgreementError(
            f"the ranks sum sparse tensors of different shapes, and no result has been written: {shapes}"
        )
    counts = [each[0] for each in headers]
    most = max(counts)
    all_values = _gathered(algorithm, size, _padded(values, most))
    all_indices = _gathered(algorithm, size, _padded(indices.t(), most))
    all_entries = torch.cat([each[:count] for each, count in zip(all_indices, counts, strict=True)]).t()
    summed = torch.cat([each[:count] for each, count in zip(all_values, counts, strict=True)])
    total = torch.sparse_coo_tensor(all_entries, summed, x.shape, check_invariants=False).coalesce()
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
