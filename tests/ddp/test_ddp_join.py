"""Ranks with different numbers of batches under `join`: PyTorch's DistributedDataParallel and ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable

from ddp_reference import Branches, both, both_since_2_13, ddp_class, gradients, scalars, values
from processes import on_processes
from programs.networks import Applying
from small_modules import one_weight, x_of


@both
@on_processes(2)
def test_ranks_that_have_ended_count_as_zero_or_not_at_all(rank, implementation):
    make = ddp_class(implementation)
    for initial, alone in ((True, 1.0), (False, 2.0)):
        ddp, seen = make(one_weight()), []
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(2 + 2 * rank.rank):
                ddp.zero_grad()
                ddp(x_of(rank)).sum().backward()
                seen += scalars(ddp)
        assert seen == [1.5, 1.5] + [alone] * (2 * rank.rank)
        assert (ddp._authoritative_rank, ddp._join_config.enable) == (1, True)
    ddp = make(one_weight())
    with ddp.join(True, False):
        ddp(x_of(rank)).sum().backward()
    assert (scalars(ddp), ddp._join_config.enable) == ([1.5], False)
    assert isinstance(ddp, Joinable)
    assert (ddp.join_device.type, ddp.join_process_group) == ("cpu", rank.group)


@both
@pytest.mark.parametrize("world", [2, 3])
@on_processes(None, "world")
def test_every_batch_counts_as_much(rank, implementation):
    """Rank r makes 2 (r + 1) steps on one input; a module on its own makes all of them."""
    x = torch.full((3, 4), 0.5)
    local = rank.make(lambda: nn.Linear(4, 4, bias=False))
    ddp = ddp_class(implementation)(rank.make(lambda: nn.Linear(4, 4, bias=False)))
    for module, steps in ((local, 2 * sum(range(1, rank.world + 1))), (ddp, 2 * (rank.rank + 1))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.03 * (1 if module is local else rank.world))
        with ddp.join(enable=module is ddp):
            for _ in range(steps):
                optimizer.zero_grad()
                module(x).sum().backward()
                optimizer.step()
    local, wrapped = local.weight, ddp.module.weight
    torch.testing.assert_close(wrapped, local)


# --------------------------------------------------------------------------------------- kinds of models


def normalised():
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=1, use_error_feedback=False, warm_start=False)


MODELS = {
    "batch normalisation": (normalised, {}, None),
    "branches of the rank that ends first": (Branches, {}, 0),
    "branches of the other rank": (Branches, {}, 1),
    "hook": (lambda: nn.Linear(1, 3), {"hook": lambda: (None, default_hooks.allreduce_hook)}, None),
    "PowerSGD": (lambda: nn.Linear(1, 3), {"hook": lambda: (power_sgd_state(), powerSGD_hook.powerSGD_hook)}, None),
}


@both
@pytest.mark.numpy
@on_processes(2)
def test_all_ranks_end_with_the_same_model(rank, implementation):
    make, results = ddp_class(implementation), {}
    for name, (model, extra, left_out) in MODELS.items():
        for counts in ((0, 2), (2, 5)):
            for synchronised_every in (1, 2):
                module = rank.make(model)
                ddp = make(module, bucket_cap_mb=1, find_unused_parameters=left_out is not None)
                if "hook" in extra:
                    ddp.register_comm_hook(*extra["hook"]())
                names = [] if left_out is None else ["ab" if rank.rank == left_out else "abc"]
                x = torch.full((4, 1), 0.1 * (rank.rank + 1)) * torch.arange(1.0, 5.0)[:, None]
                with ddp.join():
                    for i in range(counts[rank.rank]):
                        ddp.require_backward_grad_sync = i % synchronised_every == 0
                        ddp(x, *names).sum().backward()
                        with torch.no_grad():
                            for parameter in ddp.parameters():
                                if parameter.grad is not None:
                                    parameter -= 0.01 * parameter.grad
                                    parameter.grad = None
                equal = all(rank.all_equal(value) for value in values(ddp))
                results[name, counts, synchronised_every] = equal, ddp._authoritative_rank
    assert len(results) == 4 * len(MODELS)
    assert set(results.values()) == {(True, 1)}, results


@both_since_2_13
@on_processes(2)
def test_join_leaves_local_buffers_alone(rank, implementation):
    module = Applying(lambda m, x: m.linear(x) + m.own.sum(), (1, 1), own=torch.ones(2))
    ddp = ddp_class(implementation)(module, forward_sync_buffers=False)
    ddp.module.own.fill_(5.0 + rank.rank)
    with ddp.join():
        for _ in range(rank.rank + 1):
            ddp(x_of(rank)).sum().backward()
    assert ddp.module.own.tolist() == [[5.0, 5.0], [6.0, 6.0]][rank.rank]


# ------------------------------------------------------------------------------------------------- errors


def fail(module, x):
    raise ValueError("Intentional error")


@both
@on_processes(2)
def test_errors(rank, implementation):
    ddp, steps = ddp_class(implementation)(one_weight()), 0
    says = ("Detected at least one rank that exhausted inputs. Throwing", "Rank 1 exhausted all inputs.")[rank.rank]
    with pytest.raises(RuntimeError, match=says), ddp.join(throw_on_early_termination=True):
        for _ in range(2 if rank.rank else 4):
            ddp(x_of(rank)).sum().backward()
            steps += 1
    assert (steps, gradients(ddp)[0].item()) == (2, 3.0)
    failing = ddp_class(implementation)(Applying(fail))
    with pytest.raises(ValueError, match="Intentional error"), failing.join():
        failing(x_of(rank))


class Counter(Joinable):
    """Something else to join: counts the all-reduces that it shadows."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.rank.group

    def join_hook(self, **options):
        return _CounterHook()


class _CounterHook:
    def main_hook(self):
        torch.distributed.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner):
        pass


@both
@on_processes(2)
def test_joined_with_others(rank, implementation):
    ddp, counter, seen = ddp_class(implementation)(one_weight()), Counter(rank), []
    with Join([ddp, counter]):
        for _ in range(rank.rank + 1):
            ddp.zero_grad()
            ddp(x_of(rank)).sum().backward()
            count = torch.ones(1)
            torch.distributed.all_reduce(count)
            seen.append((*scalars(ddp), count.item()))
    assert seen == [[(1.5, 2.0)], [(1.5, 2.0), (1.0, 1.0)]][rank.rank]
