"""The options of `replicate` and `DistributedDataParallel`: every check and its message, what follows from them."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from ddp_reference import warned
from lockstep.distributed.replication.options import Options, read_options
from lockstep.errors import OptionError, UnknownOptionError

MIB = 1 << 20


def mesh(ndim=1):
    return SimpleNamespace(ndim=ndim, get_group=lambda dim: f"group of dimension {dim}")


def alone():
    """A group of this process."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def attach(how, **options):
    """Replicate a module, one way or the other, with a group of its own."""
    return how(nn.Linear(1, 1), process_group=alone(), **options)


both_ways = pytest.mark.parametrize("how", [lockstep.replicate, lockstep.DistributedDataParallel])


# ---------------------------------------------------------------------------------- what is refused

REFUSED = {
    "delayed without hook": (
        {"delay_all_reduce_named_params": [("a", nn.Parameter(torch.ones(1)))]},
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
    ),
    "hook without delayed": (
        {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))},
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
    ),
    "group and mesh": (
        {"process_group": "a group", "device_mesh": mesh()},
        "Cannot specify both process_group and device_mesh arguments. Give the mesh alone",
    ),
    "mesh of two dimensions": ({"device_mesh": mesh(2)}, "Only 1D device mesh is supported, but got namespace"),
    "mixed precision": ({"mixed_precision": object()}, "Call forward under torch.autocast(...) instead"),
    "policy": ({"buffer_policy": "sum"}, "buffer_policy must be one of rank0, mean, local, got 'sum'"),
    "no policy": ({"buffer_policy": None}, "buffer_policy must be one of rank0, mean, local, got None"),
    "cap of zero": ({"bucket_cap_mb": 0}, "bucket_cap_mb must be over 0 MiB, got 0"),
    "negative cap": ({"bucket_cap_mb": -1.5}, "bucket_cap_mb must be over 0 MiB, got -1.5"),
    "cap that is no number": ({"bucket_cap_mb": math.nan}, "bucket_cap_mb must be over 0 MiB, got nan"),
    "listed cap": ({"bucket_cap_mb_list": [1, 2, 0]}, "bucket_cap_mb_list[2] must be over 0 MiB, got 0"),
    "list of devices": (
        {"device_id": [torch.device("cpu")]},
        "Expected device_id to be int or torch.device, but got <class 'list'>",
    ),
    "name of a device": ({"device_id": "cpu"}, "Expected device_id to be int or torch.device, but got <class 'str'>"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(OptionError) as caught:
        Options(**given)
    assert message in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


@both_ways
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be over 0 MiB, got -1"),
        ({"buffer_policy": "max"}, "buffer_policy must be one of"),
        ({"device_mesh": mesh()}, "Cannot specify both process_group and device_mesh"),
        ({"mixed_precision": torch.float16}, "mixed_precision= is refused: it takes a private class of PyTorch"),
    ],
)
def test_both_ways_of_replicating_look_at_the_options(how, given, message):
    with pytest.raises(OptionError, match=message):
        attach(how, **given)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("buket_cap_mb", "did you mean bucket_cap_mb?"),
        ("bucket_cap", "did you mean bucket_cap_mb?"),
        ("broadcast_buffer", "did you mean broadcast_buffers?"),
        ("find_unused_params", "did you mean find_unused_parameters?"),
        ("Static_Graph", "did you mean static_graph?"),
        ("proces_group", "did you mean process_group?"),
        ("qqq", "there are process_group, device_mesh, device_id"),
        ("", "there are process_group, device_mesh, device_id"),
    ],
)
def test_a_misspelt_option_is_an_error_at_the_call_that_names_the_nearest(name, hint):
    module = nn.Linear(1, 1)
    with pytest.raises(TypeError) as caught:
        lockstep.replicate(module, process_group=alone(), **{name: 1})
    assert f"replicate() got an unexpected keyword argument {name!r}; {hint}" in str(caught.value)
    assert isinstance(caught.value, UnknownOptionError)
    assert isinstance(caught.value, OptionError)
    assert type(module) is nn.Linear


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bucket_cap_mb = 3


@pytest.mark.parametrize("device", [None, 0, 3, torch.device("cpu"), torch.device("cuda", 1)])
def test_devices_that_are_accepted(device):
    assert Options(device_id=device).device_id == device


# ---------------------------------------------------------------------------------- warnings


@both_ways
@pytest.mark.parametrize("value", [True, False])
def test_deprecated_options_warn_where_they_are_written(how, value):
    kinds = {"broadcast_buffers": "broadcast_buffers is deprecated; use forward_sync_buffers, or buffer_policy"}
    if value:  # False is the default
        kinds["check_reduction"] = "The `check_reduction` argument in `DistributedDataParallel` module is deprecated"
    for name, message in kinds.items():
        ((kind, text, file),) = warned(lambda name=name: attach(how, **{name: value}))
        assert (kind, file) == ("FutureWarning", __file__)
        assert text.startswith(message)


@both_ways
def test_nothing_else_warns(how):
    options = {
        "forward_sync_buffers": True,
        "bucket_cap_mb": 2,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
        "static_graph": True,
        "skip_all_reduce_unused_params": True,
    }
    assert warned(lambda: attach(how)) == []
    assert warned(lambda: attach(how, **options)) == []


# ---------------------------------------------------------------------------------- what follows


@pytest.mark.parametrize(
    ("given", "caps"),
    [
        ({}, (MIB, 25 * MIB)),
        ({"bucket_cap_mb": 7}, (7 * MIB,)),
        ({"bucket_cap_mb": 0.001}, (1048,)),
        ({"bucket_cap_mb": 1e-9}, (1,)),
        ({"bucket_cap_mb_list": [1, 2.5]}, (MIB, 5 * MIB // 2)),
        ({"bucket_cap_mb_list": [3], "bucket_cap_mb": 7}, (3 * MIB,)),
        ({"bucket_cap_mb_list": []}, (MIB, 25 * MIB)),
        ({"bucket_cap_mb_list": [], "bucket_cap_mb": 7}, (7 * MIB,)),
    ],
)
def test_sizes_of_buckets_in_bytes(given, caps):
    assert Options(**given).caps == caps


@pytest.mark.parametrize(
    ("given", "caps"),
    [({}, (25 * MIB,)), ({"bucket_cap_mb": 2}, (2 * MIB,)), ({"bucket_cap_mb_list": [1, 4]}, (MIB, 4 * MIB))],
)
def test_in_shared_memory_the_first_bucket_is_no_smaller_unless_that_is_asked_for(given, caps):
    assert Options(**given).caps_in_shared_memory() == caps


@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@pytest.mark.parametrize(
    ("broadcast", "forward", "kept_equal", "made_equal"),
    [
        (None, None, True, True),
        (True, None, True, True),
        (False, None, False, False),
        (None, True, True, True),
        (None, False, False, True),  # as in PyTorch: the newer flag leaves the beginning alone
        (True, False, False, True),
        (False, True, True, True),
        (False, False, False, True),
    ],
)
def test_flags_of_pytorch_for_buffers(policy, broadcast, forward, kept_equal, made_equal):
    given = {"broadcast_buffers": broadcast, "forward_sync_buffers": forward, "buffer_policy": policy}
    options = Options(**given)
    assert options.syncs_buffers is kept_equal
    assert options.policy == (policy if kept_equal else "local")
    assert options.syncs_buffers_at_start is made_equal
    assert Options(**given, init_sync=False).syncs_buffers_at_start is False


def test_the_group_is_that_of_the_mesh_or_the_one_given():
    assert Options().group is None
    assert Options(process_group="this one").group == "this one"
    assert Options(device_mesh=mesh()).group == "group of dimension 0"


def test_what_ranks_must_agree_on():
    hook = nn.Parameter(torch.ones(1))
    same = Options().agreed()

    def changed(**given):
        return [line[0] for line, before in zip(Options(**given).agreed(), same, strict=True) if line != before]

    for given in (
        {},
        {"process_group": "another object on every rank"},
        {"bucket_cap_mb_list": [1, 25]},
        {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True},
        {"device_id": 1},
    ):
        assert changed(**given) == []
    for name, given in {
        "option bucket_cap_mb": {"bucket_cap_mb": 25},
        "option buffer_policy": {"buffer_policy": "mean"},
        "option init_sync": {"init_sync": False},
        "option delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": [("a", hook)],
            "param_to_hook_all_reduce": hook,
        },
    }.items():
        assert changed(**given) == [name]
    assert changed(broadcast_buffers=False) == ["option buffer_policy", "option init_sync"]


def test_options_are_read_by_name():
    assert read_options({}) == Options()
    assert read_options({"dim": 1, "buffer_policy": "mean"}) == Options(dim=1, buffer_policy="mean")
    with pytest.raises(
        UnknownOptionError, match=r"replicate\(\) got an unexpected keyword argument 'dimm'; did you mean dim\?"
    ):
        read_options({"dimm": 1})
