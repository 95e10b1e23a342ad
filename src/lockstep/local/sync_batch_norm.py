"""Batch normalisation over the whole batch, instead of the rows of each rank or replica."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import checkpoint

from lockstep._base.compiler import outside_compiler
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, resolve_group
from lockstep.distributed.reduction.autograd.graph import keep_means
from lockstep.errors import LayoutError, NotReplicableError
from lockstep.local.exchange import Replica, current_replica
from lockstep.loop.gather_rows import gather_row
from lockstep.phases import Phases

Statistics = tuple[int, Tensor, Tensor]
"""How many values each channel has, their means and their variances."""

_FORWARDS = _BatchNorm.forward, torch.nn.SyncBatchNorm.forward
_numbers = itertools.count()
_CHECKPOINTED = (
    "SyncBatchNorm inside a checkpointed segment of a replica: recomputing it would need the other replicas' rows, "
    "which are recomputed at other times. Leave it out of the segment, checkpoint around the whole DataParallel, or "
    "use torch.nn.BatchNorm there"
)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics, in training, are taken over the rows of all ranks and replicas together.

    Arguments, buffers and state are those of ``torch.nn.BatchNorm1d``; inputs have shape (N, C) or (N, C, ...), on any
    device. Every rank of a process group, and inside :class:`~lockstep.DataParallel` every replica, gets the same mean
    and variance as one device would with the whole batch, forward and backward, and the same running statistics. The
    numbers of rows may differ, and be 0; those of a padding batch of :func:`lockstep.batches` count nothing. In
    ``eval()``, and in one process outside of DataParallel, it is plain batch normalisation. (Without running statistics
    the replicas synchronise in ``eval()``, too; ranks do not.)

    Communicates, in training, count, mean and variance (2 C + 1 numbers): from each replica to each other, then in one
    all-gather over the ranks, and in one all-to-all in each backward. While such a layer of several ranks exists, no
    bucket of gradients leaves before the end of backward. Every rank and replica must call the same of these modules in
    the same order; if a replica does not, all raise an error, and so do ranks that share memory. Inputs in half
    precision are kept in float32 for backward. Inside another DataParallel, statistics are over all rows of the
    outermost one. In a checkpointed segment of a replica it is an error
    (:class:`~lockstep.errors.NotReplicableError`); around the whole DataParallel, and on ranks, it is right.

    Where ranks have different numbers of rows, ``accumulate(model, weight=rows)`` with the sum of the losses gives the
    gradients of one process, as without this layer.

    Args:
        args, kwargs: Those of ``torch.nn.BatchNorm1d``.
        process_group: The ranks; the default group if None, and this process alone if there is none.

    Raises:
        AgreementError: Some ranks call it under ``torch.no_grad()``. Raised on every rank.
        LayoutError: The input has no channels, or all ranks and replicas together have one value per channel or none.
        PeerError: A backward pass has failed on another rank.

    Stands for ``torch.nn.SyncBatchNorm``, which is for accelerators alone, and on these faster.

    >>> import torch, lockstep
    >>> network = lockstep.local.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    >>> parallel = lockstep.DataParallel(network, device_ids=["cpu", "cpu"])
    >>> parallel(torch.randn(4, 3)).mean(0).abs().max() < 1e-6
    tensor(True)
    """

    process_group: Group | None = None
    _met_without_graph = False  # the last use was in a replica, without gradients

    def __init__(self, *args: Any, process_group: Group | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group
        self._meeting = next(_numbers)  # replicas meet under their original's number

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._meeting = next(_numbers)  # a copied or unpickled layer meets on its own

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncBatchNorm":
        memo[id(self.process_group)] = self.process_group  # has no copies
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(vars(self), memo))
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise LayoutError(f"expected an input of shape (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the input with the statistics of all rows."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        replica = current_replica()
        group = resolve_group(self.process_group) if self.training else None
        group = None if group is None or group.size() == 1 else group
        if replica is None:
            self._refuse_recomputation()
            if group is None:
                return super().forward(input)
        else:
            self._refuse_checkpoint(replica)
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        count, mean, variance = self._over_all(_statistics(wide), replica, group)
        if self.training and self.track_running_stats:
            self._track(count, mean.detach(), variance.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (wide * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _refuse_checkpoint(self, replica: Replica) -> None:
        """Raise inside a checkpointed segment: it is recomputed for one replica, with no other replicas to meet."""
        if any(frame.f_globals.get("__name__") == checkpoint.__name__ for frame in replica.frames()):
            raise NotReplicableError(_CHECKPOINTED)
        self._met_without_graph = not torch.is_grad_enabled()

    def _refuse_recomputation(self) -> None:
        """Raise if a backward pass runs again what replicas ran without a graph: it is another kind of checkpoint."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._met_without_graph:
            raise NotReplicableError(_CHECKPOINTED)
        self._met_without_graph = False

    @outside_compiler
    def _over_all(self, own: Statistics, replica: Replica | None, group: Group | None) -> Statistics:
        """Return the statistics of all rows from those of each replica and rank; gradients flow to all rows."""
        everybody, name = [own], f"SyncBatchNorm {self._meeting}"
        if replica is not None:
            everybody = replica.all_gather(name, own)
        if group is not None:
            keep_means(self)
            own = _together(everybody, own[1].device)
            if replica is None:
                everybody = _over_ranks(own, group)
            else:
                first = replica.is_first  # exchanges for all replicas of this rank
                everybody = replica.all_gather(f"{name} on all ranks", _over_ranks(own, group) if first else None)[0]
        found = _together(everybody, own[1].device)
        if found[0] <= 1:
            who = "replicas" if group is None else "ranks"
            raise LayoutError(
                f"Expected more than 1 value per channel when training, got {found[0]} in all {who} together"
            )
        return found

    @torch.no_grad()
    def _track(self, count: int, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / int(self.num_batches_tracked) if factor is None else factor
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), factor or 0.0)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: Group | None = None) -> Module:
        """Replace every batch normalisation in ``module``, including itself, under all its names; return the module.

        ``process_group``: the ranks, as for the class; if None, a ``torch.nn.SyncBatchNorm`` keeps its own. Parameters,
        buffers, hooks and other attributes (of a pruned layer, say) are kept. Raises
        :class:`~lockstep.errors.NotReplicableError` for a layer that is parametrized, that has no shapes yet, or whose
        class has a forward of its own.
        """
        converted: dict[int, Module] = {}
        for owner in list(module.modules()):
            for name, child in owner._modules.items():
                if child is not None and _is_plain_norm(child, cls):
                    found = converted.get(id(child)) or cls._like(child, process_group)
                    owner._modules[name] = converted[id(child)] = found
        return cls._like(module, process_group) if _is_plain_norm(module, cls) else module

    @classmethod
    def _like(cls, norm: Module, group: Group | None) -> "SyncBatchNorm":
        reason = ""
        if isinstance(norm, LazyModuleMixin):
            reason = "has no shapes yet; run a forward first"
        elif is_parametrized(norm):
            reason = "is parametrized; convert it before that"
        elif type(norm).forward not in _FORWARDS:  # such as one with an activation in it
            reason = "has a forward of its own, which would be lost; put a BatchNorm and what else it does in its place"
        if reason:
            raise NotReplicableError(f"cannot convert a {type(norm).__name__} to SyncBatchNorm: it {reason}")
        new = cls.__new__(cls)
        own = (dict, set)
        vars(new).update({name: copy.copy(v) if isinstance(v, own) else v for name, v in vars(norm).items()})
        new._meeting = next(_numbers)
        new.process_group = group if group is not None else new.process_group
        return new


def _statistics(rows: Tensor) -> Statistics:
    """Return how many values each channel has, and their mean and variance; zeros if there are none."""
    dims = [0, *range(2, rows.dim())]
    count = rows.numel() // rows.shape[1]
    if count == 0:
        return 0, rows.sum(dims), rows.sum(dims)
    variance, mean = torch.var_mean(rows, dims, correction=0)
    return count, mean, variance


def _together(met: Sequence[Statistics], device: torch.device) -> Statistics:
    """Return the statistics of the rows of several replicas or ranks together."""
    met = [each for each in met if each[0]] or met  # those of a padding batch may not be finite
    total = sum(count for count, _, _ in met)
    parts = [(count / max(total, 1), m.to(device), v.to(device)) for count, m, v in met]
    mean = torch.stack([weight * m for weight, m, _ in parts]).sum(0)
    return total, mean, torch.stack([weight * (v + (m - mean) ** 2) for weight, m, v in parts]).sum(0)


def _over_ranks(own: Statistics, group: Group) -> list[Statistics]:
    """Return the statistics of each rank."""
    count, mean, variance = own
    ranks = Collectives(group, Phases())
    counts, rows = gather_row(count, torch.cat([mean, variance]), ranks, "statistics of SyncBatchNorm")
    return [(n, *row.chunk(2)) for n, row in zip(counts, rows, strict=True)]


def _is_plain_norm(module: Module, kind: type) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, kind)
