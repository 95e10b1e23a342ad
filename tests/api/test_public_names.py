"""The public names and signatures, frozen: whoever changes one changes the table here, and means to."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate import replicate as torch_composable_replicate
from torch.nn.parallel import comm as torch_comm
from torch.nn.parallel import replicate as torch_replicate
from torch.nn.parallel.parallel_apply import parallel_apply as torch_parallel_apply
from torch.nn.parallel.scatter_gather import gather as torch_gather
from torch.nn.parallel.scatter_gather import scatter as torch_scatter
from torch.nn.parallel.scatter_gather import scatter_kwargs as torch_scatter_kwargs

import lockstep
from lockstep import local

PUBLIC = {
    "lockstep": """
        class DataParallel(module, device_ids=None, output_device=None, dim=0, *, split=None, gather_outputs=True)
            .forward(*inputs, **kwargs)
            .gather(outputs, output_device)
            .load_state_dict(state_dict, strict=True, assign=False)
            .parallel_apply(replicas, inputs, kwargs)
            .replicate(module, device_ids)
            .scatter(inputs, kwargs, device_ids)
            .statistics()
            .step(loss_fn, *batch, weight=None)
            .timeline()
        class DistributedDataParallel(module, device_ids=None, output_device=None, dim=0, broadcast_buffers=None, init_sync=True, process_group=None, bucket_cap_mb=None, find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, mixed_precision=None, device_mesh=None, skip_all_reduce_unused_params=False, bucket_cap_mb_list=None, batched_grad_copy=False, forward_sync_buffers=None, lazy_bucket_allocation=False, *, reduce_dtype=None, buffer_policy='rank0', params_and_buffers_to_ignore=())
            .forward(*inputs, **kwargs)
            .join(divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False)
            .join_device
            .join_hook(**kwargs)
            .join_process_group
            .load_state_dict(state_dict, strict=True, assign=False)
            .no_sync()
            .register_comm_hook(state, hook)
            .require_backward_grad_sync
            .set_requires_gradient_sync(requires_gradient_sync)
            .train(mode=True)
        class ResumableSampler(sampler, *, seed=0)
            .batches(loader)
            .go_through(loader)
            .load_state_dict(state)
            .repeat_last(loader)
            .same_on_all_ranks
            .state_dict()
        class Session(options, environment)
            .agree(flag)
            .batches(loader, *modules, padding=None)
            .check()
            .end(error)
            .is_main
            .phase(name)
            .resume(path, *unnamed, **state)
            .save(path, *unnamed, keep=3, step=None, wait=True, check=True, **state)
            .shard(dataset)
            .should_stop
            .skip_batch(*modules)
            .skip_on(*errors)
            .skipped
            .snapshot(path, *unnamed, every=None, at_most=0.02, step=None, **state)
            .step
        accumulate(module, last=True, weight=None)
        batches(loader, *modules, group=None, padding=None)
        check_in_sync(*objects, process_group=None, **unknown)
        module distributed
        module errors
        full_state_dict(optimizer, *, all_ranks=False)
        module local
        module loop
        mean(values, weight=1.0, group=None)
        replicate(module, ignored_modules=None, *, shares=None, loss='sum', **options)
        resume(path, *unnamed, group=None, **state)
        save(path, *unnamed, keep=3, step=None, group=None, check=True, **state)
        class session(backend=None, device=None, timeout=600.0, seed=0, stall_factor=20.0, stall_minimum=60.0, time_limit=None, link_timeout=20.0, alone=False, stop_signals=(<Signals.SIGINT: 2>, <Signals.SIGTERM: 15>))
        shard_optimizer(optimizer, *, granularity=None)
        module sharding
        module shares
        should_stop(group=None)
        watch(group=None, store=None, *, stall_factor=20.0, stall_minimum=60.0, link_timeout=20.0)
    """,  # noqa: E501
    "lockstep.distributed": """
        class DistributedDataParallel(module, device_ids=None, output_device=None, dim=0, broadcast_buffers=None, init_sync=True, process_group=None, bucket_cap_mb=None, find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, mixed_precision=None, device_mesh=None, skip_all_reduce_unused_params=False, bucket_cap_mb_list=None, batched_grad_copy=False, forward_sync_buffers=None, lazy_bucket_allocation=False, *, reduce_dtype=None, buffer_policy='rank0', params_and_buffers_to_ignore=())
            .forward(*inputs, **kwargs)
            .join(divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False)
            .join_device
            .join_hook(**kwargs)
            .join_process_group
            .load_state_dict(state_dict, strict=True, assign=False)
            .no_sync()
            .register_comm_hook(state, hook)
            .require_backward_grad_sync
            .set_requires_gradient_sync(requires_gradient_sync)
            .train(mode=True)
        class GradBucket(bucket, buffer, last, index)
            .buffer()
            .gradients()
            .index()
            .is_last()
            .parameters()
            .set_buffer(buffer)
        class ProcessGroupShm(store, rank, size, timeout=datetime.timedelta(seconds=1800), options=None, global_ranks=())
            .abort()
            .allocate(numel, dtype=torch.float32)
            .getBackendName()
            .getGroupDesc()
            .getGroupName()
            .name()
            .options
            .setGroupDesc(description)
            .setGroupName(name)
            .set_timeout(timeout)
            .shutdown()
            .split_group(ranks, timeout=None, opts=None, group_name=None, group_desc=None, **_)
            .supports_coalescing
            .supports_splitting
        class Replicated()
            .no_sync()
            .register_comm_hook(state, hook)
            .set_requires_gradient_sync(requires_gradient_sync)
        class ShmOptions(*, host=None, between=None)
        load_training_state_dict(module, state_dict)
        replicate(module, ignored_modules=None, *, shares=None, loss='sum', **options)
        training_state_dict(module)
    """,  # noqa: E501
    "lockstep.loop": """
        class BalancedSampler(costs, batch_size=None, *, batch_cost=None, seed=0, shuffle=True, drop_last=False, padded=False, process_group=None)
            .batches(loader)
            .describe()
            .go_through(loader)
            .left()
            .load_state_dict(state)
            .repeat_last(loader)
            .set_epoch(epoch)
            .state_dict()
        class Batches(loader, groups, padding)
            .is_padding
            .weight
        class GatheredRows(rows, own)
        class TrainingStatistics(calls=<factory>, seconds=<factory>, rounds=0, bytes_reduced=0, exposed_seconds=0.0, hidden_seconds=0.0, unused=<factory>, plan_changes=<factory>, waited=<factory>, own_seconds=<factory>, own_seconds_before=<factory>, shares=<factory>, share_seconds=<factory>, saved_by_deal=None)
            .as_dict()
            .as_json()
            .late_rank
            .slower_than_before
            .slower_than_others
        accumulate(module, last=True, weight=None)
        agree(flag, group=None)
        batches(loader, *modules, group=None, padding=None)
        check_in_sync(*objects, process_group=None, **unknown)
        gather_rows(value, module)
        mean(values, weight=1.0, group=None)
        mean_over_ranks(tensors, process_group=None)
        shard(dataset, group=None)
        should_stop(group=None)
        skip_batch(*modules, group=None)
        skip_on(*errors, modules=(), group=None)
        skipped(*modules, group=None)
        statistics(module, *, all_ranks=False)
        stop_when(request, group=None)
        total(counts, group=None)
    """,  # noqa: E501
    "lockstep.shares": """
        class GlobalBatches(dataset, batch_size, shares, seed=0, *, shuffle=True, last='drop', cost=None, padded=False, balance=None, process_group=None, collate_fn=None, **loader_options)
            .batch
            .batches_left
            .epoch
            .load_state_dict(state)
            .state_dict()
        audit(model, every=100)
        fingerprint(model, optimizer=None)
    """,  # noqa: E501
    "lockstep.check": """
        class Case(model, batches, loss=None, optimizer=None, steps=None, step=None, collate=None)
        class Finding(cause, text)
            .link
            .section
        class Report(ranks, wrap, precision, tolerance, comparisons=(), findings=(), error='')
            .as_json()
            .conclusion()
            .is_equal
            .rows()
            .title
        assert_equal_to_one_process(case, ranks=2, wrap='lockstep', **options)
        compare_with_one_process(case, ranks=2, wrap='lockstep', *, split='even', precision='float64', dropout='off', tolerance=None, backend=None, timeout=120.0)
    """,  # noqa: E501
    "lockstep.sharding": """
        class ShardedOptimizer(params, defaults)
            .add_param_group(param_group)
            .clip_grad_norm_(max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None)
            .gathered_state_dict(keeps)
            .load_state_dict(state_dict)
            .state_dict()
            .step(closure=None)
        class StateSlice(local, start, shape, order)
        full_state_dict(optimizer, *, all_ranks=False)
        shard_optimizer(optimizer, *, granularity=None)
    """,
    "lockstep.local": """
        Broadcast.apply(devices, *tensors)
        class DataParallel(module, device_ids=None, output_device=None, dim=0, *, split=None, gather_outputs=True)
            .forward(*inputs, **kwargs)
            .gather(outputs, output_device)
            .load_state_dict(state_dict, strict=True, assign=False)
            .parallel_apply(replicas, inputs, kwargs)
            .replicate(module, device_ids)
            .scatter(inputs, kwargs, device_ids)
            .statistics()
            .step(loss_fn, *batch, weight=None)
            .timeline()
        class Event(phase, replica, start, end)
        Gather.apply(target_device, dim, *tensors)
        ReduceAdd.apply(destination, *tensors)
        ReduceAddCoalesced.apply(destination, num_inputs, *tensors)
        class ReplicaSet(network, devices, *, detach=False, network_first=False, cap_bytes=10485760, phases=None)
            .after_forward()
            .check_slots()
            .refresh()
        Scatter.apply(devices, chunk_sizes, dim, tensor)
        class Statistics(calls=<factory>, seconds=<factory>)
        class SyncBatchNorm(*args, process_group=None, **kwargs)
            .forward(input)
        broadcast(tensor, devices=None, *, out=None)
        broadcast_coalesced(tensors, devices, buffer_size=10485760)
        module comm
        current_replica()
        data_parallel(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None)
        gather(outputs, target_device, dim=0)
        parallel_apply(modules, inputs, kwargs_tup=None, devices=None)
        reduce_add(inputs, destination=None)
        reduce_add_coalesced(inputs, destination=None, buffer_size=10485760)
        replicate(network, devices, detach=False)
        scatter(inputs, target_gpus, dim=0, *, split=None)
        scatter_kwargs(inputs, kwargs, target_gpus, dim=0, *, split=None)
        shared(value)
    """,
    "lockstep.local.comm": """
        broadcast(tensor, devices=None, *, out=None)
        broadcast_coalesced(tensors, devices, buffer_size=10485760)
        copy_to(tensor, device)
        even_split(size, parts)
        fill(target, source)
        fill_all(targets, source)
        gather(tensors, dim=0, destination=None, *, out=None)
        pack(bucket, tensors)
        reduce_add(inputs, destination=None)
        reduce_add_coalesced(inputs, destination=None, buffer_size=10485760)
        scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None)
        unpack(bucket, flat)
    """,
    "lockstep.errors": """
        AgreementError(LockstepError, RuntimeError, ValueError)
        AlreadyManagedError(NotReplicableError, AssertionError)
        AuditError(ShareError)
        CheckError(LockstepError, RuntimeError)
        CheckpointError(LockstepError, RuntimeError)
        CommunicationError(LockstepError, RuntimeError)
        DeviceError(LockstepError, RuntimeError)
        GradientError(LockstepError, NotImplementedError)
        HookError(LockstepError, RuntimeError, TypeError, ValueError)
        InspectionError(LockstepError, RuntimeError)
        LayoutError(LockstepError, RuntimeError, ValueError)
        LengthError(LayoutError, AssertionError, IndexError)
        LockstepError(Exception)
        NotReplicableError(LockstepError, RuntimeError, ValueError)
        OptionError(LockstepError, RuntimeError, ValueError)
        OutOfSyncError(AgreementError)
        PeerError(LockstepError, RuntimeError)
        PeerFailure(PeerError, CommunicationError)
        ReplicaError(LockstepError, RuntimeError)
        ShardingError(LockstepError, RuntimeError, ValueError)
        ShareError(LockstepError, RuntimeError)
        StalledError(PeerFailure)
        StructureError(LockstepError, ValueError)
        UnknownOptimizerError(OptionError, ShardingError)
        UnknownOptionError(OptionError, TypeError)
    """,
}


def exported(module_name: str) -> Iterator[tuple[str, Any]]:
    """What a package imports `x as x`, or what a module defines; names with an underscore are nobody's business."""
    module = importlib.import_module(module_name)
    path = Path(module.__file__)
    if path.name == "__init__.py":
        body = ast.parse(path.read_text()).body
        lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]  # `if TYPE_CHECKING:`
        statements = [node for node in [*body, *lazy] if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in statements for alias in node.names if alias.asname == alias.name}
    else:
        names = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name}
    for name in sorted(names):
        if not name.startswith("_"):
            yield name, getattr(module, name)


def signature(function: Any, skip: int = 0) -> str:
    """The parameters with their defaults, without annotations."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def described(name: str, value: Any) -> Iterator[str]:
    """One line for a name, and one for each public member of a class."""
    if inspect.ismodule(value):
        yield f"module {name}"
    elif not inspect.isclass(value):
        yield name + signature(value)
    elif issubclass(value, BaseException):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif issubclass(value, torch.autograd.Function):
        yield f"{name}.apply{signature(value.forward, skip=1)}"
    else:
        yield f"class {name}{signature(value)}"
        for member, held in sorted(vars(value).items()):
            if member.startswith("_"):
                continue
            if isinstance(held, property):
                yield f"    .{member}"
            elif inspect.isfunction(held):
                yield f"    .{member}{signature(held, skip=1)}"


def surface(module_name: str) -> str:
    return "\n".join(line for name, value in exported(module_name) for line in described(name, value))


@pytest.mark.parametrize("module_name", PUBLIC)
def test_the_public_names_and_signatures_are_those_of_the_table(module_name):
    assert surface(module_name) == inspect.cleandoc(PUBLIC[module_name])


PACKAGES = [
    "lockstep",
    "lockstep.check",
    "lockstep.distributed",
    "lockstep.local",
    "lockstep.loop",
    "lockstep.shares",
    "lockstep.sharding",
]


@pytest.mark.parametrize("module_name", PACKAGES)
def test_help_shows_the_public_names(module_name):
    module = importlib.import_module(module_name)
    found = [each for each in exported(module_name) if module_name != "lockstep" or not inspect.ismodule(each[1])]
    assert sorted(module.__all__) == [name for name, _ in found]
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)
    for name, value in found:
        assert name in text
        if inspect.isfunction(value):
            assert f"\n    {name}(" in text


def test_the_top_level_has_the_names_of_a_first_program_and_says_where_the_others_are():
    assert len(lockstep.__all__) <= 16
    with pytest.raises(AttributeError, match=r"in lockstep\.loop: from lockstep\.loop import skip_batch"):
        _ = lockstep.skip_batch
    with pytest.raises(AttributeError, match=r"in lockstep\.loop: from lockstep\.loop import batches"):
        _ = lockstep.distributed.batches
    with pytest.raises(AttributeError, match=r"^module 'lockstep' has no attribute 'skip_batches'$"):
        _ = lockstep.skip_batches
    with pytest.raises(AttributeError, match=r"^module 'lockstep' has no attribute 'reducer'$"):
        _ = lockstep.reducer
    with pytest.raises(AttributeError, match=r"^module 'lockstep' has no attribute 'reducer.Reducer'$"):
        getattr(lockstep, "reducer.Reducer")  # as Sphinx asks


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("checkpoints", "per_rank"),
        ("distributed", "training_state_dict"),
        ("errors", "PeerFailure"),
        ("local", "SyncBatchNorm"),
        ("loop", "shard"),
        ("sharding", "ShardedOptimizer"),
        ("shares", "audit"),
    ],
)
def test_a_name_of_another_package_is_found_there(room, name):
    for package in (lockstep, lockstep.distributed, lockstep.sharding):
        if package.__name__ != f"lockstep.{room}":
            with pytest.raises(
                AttributeError, match=rf"it is in lockstep\.{room}: from lockstep\.{room} import {name}"
            ):
                getattr(package, name)


COUNTERPARTS = [
    (torch.nn.DataParallel, lockstep.DataParallel),
    (torch.nn.parallel.DistributedDataParallel, lockstep.DistributedDataParallel),
    (torch_composable_replicate, lockstep.replicate),
    (torch.nn.parallel.data_parallel, lockstep.local.data_parallel),
    (torch_replicate, local.replicate),
    (torch_parallel_apply, local.parallel_apply),
    (torch_scatter, local.scatter),
    (torch_scatter_kwargs, local.scatter_kwargs),
    (torch_gather, local.gather),
    *(
        (getattr(torch_comm, name), getattr(local.comm, name))
        for name in ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather")
    ),
]


def positional(function: Any) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]


@pytest.mark.parametrize(("theirs", "ours"), COUNTERPARTS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_positional_parameters_begin_with_those_of_torch_in_the_same_order(theirs, ours):
    expected = [(p.name, p.default is p.empty) for p in positional(theirs)]
    found = [(p.name, p.default is p.empty) for p in positional(ours)][: len(expected)]
    assert found == expected
    keywords = {p.name for p in inspect.signature(theirs).parameters.values() if p.kind == p.KEYWORD_ONLY}
    assert keywords <= set(inspect.signature(ours).parameters)
    beyond = [p for p in inspect.signature(ours).parameters.values() if p.name not in dict(expected)]
    assert all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in beyond)


DEFAULTS = {"dim": 0, "buffer_size": 10 * 1024 * 1024, "detach": False}


@pytest.mark.parametrize(("theirs", "ours"), COUNTERPARTS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_defaults_are_those_of_torch(theirs, ours):
    found = {p.name: p.default for p in positional(ours)}
    for parameter in positional(theirs):
        if parameter.default is not parameter.empty:
            assert found[parameter.name] == parameter.default == DEFAULTS.get(parameter.name, parameter.default)


def test_the_calls_of_local_are_those_of_their_modules():
    for name in ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced"):
        assert getattr(local, name) is getattr(local.comm, name)
    assert lockstep.DataParallel is local.DataParallel
    assert lockstep.local.data_parallel is local.data_parallel


def test_the_tree_in_the_docstring_of_errors_is_the_one_there_is():
    tree = lockstep.errors.__doc__
    for name, kind in exported("lockstep.errors"):
        line = next(line for line in tree.splitlines() if name in line.replace("(", " ").split())
        builtin = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins" and base is not Exception]
        assert ("(" in line) == bool(builtin)
        if builtin:
            assert line.split("(")[1].split(")")[0] == ", ".join(builtin)
