"""Our wrappers are instances of PyTorch's; what they inherit is overridden, or refused with what to use instead."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep._base import inherited
from lockstep.distributed.replication.ddp_compat import INSTEAD

THEIRS = nn.parallel.DistributedDataParallel


def is_special(name):
    return name.startswith("__") and name.endswith("__")


@pytest.fixture
def group():
    """A group that PyTorch's class takes, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def wrapper(group):
    return lockstep.DistributedDataParallel(nn.Linear(2, 2), process_group=group)


@pytest.fixture
def torchs(group):
    return THEIRS(nn.Linear(2, 2), process_group=group)


def test_a_wrapper_is_an_instance_of_pytorchs_class(wrapper):
    assert isinstance(wrapper, THEIRS)
    parallel = lockstep.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    assert isinstance(parallel, nn.DataParallel)
    assert not isinstance(parallel, THEIRS)


@pytest.mark.parametrize("ours", [lockstep.DistributedDataParallel, lockstep.DataParallel], ids=lambda c: c.__name__)
def test_no_function_of_pytorchs_class_is_left(ours):
    theirs = getattr(nn.parallel, ours.__name__)
    for name in dir(theirs):
        held = inspect.getattr_static(ours, name)
        if isinstance(held, staticmethod | classmethod):
            held = held.__func__
        code = getattr(held.fget if isinstance(held, property) else held, "__code__", None)
        assert code is None or code.co_filename != inspect.getfile(theirs), name


@pytest.mark.parametrize("special", ["__init__", "__getstate__", "__setstate__"])
def test_special_methods_of_pytorchs_class_are_overridden(special):
    found = getattr(lockstep.DistributedDataParallel, special)
    assert inspect.unwrap(found).__module__.startswith("lockstep")


@pytest.mark.parametrize("name", sorted(name for name in vars(THEIRS) if not is_special(name)))
def test_an_inherited_name_of_the_class_works_or_is_refused_by_name(wrapper, name):
    if isinstance(inspect.getattr_static(type(wrapper), name), inherited.Refused):
        assert not hasattr(wrapper, name)
        assert not hasattr(type(wrapper), name)
        with pytest.raises(AttributeError, match=rf"lockstep's DistributedDataParallel has no '{name}': \w+"):
            getattr(wrapper, name)
    else:
        getattr(wrapper, name)


def test_an_attribute_that_pytorchs_constructor_sets_is_there_or_is_refused_by_name(wrapper, torchs):
    for name in vars(torchs):
        if not hasattr(wrapper, name):
            with pytest.raises(AttributeError, match=rf"lockstep's DistributedDataParallel has no '{name}': \w+"):
                getattr(wrapper, name)


def test_every_piece_of_advice_is_given(wrapper):
    for name, advice in INSTEAD.items():
        with pytest.raises(AttributeError) as caught:
            getattr(wrapper, name)
        assert advice in str(caught.value)


def test_a_name_that_a_later_pytorch_adds_is_refused():
    class Later(nn.Module):
        def _fuse(self):
            raise AssertionError

        def train(self, mode=True):
            raise AssertionError

    @inherited.refusing(Later, {})
    class Ours(Later):
        pass

    made = Ours()
    assert made.train() is made
    assert not hasattr(made, "_fuse")
    with pytest.raises(AttributeError, match="lockstep's Ours has no '_fuse': it belongs to PyTorch's own machinery"):
        _ = Ours._fuse


KEPT = (
    "broadcast_buffers",
    "forward_sync_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "static_graph",
    "dim",
    "device",
    "device_ids",
    "output_device",
    "mixed_precision",
    "process_group",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "skip_all_reduce_unused_params",
    "_has_rebuilt_buckets",
)
ADDED_SINCE_2_11 = {"forward_sync_buffers", "batched_grad_copy"}


@pytest.mark.parametrize("name", KEPT)
def test_an_attribute_that_is_kept_says_what_pytorchs_does(wrapper, torchs, name):
    if name in ADDED_SINCE_2_11 and not hasattr(torchs, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    assert getattr(wrapper, name) == getattr(torchs, name)


def test_the_reducer_has_the_three_calls_that_frameworks_make_and_refuses_all_others_by_name(wrapper):
    """Accelerate and Lightning make them around backward. They change nothing."""
    out = wrapper(torch.ones(3, 2))
    assert not wrapper.reducer._rebuild_buckets()
    wrapper.reducer.prepare_for_backward([out])
    out.sum().backward()
    wrapper.reducer._delay_all_reduce()
    assert wrapper.module.bias.grad.tolist() == [3, 3]
    for name in dir(dist.Reducer):
        if not is_special(name) and name not in ("prepare_for_backward", "_rebuild_buckets", "_delay_all_reduce"):
            with pytest.raises(AttributeError, match=f"lockstep's reducer has no '{name}': "):
                getattr(wrapper.reducer, name)


def test_the_logging_data_have_what_lightning_reads_and_refuse_the_rest_by_name(wrapper):
    assert not wrapper._get_ddp_logging_data().get("can_set_static_graph")
    with pytest.raises(
        KeyError, match=r"lockstep's logging data has no 'world_size': lockstep.loop.statistics\(wrapper\)"
    ):
        wrapper._get_ddp_logging_data()["world_size"]


def test_a_hook_can_ask_whether_buckets_are_final(wrapper):
    """PyTorch's hooks for a ZeroRedundancyOptimizer that overlaps with backward do."""
    assert not wrapper._has_rebuilt_buckets
    wrapper(torch.ones(3, 2)).sum().backward()
    assert wrapper._has_rebuilt_buckets
    assert lockstep.DistributedDataParallel._get_active_ddp_module() is None


def test_parameters_that_pytorchs_static_method_has_marked_are_not_replicated(group):
    module = nn.Linear(2, 2)
    THEIRS._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    wrapper = lockstep.DistributedDataParallel(module, process_group=group)
    assert [each.name for each in wrapper._replication.started_reducer.parameters] == ["weight"]


# --------------------------------------------------------------------------------------- misspelt arguments


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (lockstep.DistributedDataParallel, "find_unused_params", "find_unused_parameters"),
        (lockstep.DataParallel, "devices_ids", "device_ids"),
    ],
)
def test_a_misspelt_argument_is_an_error_that_lists_those_that_there_are(kind, name, near):
    with pytest.raises(TypeError) as caught:
        kind(nn.Linear(1, 1), **{name: None})
    message = str(caught.value)
    assert f"{kind.__name__}() got an unexpected keyword argument {name!r}; did you mean {near}? There are" in message
    assert all(parameter in message for parameter in inspect.signature(kind).parameters)
    assert isinstance(caught.value, lockstep.errors.UnknownOptionError)
