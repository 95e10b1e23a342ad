"""What the constructor refuses and warns of, what it makes equal, and how wrapped modules are saved and copied."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import lockstep
from ddp_reference import Mixed, both, both_since_2_13, ddp_class, failure, scalars, values, warned
from processes import on_processes
from small_modules import filled, one_weight, x_of

# ------------------------------------------------------------------------------------------------ arguments


def test_lockstep_takes_the_arguments_of_the_reference():
    theirs = [*inspect.signature(nn.parallel.DistributedDataParallel).parameters.values()]
    ours = [*inspect.signature(lockstep.DistributedDataParallel).parameters.values()]
    for mine, wanted in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind) == (wanted.name, wanted.kind)
        # up to 2.11 the flag had no other name yet
        assert mine.default == wanted.default or (mine.name, wanted.default) == ("broadcast_buffers", True)
    of_later_releases = ["batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"]
    beyond = [p for p in ours[len(theirs) :] if p.name not in of_later_releases]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in beyond)


def two_places():
    return nn.Sequential(one_weight(), nn.Linear(1, 1, device="meta"))


def mesh(*sizes):
    return torch.distributed.init_device_mesh("cpu", sizes)


REFUSED = {  # what is wrapped, options, the error's class, and what its message has
    "nothing": (nn.Module, {}, RuntimeError, "doesn't have any parameter that requires a gradient"),
    "uninitialised": (lambda: nn.LazyLinear(2), {}, RuntimeError, "Modules with uninitialized parameters"),
    "two devices": (
        one_weight,
        {"device_ids": [0, 1]},
        ValueError,
        "device_ids can only be None or contain a single element.",
    ),
    "device of a CPU module": (
        one_weight,
        {"device_ids": [0]},
        ValueError,
        "device_ids and output_device arguments only work with",
    ),
    "output device": (
        one_weight,
        {"output_device": torch.device("cpu")},
        ValueError,
        "only work with single-device/multiple-device GPU modules or CPU modules, but got device_ids None",
    ),
    "two types of devices": (two_places, {}, ValueError, "input module must be on the same type of devices"),
    "delayed, without the parameter to wait for": (
        one_weight,
        {"delay_all_reduce_named_params": []},
        ValueError,
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time",
    ),
    "misspelt": (one_weight, {"bucket_cap": 1}, TypeError, "bucket_cap"),
    "mesh and group": (
        one_weight,
        {"device_mesh": 1, "process_group": True},
        RuntimeError,
        "Cannot specify both process_group and device_mesh",
    ),
    "mesh of two dimensions": (one_weight, {"device_mesh": 2}, RuntimeError, "Only 1D device mesh is supported,"),
}


@both
@on_processes(2)
def test_what_is_refused(rank, implementation):
    meshes = {1: mesh(2), 2: mesh(2, 1)}
    for name, (make, given, kind, message) in REFUSED.items():
        options = dict(given)
        if "device_mesh" in options:
            options["device_mesh"] = meshes[options["device_mesh"]]
        if "process_group" in options:
            options["process_group"] = rank.group
        kinds, said = failure(lambda make=make, options=options: ddp_class(implementation)(make(), **options))
        assert kind.__name__ in kinds, (name, kinds, said)
        assert message in said, (name, said)
    wrapped = ddp_class(implementation)(one_weight(), device_mesh=meshes[1])
    wrapped(x_of(rank)).sum().backward()
    assert (wrapped.device_mesh, scalars(wrapped)) == (meshes[1], [1.5])


@both_since_2_13
@on_processes(2)
def test_attributes(rank, implementation):
    make = ddp_class(implementation)
    empty = make(one_weight(), device_ids=[])
    static = make(one_weight(), static_graph=True)
    used = make(one_weight())
    used(torch.ones(1, 1)).sum().backward()
    flags = (static.static_graph, used.static_graph, used.find_unused_parameters, used.gradient_as_bucket_view)
    assert flags == (True, False, False, False)
    assert (empty.device_ids, empty.output_device, empty.device) == (None, None, torch.device("cpu"))
    assert empty.process_group is rank.group
    assert repr(empty) == "DistributedDataParallel(\n  (module): Linear(in_features=1, out_features=1, bias=False)\n)"
    assert failure(lambda: empty.weight)[0][:1] == ["AttributeError"]
    assert [kind for kind, *_ in warned(lambda: make(one_weight(), check_reduction=True))] == ["FutureWarning"]


FLAGS = [
    ({}, True, False),
    ({"forward_sync_buffers": False}, False, False),
    ({"forward_sync_buffers": True}, True, False),
    ({"broadcast_buffers": True}, True, True),
    ({"broadcast_buffers": False}, False, True),
    ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
    ({"broadcast_buffers": True, "forward_sync_buffers": False}, False, True),
]


@both_since_2_13
@on_processes(2)
def test_the_old_name_of_the_buffer_flag_warns(rank, implementation):
    for options, on, warns in FLAGS:
        made = []
        caught = warned(
            lambda options=options, made=made: made.append(ddp_class(implementation)(one_weight(), **options))
        )
        about = [kind for kind, message, file in caught if "broadcast_buffers" in message and file == __file__]
        got = made[0].forward_sync_buffers, made[0].broadcast_buffers, about
        assert got == (on, on, ["FutureWarning"] * warns), options


# --------------------------------------------------------------------------------------------- at the start


class Buffered(nn.Module):
    """A weight, a frozen one, and buffers of two dtypes."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("hidden", torch.full((1,), value), persistent=False)

    def forward(self, x):
        return (self.weight * x).sum()


STARTS = [
    ({}, (0, 0)),
    ({"forward_sync_buffers": False}, (0, 0)),
    ({"init_sync": False}, (1, 1)),
    ({"broadcast_buffers": False}, (0, 1)),
]


@both_since_2_13
@on_processes(2)
def test_ranks_start_with_the_values_of_rank_0(rank, implementation):
    for options, of_rank_1 in STARTS:
        module = Buffered(float(rank.rank))
        warned(lambda module=module, options=options: ddp_class(implementation)(module, **options))
        found = [{value.flatten()[0].item() for value in values} for values in (module.parameters(), module.buffers())]
        assert found == [{value * rank.rank} for value in of_rank_1], options


DIFFERENT = {
    "shape": lambda rank: nn.Linear(2, 2 + rank),
    "number": lambda rank: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))),
    "order": lambda rank: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab", "ba")[rank]}),
    "dtype": lambda rank: nn.Linear(2, 2).to(torch.float if rank else torch.double),
    "memory format": lambda rank: nn.Conv2d(2, 2, 2).to(
        memory_format=(torch.channels_last, torch.preserve_format)[rank]
    ),
    "frozen": lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(rank == 0)),
    "buffer": lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0),
}


@on_processes(2)
def test_lockstep_refuses_on_every_rank_modules_that_differ(rank):
    for other, make in DIFFERENT.items():
        kinds, message = failure(lambda make=make: lockstep.DistributedDataParallel(make(rank.rank)))
        assert {"RuntimeError", "ValueError"} <= {*kinds}, (other, kinds, message)
        words = "appears not to match strides of the same param in process 0" if other == "memory format" else "rank"
        assert words in message, (other, message)
    wrapped = lockstep.DistributedDataParallel(one_weight())  # the group has not been harmed
    wrapped(x_of(rank)).sum().backward()
    assert scalars(wrapped) == [1.5]


# ------------------------------------------------------------------------------------------- saved and copied


@both
@on_processes(2)
def test_saved_and_copied(rank, implementation):
    make = ddp_class(implementation)
    plain = rank.make(Mixed)
    ddp = make(copy.deepcopy(plain))
    state = ddp.state_dict()
    assert [*state] == [f"module.{key}" for key in plain.state_dict()]
    file = io.BytesIO()
    torch.save(ddp, file)
    for other in (torch.load(io.BytesIO(file.getvalue()), weights_only=False), copy.deepcopy(ddp)):
        assert type(other) is make
        with other.no_sync():
            other(torch.ones(1, 3)).sum().backward()
        assert all(map(torch.equal, values(other), values(ddp)))
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    filled(plain, 0)
    plain.load_state_dict(state)
    assert all(map(torch.equal, values(plain), values(ddp)))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "module.x"'):
        make(one_weight()).load_state_dict({"module.weight": torch.ones(1, 1), "module.x": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "module.bias"'):
        make(nn.Linear(1, 1)).load_state_dict({"module.weight": torch.ones(1, 1)})


@on_processes(2)
def test_lockstep_takes_frozen_modules_and_the_keys_of_the_plain_one(rank):
    frozen = lockstep.DistributedDataParallel(one_weight().requires_grad_(False))
    frozen.load_state_dict({"weight": torch.full((1, 1), 5.0)})
    assert frozen(torch.ones(1, 1)).item() == 5.0
