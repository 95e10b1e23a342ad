"""What the constructor refuses and warns of, what it makes equal, and how wrapped modules are saved and copied."""

from __future__ import annotations

import copy
import inspect
import io
import re

import torch
from torch import nn

import lockstep
from ddp_reference import Mixed, both, both_since_2_13, ddp_class, failure, scalars, values, warned
from processes import run_processes
from small_modules import filled, one_weight

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


REFUSED = {  # what is wrapped, options, the error's class, and what its message matches
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


def refuse(rank, implementation):
    meshes = {1: mesh(2), 2: mesh(2, 1)}
    results = {}
    for name, (make, options, *_) in REFUSED.items():
        options = dict(options)
        if "device_mesh" in options:
            options["device_mesh"] = meshes[options["device_mesh"]]
        if "process_group" in options:
            options["process_group"] = rank.group
        results[name] = failure(lambda make=make, options=options: ddp_class(implementation)(make(), **options))
    wrapped = ddp_class(implementation)(one_weight(), device_mesh=meshes[1])
    wrapped(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
    return results, wrapped.device_mesh == meshes[1], scalars(wrapped)


@both
def test_what_is_refused(implementation):
    for results, same_mesh, grads in run_processes(2, refuse, implementation):
        for name, (*_, kind, message) in REFUSED.items():
            kinds, said = results[name]
            assert kind.__name__ in kinds, (name, kinds, said)
            assert re.search(re.escape(message), said), (name, said)
        assert same_mesh
        assert grads == [1.5]


def take_options(rank, implementation):
    make = ddp_class(implementation)
    empty = make(one_weight(), device_ids=[])
    static = make(one_weight(), static_graph=True)
    used = make(one_weight())
    used(torch.ones(1, 1)).sum().backward()
    return {
        "device_ids": (empty.device_ids, empty.output_device, empty.device),
        "group": empty.process_group is rank.group,
        "flags": (static.static_graph, used.static_graph, used.find_unused_parameters, used.gradient_as_bucket_view),
        "repr": repr(empty),
        "attribute": failure(lambda: empty.weight)[0][:1],
        "checked": [kind for kind, *_ in warned(lambda: make(one_weight(), check_reduction=True))],
    }


@both_since_2_13
def test_attributes(implementation):
    for seen in run_processes(2, take_options, implementation):
        assert seen == {
            "device_ids": (None, None, torch.device("cpu")),
            "group": True,
            "flags": (True, False, False, False),
            "repr": "DistributedDataParallel(\n  (module): Linear(in_features=1, out_features=1, bias=False)\n)",
            "attribute": ["AttributeError"],
            "checked": ["FutureWarning"],
        }


FLAGS = [
    ({}, True, False),
    ({"forward_sync_buffers": False}, False, False),
    ({"forward_sync_buffers": True}, True, False),
    ({"broadcast_buffers": True}, True, True),
    ({"broadcast_buffers": False}, False, True),
    ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
    ({"broadcast_buffers": True, "forward_sync_buffers": False}, False, True),
]


def flag(rank, implementation):
    results = []
    for options, *_ in FLAGS:
        made = []
        caught = warned(
            lambda options=options, made=made: made.append(ddp_class(implementation)(one_weight(), **options))
        )
        about = [kind for kind, message, file in caught if "broadcast_buffers" in message and file == __file__]
        results.append((made[0].forward_sync_buffers, made[0].broadcast_buffers, about))
    return results


@both_since_2_13
def test_the_old_name_of_the_buffer_flag_warns(implementation):
    for results in run_processes(2, flag, implementation):
        assert results == [(on, on, ["FutureWarning"] * warns) for _, on, warns in FLAGS]


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


def begin(rank, implementation):
    results = []
    for options, _ in STARTS:
        module = Buffered(float(rank.rank))
        warned(lambda module=module, options=options: ddp_class(implementation)(module, **options))
        of_parameters = {value.flatten()[0].item() for value in module.parameters()}
        results.append((of_parameters, {value.flatten()[0].item() for value in module.buffers()}))
    return results


@both_since_2_13
def test_ranks_start_with_the_values_of_rank_0(implementation):
    of_rank_0, of_rank_1 = run_processes(2, begin, implementation)
    assert of_rank_0 == [({0}, {0})] * len(STARTS)
    assert of_rank_1 == [({parameters}, {buffers}) for _, (parameters, buffers) in STARTS]


def other_layers(rank, other):
    layers = {
        "shape": lambda: nn.Linear(2, 2 + rank.rank),
        "number": lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank.rank))),
        "order": lambda: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab", "ba")[rank.rank]}),
        "dtype": lambda: nn.Linear(2, 2).to(torch.float if rank.rank else torch.double),
        "memory format": lambda: nn.Conv2d(2, 2, 2).to(
            memory_format=(torch.channels_last, torch.preserve_format)[rank.rank]
        ),
        "frozen": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(rank.rank == 0)),
        "buffer": lambda: nn.BatchNorm1d(2, track_running_stats=rank.rank == 0),
    }
    return layers[other]()


def differ(rank):
    results = {}
    for other in ("shape", "number", "order", "dtype", "memory format", "frozen", "buffer"):
        results[other] = failure(lambda other=other: lockstep.DistributedDataParallel(other_layers(rank, other)))
    wrapped = lockstep.DistributedDataParallel(one_weight())  # the group has not been harmed
    wrapped(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
    return results, scalars(wrapped)


def test_lockstep_refuses_on_every_rank_modules_that_differ():
    for results, grads in run_processes(2, differ):
        for other, (kinds, message) in results.items():
            assert {"RuntimeError", "ValueError"} <= {*kinds}, (other, kinds, message)
            assert "rank" in message, (other, message)
        assert "appears not to match strides of the same param in process 0" in results["memory format"][1]
        assert grads == [1.5]


# ------------------------------------------------------------------------------------------- saved and copied


def save(rank, implementation):
    make = ddp_class(implementation)
    plain = rank.make(Mixed)
    ddp = make(copy.deepcopy(plain))
    state = ddp.state_dict()
    keys = [*state]
    file = io.BytesIO()
    torch.save(ddp, file)
    copies = [torch.load(io.BytesIO(file.getvalue()), weights_only=False), copy.deepcopy(ddp)]
    for other in copies:
        assert type(other) is make
        with other.no_sync():
            other(torch.ones(1, 3)).sum().backward()
    equal = [all(map(torch.equal, values(other), values(ddp))) for other in copies]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    filled(plain, 0)
    plain.load_state_dict(state)
    missing = failure(
        lambda: make(one_weight()).load_state_dict({"module.weight": torch.ones(1, 1), "module.x": torch.ones(1)})
    )
    return (
        keys == [f"module.{key}" for key in plain.state_dict()],
        equal,
        all(map(torch.equal, values(plain), values(ddp))),
        missing,
    )


@both
def test_saved_and_copied(implementation):
    for keys, equal, loaded, (kinds, message) in run_processes(2, save, implementation):
        assert keys
        assert equal == [True, True]
        assert loaded
        assert "RuntimeError" in kinds
        assert 'Unexpected key(s) in state_dict: "module.x"' in message


def load_plain_keys(rank):
    frozen = lockstep.DistributedDataParallel(one_weight().requires_grad_(False))
    frozen.load_state_dict({"weight": torch.full((1, 1), 5.0)})
    return frozen(torch.ones(1, 1)).item()


def test_lockstep_takes_frozen_modules_and_the_keys_of_the_plain_one():
    assert run_processes(2, load_plain_keys) == [5.0, 5.0]
