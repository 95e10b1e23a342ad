"""Compares tensors of the ranks with those of one process: pure functions over recorded tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOOR = 1e-3
"""A tensor whose norm is below this part of the largest one is measured relative to that: its values may be rounding
alone, such as the gradient of a bias before a normalisation."""

Values = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Facts:
    """What is known of one tensor that differs from that of one process."""

    name: str
    difference: float
    """The largest one over the ranks, relative to the norm of one process's tensor."""
    ratios: tuple[float | None, ...]
    """For each rank, c if its tensor is c times that of one process, or None if it points elsewhere."""
    alike: bool
    """True if all ranks have the same tensor."""
    is_own: bool = False
    """True if each rank has the gradient of its own rows."""
    of_one: int | None = None
    """The rank of whose rows alone all ranks have the gradient."""
    own_factor: float | None = None
    """c if the tensor is c times the mean of what each rank computes alone."""

    @property
    def ratio(self) -> float | None:
        """The ratio that holds on all ranks."""
        first = self.ratios[0]
        return first if self.alike and first is not None else None


@dataclass(frozen=True)
class Comparison:
    """All tensors of one kind at one point of the training."""

    kind: str
    """``gradients``, ``weights`` or ``buffers``."""
    step: int | None
    """The number of the step; None before the first."""
    count: int
    largest: float
    """The largest difference of a tensor."""
    differing: tuple[Facts, ...]
    """The tensors that differ by more than the tolerance."""

    @property
    def what(self) -> str:
        """The point in words."""
        return f"{self.kind} {'before the first step' if self.step is None else f'in step {self.step}'}"


def compare(
    kind: str,
    step: int | None,
    wanted: Values,
    by_rank: Sequence[Values],
    tolerance: float,
    own: Sequence[Values] = (),
    *,
    to_largest: bool = False,
) -> Comparison:
    """Compare the tensors of all ranks with those of one process, and with each other.

    ``own`` is what each rank computes alone. ``to_largest``: differences are relative to the norm of the largest
    tensor.
    """
    scale = max((float(_flat(each).norm()) for each in wanted.values() if each is not None), default=0.0)
    scale = scale / _FLOOR if to_largest else scale
    names = list(wanted) + [name for name in dict.fromkeys(n for each in by_rank for n in each) if name not in wanted]
    largest, differing = 0.0, []
    for name in names:
        present = [each.get(name) for each in (wanted, *by_rank)]
        if all(each is None for each in present):
            continue
        like = next(each for each in present if each is not None)
        want, *got = [torch.zeros_like(like) if each is None else each for each in present]
        difference = max(distance(each, want, scale) for each in got)
        largest = max(largest, difference)
        if difference > tolerance or not _alike(got, tolerance, scale):
            alone = [each.get(name) for each in own]
            differing.append(_facts(name, difference, want, got, alone, max(tolerance, 1e-9), scale))
    return Comparison(kind, step, len(names), largest, tuple(differing))


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return how far weights have moved, leaving out what rounding alone may have moved."""
    return {name: each - before[name] if name in before else each for name, each in after.items()}


def distance(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    """Return the norm of the difference over that of ``want``, which counts as ``scale`` / 1000 at least."""
    if got.shape != want.shape:
        return float("inf")
    left, right = _flat(got), _flat(want)
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return 0.0
    difference = float(torch.where(same, 0.0, left - right).norm())
    size = max(float(right.norm()), _FLOOR * scale)
    found = difference / size if size else float("inf")
    return found if found == found else float("inf")


def factor_between(got: Tensor, want: Tensor, tolerance: float, scale: float = 0.0) -> float | None:
    """Return c if ``got`` is c times ``want``."""
    if got.shape != want.shape:
        return None
    left, right = _flat(got), _flat(want)
    size = float(right @ right)
    if not size or not torch.isfinite(left).all():
        return None
    factor = float(left @ right) / size
    return factor if distance(got, factor * want.to(torch.float64), scale) <= tolerance or not left.any() else None


def weights_of_ranks(want: Values, own: Sequence[Values], tolerance: float) -> tuple[float, ...] | None:
    """Return the weights with which the gradients of the ranks' rows add up to that of one process, if any."""
    names = [name for name, each in want.items() if each is not None]
    if not names or not own or any(each.get(name) is None for each in own for name in names):
        return None
    columns = [torch.cat([_flat(each[name]) for name in names]) for each in own]  # type: ignore[arg-type]
    target = torch.cat([_flat(want[name]) for name in names])  # type: ignore[arg-type]
    matrix = torch.stack(columns, dim=1)
    if not torch.isfinite(matrix).all() or not torch.isfinite(target).all():
        return None
    found = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution
    if distance((matrix @ found).squeeze(1), target) > tolerance:
        return None
    return tuple(found.squeeze(1).tolist())


def _facts(
    name: str,
    difference: float,
    want: Tensor,
    got: Sequence[Tensor],
    alone: Sequence[Tensor | None],
    tolerance: float,
    scale: float,
) -> Facts:
    alike = _alike(got, tolerance, scale)
    ratios = tuple(factor_between(each, want, tolerance, scale) for each in got)
    if not alone:
        return Facts(name, difference, ratios, alike)
    own = [torch.zeros_like(want) if each is None else each for each in alone]
    is_own = all(distance(a, b, scale) <= tolerance for a, b in zip(got, own, strict=True)) and not alike
    mean = torch.stack([each.to(torch.float64) for each in own]).mean(0)
    of_one = next((r for r, each in enumerate(own) if alike and distance(got[0], each, scale) <= tolerance), None)
    factor = factor_between(got[0], mean, tolerance, scale) if alike else None
    if of_one is None or distance(mean, own[of_one], scale) <= tolerance:
        of_one = None
    return Facts(name, difference, ratios, alike, is_own, of_one, factor)


def _alike(got: Sequence[Tensor], tolerance: float, scale: float) -> bool:
    """Return True if all ranks have the same tensor: what they compute after the reduction is the same arithmetic."""
    return all(distance(each, got[0], scale) <= max(min(tolerance, 1e-6), 1e-9) for each in got)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).to(torch.float64)
