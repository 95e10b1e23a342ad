"""Our wrappers are instances of PyTorch's; what they inherit is overridden, or refused with what to use instead."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

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
    "device_type",
    "output_device",
    "is_multi_device_module",
    "mixed_precision",
    "modules_buffers",
    "named_module_buffers",
    "parameters_to_ignore",
    "process_group",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "bucket_bytes_cap_default",
    "broadcast_bucket_size",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "skip_all_reduce_unused_params",
    "_comm_hooks",
    "_delay_all_reduce_params",
    "_has_rebuilt_buckets",
    "_use_python_reducer",
)
ADDED_SINCE_2_11 = {"forward_sync_buffers", "batched_grad_copy"}


@pytest.mark.parametrize("name", KEPT)
def test_an_attribute_that_is_kept_says_what_pytorchs_does(wrapper, torchs, name):
    if name in ADDED_SINCE_2_11 and not hasattr(torchs, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    assert getattr(wrapper, name) == getattr(torchs, name)


def test_the_parameters_are_those_that_pytorchs_wrapper_has(wrapper, torchs):
    assert [p.shape for p in wrapper._module_parameters] == [p.shape for p in torchs._module_parameters]


def test_the_reducer_takes_every_call_of_pytorchs_or_refuses_it_by_name(wrapper):
    for name in dir(dist.Reducer):
        if not is_special(name) and not hasattr(wrapper.reducer, name) and name != "_pybind11_conduit_v1_":
            with pytest.raises(AttributeError, match=f"lockstep's reducer has no '{name}': "):
                getattr(wrapper.reducer, name)
    for name in dir(dist.Logger):
        if not is_special(name) and name != "_pybind11_conduit_v1_":
            assert hasattr(wrapper.logger, name)
    with pytest.raises(AttributeError, match="lockstep's logger has no 'fuse'"):
        _ = wrapper.logger.fuse


def test_harmless_calls_between_forward_and_backward_change_nothing(wrapper):
    out = wrapper(torch.ones(3, 2))
    reducer = wrapper.reducer
    reducer.prepare_for_forward()
    assert not reducer._rebuild_buckets()
    reducer._push_all_rebuilt_params()
    reducer.prepare_for_backward([out])
    reducer._set_static_graph()
    wrapper._set_ddp_sink_clone(False)
    wrapper._set_ddp_runtime_logging_sample_rate(1)
    wrapper.logger.set_runtime_stats_and_log()
    out.sum().backward()
    wrapper._check_reducer_finalized()
    assert wrapper.module.bias.grad.tolist() == [3, 3]
    assert wrapper._has_rebuilt_buckets


def test_a_sample_rate_below_one_is_an_error(wrapper):
    with pytest.raises(ValueError, match="equal or greater than 1, got 0"):
        wrapper._set_ddp_runtime_logging_sample_rate(0)


def test_whether_a_backward_is_over_is_asked_inside_of_one(wrapper):
    asked = []

    def ask(grad):
        with pytest.raises(RuntimeError, match="the backward pass under way has not ended"):
            wrapper._check_reducer_finalized()
        asked.append(True)

    hidden = nn.Linear(2, 2)
    x = hidden(torch.ones(1, 2))
    x.register_hook(ask)
    wrapper(x).sum().backward()
    assert asked


def test_the_logging_data_say_whether_the_graph_could_be_static(group):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, both):
            return self.b(self.a(x)) if both else self.a(x)

    model = lockstep.DistributedDataParallel(Two(), process_group=group)
    assert model._get_ddp_logging_data()["can_set_static_graph"] == 0
    for both, static in ((True, 1), (True, 1), (False, 0), (True, 0)):
        model(torch.ones(1, 2), both).sum().backward()
        assert model._get_ddp_logging_data()["can_set_static_graph"] == static
        assert model.reducer._ddp_graph_static() == bool(static)
        assert model.logger._get_ddp_logging_data().ints_map["can_set_static_graph"] == static


def test_the_logging_data_say_whether_there_was_an_error(wrapper):
    def fail(grad):
        raise KeyError("on purpose")

    assert wrapper._get_ddp_logging_data()["has_error"] == 0
    x = torch.ones(1, 2, requires_grad=True)
    out = wrapper(x * 1)
    x.register_hook(fail)
    with pytest.raises(KeyError):
        out.sum().backward()
    data = wrapper._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "failed on this rank" in data["error"]
    wrapper.logger.set_error_and_log("said by the program")
    assert wrapper.logger._get_ddp_logging_data().strs_map["error"] == "said by the program"


def test_removed_hooks_end_synchronising_for_good(wrapper):
    wrapper._remove_autograd_hooks()
    wrapper(torch.ones(3, 2)).sum().backward()
    assert wrapper._get_ddp_logging_data()["iteration"] == 0
    with pytest.raises(lockstep.errors.OptionError, match="ended synchronising for good"):
        wrapper.require_backward_grad_sync = True
    with wrapper.no_sync():
        pass


def test_parameters_are_listed_as_pytorchs_static_method_does():
    module = nn.Linear(2, 2)
    THEIRS._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    ours = list(lockstep.DistributedDataParallel._get_data_parallel_params(module))
    assert len(ours) == 1
    assert ours[0] is next(iter(THEIRS._get_data_parallel_params(module)))
    named = list(lockstep.DistributedDataParallel._get_data_parallel_params(module, named_params=True))
    assert [name for name, _ in named] == ["weight"]
    assert lockstep.DistributedDataParallel._get_active_ddp_module() is None


# ------------------------------------------------------------------------------------- a hook for buffers


def test_a_hook_makes_buffers_equal_in_place_of_the_policy(group):
    calls = []

    def hook(state, buffers):
        calls.append((state, sorted(buffers)))
        buffers["running_mean"].fill_(7)
        future = torch.futures.Future()
        future.set_result(None)
        return [future]

    model = lockstep.DistributedDataParallel(nn.BatchNorm1d(2), process_group=group)
    model._register_buffer_comm_hook("state", hook)
    model(torch.ones(3, 2)).sum().backward()
    assert calls == [("state", ["num_batches_tracked", "running_mean", "running_var"])]
    assert model.module.running_mean.tolist() == [7, 7]
    with model.no_sync():
        model(torch.ones(3, 2)).sum().backward()
    assert len(calls) == 2  # as with PyTorch's, the forward after one that does not synchronise leaves it out
    model(torch.ones(3, 2)).sum().backward()
    assert len(calls) == 2
    with pytest.raises(lockstep.errors.OptionError, match="do not go together"), model.join():
        pass


@pytest.mark.parametrize("implementation", ["torch", "lockstep"])
def test_a_hook_for_buffers_runs_before_or_after_forward(group, implementation):
    ours = implementation == "lockstep"
    made = (lockstep.DistributedDataParallel if ours else THEIRS)(nn.BatchNorm1d(1), process_group=group)
    seen = []
    made.module.register_forward_hook(lambda *_: seen.append("forward"))
    for location in _BufferCommHookLocation:
        made._register_buffer_comm_hook(None, lambda state, buffers: seen.append("hook"), location)
        made(torch.ones(2, 1))
    before = seen[:2] if next(iter(_BufferCommHookLocation)) is _BufferCommHookLocation.PRE_FORWARD else seen[2:]
    assert before == ["hook", "forward"]
    assert sorted(seen) == ["forward"] * 2 + ["hook"] * 2


@pytest.mark.parametrize(
    ("hook", "location", "text"),
    [(None, _BufferCommHookLocation.PRE_FORWARD, "must be callable"), (print, "before", "comm_hook_location must be")],
)
def test_what_cannot_be_a_hook_for_buffers_is_an_error(wrapper, hook, location, text):
    with pytest.raises(lockstep.errors.HookError, match=text):
        wrapper._register_buffer_comm_hook(None, hook, location)


def test_a_hook_for_buffers_that_returns_something_else_is_an_error(group):
    model = lockstep.DistributedDataParallel(nn.BatchNorm1d(2), process_group=group)
    model._register_buffer_comm_hook(None, lambda state, buffers: 3)
    with pytest.raises(lockstep.errors.HookError, match=r"None or a list of torch.futures.Future, got int"):
        model(torch.ones(3, 2))


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
