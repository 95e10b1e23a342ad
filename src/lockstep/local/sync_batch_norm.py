"""Batch normalisation over the whole batch, not over each replica's rows of it."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import LayoutError
from lockstep.local.exchange import Replica, current_replica

_numbers = itertools.count()


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics, in training, are those of all replicas' rows together.

    Arguments and buffers are those of ``torch.nn.BatchNorm1d``; inputs have shape (N, C) or (N, C, ...). Inside
    :class:`~lockstep.DataParallel` every replica gets the same mean and variance as one device would with the whole
    batch, forward and backward, and the same running statistics. Outside, and in ``eval()``, it is plain batch
    normalisation. Communicates, in training, count, mean and variance (2 C + 1 numbers) from each replica to each
    other. Every replica must call the same of these modules in the same order; one that does not is an error in all.
    Stands for ``torch.nn.SyncBatchNorm``, which needs a process group.

    >>> import torch, lockstep
    >>> network = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    >>> parallel = lockstep.DataParallel(network, device_ids=["cpu", "cpu"])
    >>> parallel(torch.randn(4, 3)).mean(0).abs().max() < 1e-6
    tensor(True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meeting = next(_numbers)  # a replica has its original's number: they meet under it

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise LayoutError(f"expected an input of shape (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, with the statistics of all replicas' rows."""
        self._check_input_dim(input)
        replica = current_replica()
        if replica is None or not (self.training or self.running_mean is None):
            return super().forward(input)
        dims = [0, *range(2, input.dim())]
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = input.numel() // input.shape[1]
        count, mean, variance = self._over_all(replica, count, mean, variance)
        if self.training and self.track_running_stats:
            self._track(count, mean.detach(), variance.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (wide * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _over_all(self, replica: Replica, count: int, mean: Tensor, variance: Tensor) -> tuple[int, Tensor, Tensor]:
        """The statistics of all replicas' rows, out of those of each; gradients flow to every replica's rows."""
        met = replica.exchange.share(f"SyncBatchNorm {self._meeting}", replica.index, (count, mean, variance))
        total = sum(n for n, _, _ in met)
        if total <= 1:
            raise LayoutError("Expected more than 1 value per channel when training, got one in all replicas together")
        parts = [(n / total, m.to(mean.device), v.to(mean.device)) for n, m, v in met]
        mean = torch.stack([weight * m for weight, m, _ in parts]).sum(0)
        variance = torch.stack([weight * (v + (m - mean) ** 2) for weight, m, v in parts]).sum(0)
        return total, mean, variance

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
    def convert_sync_batchnorm(cls, module: Module) -> Module:
        """``module`` with every batch normalisation in it (itself, too) replaced; parameters and buffers are kept."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._like(module)
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child)
            if converted is not child:
                setattr(module, name, converted)
        return module

    @classmethod
    def _like(cls, norm: _BatchNorm) -> "SyncBatchNorm":
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        new._parameters, new._buffers = dict(norm._parameters), dict(norm._buffers)
        return new.train(norm.training)
