"""What goes into forward and comes out of it, odd process groups, and what the wrapper is told to leave alone."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import lockstep
from ddp_reference import both, ddp_class, gradients, scalars
from lockstep.errors import NotReplicableError
from processes import on_processes, run_processes
from programs.networks import Applying
from small_modules import filled, one_weight, x_of

# --------------------------------------------------------------------------------------- inputs and outputs


class Pair(NamedTuple):
    """A named tuple."""

    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Record:
    """A dataclass with a tensor inside a dict."""

    a: torch.Tensor | None
    rest: dict


def put(module, x, box):
    """Two outputs into a box of the caller's; the second output's layer is in it only."""
    x = module.first(x)
    return box(x, module.second(x))


BOXES = {
    "tuple": (lambda x, y: ("text", x, y), lambda box: box[2]),
    "list": (lambda x, y: [1, x, None, y], lambda box: box[3]),
    "dict": (lambda x, y: {"text": "text", "x": x, "y": y}, lambda box: box["y"]),
    "nested": (lambda x, y: ["text", {"x": [x], "y": (0, y)}], lambda box: box[1]["y"][1]),
    "named tuple": (Pair, lambda box: box.b),
    "dataclass": (lambda x, y: Record(None, {"x": x, "y": y}), lambda box: box.rest["y"]),
    "detached": (lambda x, y: (x.detach(), y), lambda box: box[0] + box[1]),
    "new tensor": (lambda x, y: (torch.ones(1, 1), y), lambda box: box[0] + box[1]),
}


def box_up(rank, implementation):
    results = {}
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        for name, (box, unbox) in BOXES.items():
            if name == "dataclass" and options == {"static_graph": True} and implementation == "torch":
                continue  # the reference does not look into it, and leaves the gradients as they are, without a word
            ddp = ddp_class(implementation)(Applying(put, (), first=one_weight(), second=one_weight()), **options)
            for _ in range(2):
                ddp.zero_grad()
                out = ddp(x_of(rank), box=box)
                unbox(out).sum().backward()
            kind = type(out).__name__
            first = out[0] if kind == "tuple" and torch.is_tensor(out[0]) else None
            results[name, *options] = kind, first is None or first.grad_fn is None, scalars(ddp)
    return results


@both
def test_outputs_of_any_kind(implementation):
    kinds = dict(zip(BOXES, ["tuple", "list", "dict", "list", "Pair", "Record", "tuple", "tuple"], strict=True))
    for results in run_processes(2, box_up, implementation):
        assert {name: kind for (name, *_), (kind, *_) in results.items()} == kinds
        assert all(no_gradient for _, no_gradient, _ in results.values())
        assert {tuple(grads) for *_, grads in results.values()} == {(1.5, 1.5)}


def of_packed():
    """Takes a packed sequence."""
    return Applying(lambda m, packed: m.lstm(packed)[0], (), lstm=filled(nn.LSTM(1, 1), 0.5))


def of_named():
    """Takes a named tuple, whose type it looks at; a hook on its layer changes inputs and outputs."""

    def forward(m, pair, kind, *, scale=1.0):
        assert type(pair) is kind
        return m.layer(pair.a * pair.b) * scale

    made = Applying(forward, (), layer=one_weight())
    made.layer.register_forward_pre_hook(lambda module, args: args[0] * 2)
    made.layer.register_forward_hook(lambda module, args, output: output * 3)
    return made


@both
@on_processes(2)
def test_inputs_of_any_kind_and_hooks(rank, implementation):
    make = ddp_class(implementation)
    packed = rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    local, ddp = of_packed(), make(of_packed())
    for module in (local, ddp):
        module(packed).data.sum().backward()
    named = make(of_named())
    named(Pair(x_of(rank), torch.ones(1, 1)), Pair, scale=2.0).sum().backward()
    local, wrapped, named = gradients(local), gradients(ddp), scalars(named)
    torch.testing.assert_close(wrapped, local)
    assert named == [18.0]


class RunAll(torch.distributed.ProcessGroup):
    """A process group of one rank in Python, with no more than broadcast, all-gather and all-reduce."""

    def __init__(self):
        super().__init__(0, 1)
        self.calls = []

    def getSize(self):
        return 1

    def getBackendName(self):
        return "one by one"

    def _done(self, name, result):
        self.calls.append(name)
        future = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors, options):
        return self._done("broadcast", tensors)

    def allreduce(self, tensors, options):
        return self._done("allreduce", tensors)

    def allgather(self, outputs, inputs, options):
        for to, value in zip(outputs[0], inputs, strict=True):
            to.copy_(value)
        return self._done("allgather", outputs)


@both
@on_processes(1)
def test_a_process_group_written_in_python(rank, implementation):
    results = []
    for options in ({}, {"init_sync": False}):
        group = RunAll()
        ddp = ddp_class(implementation)(one_weight(), process_group=group, **options)
        calls = len(group.calls)
        for _ in range(2):
            ddp(torch.ones(1, 1)).sum().backward()
        results.append((calls > 0, group.calls.count("allreduce") > 0, scalars(ddp)))
    assert results == [(True, True, [2.0]), (False, True, [2.0])]


@both
@on_processes(2)
def test_ignored_parameters_are_left_alone(rank, implementation):
    """Wraps a module of which a part differs from rank to rank; then another part is put in its place."""
    make, results = ddp_class(implementation), []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        module = nn.Sequential(one_weight(), nn.Linear(1, 1 + rank.rank))
        module[1].register_buffer("size", torch.zeros(5 + rank.rank))
        names = ["1.weight", "1.bias", "1.size"]
        if implementation == "torch":
            make._set_params_and_buffers_to_ignore_for_model(module, names)
        else:
            options = {**options, "params_and_buffers_to_ignore": names}
        ddp = make(module, **options)
        replaced = [*module[1].parameters()]
        module[1] = one_weight()
        for _ in range(2):
            ddp.zero_grad()
            ddp(x_of(rank)).sum().backward()
        left = all(parameter.grad is None for parameter in replaced)
        results.append((left, scalars(ddp)))
    assert results == [(True, [1.5, rank.rank + 1.0])] * 3


@both
@on_processes(2)
def test_delayed_parameters(rank, implementation):
    module = nn.Sequential(one_weight(), one_weight())
    ddp = ddp_class(implementation)(
        module,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[1].weight,
    )
    ddp(x_of(rank)).sum().backward()
    assert module[1].weight.grad.item() == 1.5


@both
@on_processes(2)
def test_a_layer_without_outputs(rank, implementation):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nn.Linear, that there is nothing to initialise
        ddp = ddp_class(implementation)(nn.Sequential(one_weight(), nn.Linear(1, 0)))
    out = ddp(torch.ones(1, 1))
    out.sum().backward()
    assert (out.shape, [p.grad.shape for p in ddp.parameters()]) == ((1, 0), [(1, 1), (0, 1), (0,)])


# ------------------------------------------------------------------------ another module in place of the wrapped one


OTHERS = {
    "a copy": (copy.deepcopy, False),
    "the same, with a trained layer": (lambda module: nn.Sequential(module, one_weight()), False),
    "the same, with a function": (lambda module: nn.Sequential(module, nn.Tanh()), True),
    "the same weights": (lambda module: nn.utils.parametrizations.weight_norm(copy.deepcopy(module)), False),
    "the same, compiled": (lambda module: torch.compile(module, backend="eager"), True),
}


@on_processes(2)
def test_another_module_in_place_of_the_wrapped_one_is_trained_after_wrapping_it(rank):
    for make, trains in OTHERS.values():
        wrapped = lockstep.DistributedDataParallel(one_weight())
        wrapped.module = other = make(wrapped.module)
        with torch.no_grad():
            wrapped(x_of(rank))
        wrapped.eval()(x_of(rank))
        wrapped.train()
        if not trains:
            told = r"DistributedDataParallel.module was assigned another .*: wrap it"
            with pytest.raises(NotReplicableError, match=told):
                wrapped(x_of(rank))
            lost, wrapped = wrapped, lockstep.DistributedDataParallel(other)
        wrapped(x_of(rank)).sum().backward()
        lockstep.check_in_sync(wrapped)
        assert trains or copy.deepcopy(lost)(x_of(rank)).requires_grad
