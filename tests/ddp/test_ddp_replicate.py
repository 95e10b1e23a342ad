"""`replicate`: PyTorch's composable one, and ours."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.nn import functional as F

import lockstep
from ddp_reference import both, failure, scalars, values
from processes import on_processes
from programs.networks import Applying
from small_modules import one_weight, x_of


def replicate_of(implementation):
    return {"torch": replicate_of_torch, "lockstep": lambda *args, **options: lockstep.replicate(*args, **options)}[
        implementation
    ]


def state_of(implementation, module):
    return (lockstep.replicate if implementation == "lockstep" else replicate_of_torch).state(module)


def network():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))


def children(replicate, module):
    for child in (module[0], module[2], module[3]):
        replicate(child)
    return module


WAYS = {
    "whole": lambda replicate, module: replicate(module),
    "children": children,
    "options": lambda replicate, module: replicate(module, bucket_cap_mb=1, gradient_as_bucket_view=True),
    "device": lambda replicate, module: replicate(module, device_id=torch.device("cpu")),
}


@both
@pytest.mark.parametrize("world", [2, 4])
@on_processes(None, "world")
def test_parts_of_a_batch_train_as_the_whole_batch(rank, implementation):
    for name, way in WAYS.items():
        local = rank.make(network)
        module = copy.deepcopy(local)
        assert way(replicate_of(implementation), module) is module, name
        assert isinstance(module, nn.Sequential), name
        assert [*module.state_dict()] == [*local.state_dict()], name
        for step in range(2):
            draw = torch.randn(rank.world, 4, generator=torch.Generator().manual_seed(step))
            for network_, part in ((local, draw), (module, draw[rank.rank : rank.rank + 1])):
                F.mse_loss(network_(part[:, :2]), part[:, 2:]).backward()
                with torch.no_grad():
                    for parameter in network_.parameters():
                        parameter -= parameter.grad
                        parameter.grad = None
        torch.testing.assert_close(values(module), values(local), rtol=1.3e-6, atol=5e-5, msg=name)


@both
@on_processes(2)
def test_ignored_modules_are_left_alone(rank, implementation):
    module = nn.Sequential(one_weight(), nn.Sequential(one_weight()), one_weight())
    replicate_of(implementation)(module, ignored_modules=iter([module[1]]))
    module(x_of(rank)).sum().backward()
    assert scalars(module) == [[1.5, 1.0, 1.5], [1.5, 2.0, 1.5]][rank.rank]


@both
@on_processes(2)
def test_set_requires_gradient_sync(rank, implementation):
    module, seen = one_weight(), []
    replicate_of(implementation)(module)
    for synchronise in (False, False, True, True):
        module.set_requires_gradient_sync(synchronise)
        module(x_of(rank)).sum().backward()
        seen += scalars(module)
    assert seen == [[1, 2, 4.5, 6], [2, 4, 4.5, 6]][rank.rank]


def tenfold(state, bucket):
    state.append(bucket.is_last())
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 10)
    return future


@both
@on_processes(2)
def test_register_comm_hook(rank, implementation):
    module, seen = one_weight(), []
    replicate_of(implementation)(module)
    module.register_comm_hook(seen, tenfold)
    module(x_of(rank)).sum().backward()
    assert (scalars(module), seen) == [([10.0], [True]), ([20.0], [True])][rank.rank]


def with_keyword():
    return Applying(lambda m, x, *, factor=1.0: m.layer(x) * factor, (), layer=one_weight())


@both
@on_processes(2)
def test_state_and_errors(rank, implementation):
    replicate = replicate_of(implementation)
    plain, module = with_keyword(), with_keyword()
    replicate(module, device_id=torch.device("cpu"))
    module(x_of(rank), factor=3.0).sum().backward()
    assert scalars(module) == [4.5]
    state = state_of(implementation, module)
    ddp = state._ddp_weakref()
    assert (ddp.device_ids, ddp.process_group, state._param_names) == (None, rank.group, ["layer.weight"])
    assert state_of(implementation, plain) is None
    for device in ([torch.device("cpu")], "cpu"):
        with pytest.raises(RuntimeError, match=r"Expected device_id to be int or torch\.device, but got <class"):
            replicate(with_keyword(), device_id=device)
    with pytest.raises(AssertionError, match="replicate has already been applied to the following module"):
        replicate(module)


@both
@on_processes(2)
def test_what_is_sharded_is_refused_or_skipped(rank, implementation):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (rank.world,))
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    fully_shard(module[0], mesh=mesh)
    refused = failure(lambda: replicate_of(implementation)(module[0]))
    replicate_of(implementation)(module)
    module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    (kinds, message), equal, kind = refused, rank.all_equal(module[1].weight.grad), type(module[0].weight).__name__
    assert "RuntimeError" in kinds
    assert "Cannot apply `replicate()` on a Module already managed by `fully_shard`" in message
    assert equal
    assert kind == "DTensor"
