"""Every mistake gives an error that says what, where, what was expected and what was got; then all goes on.

Two tables of a call, the class of its error, and the words of its message: what is refused on the CPU, and what is on
any devices. What happens to a batch that fails on its way is in test_bad_input.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from local.refusal import refused
from lockstep import DataParallel
from lockstep._base.devices import resolve_device, resolve_devices
from lockstep._base.tree import Tree, open_node
from lockstep.errors import (
    DeviceError,
    GradientError,
    LayoutError,
    LengthError,
    NotReplicableError,
    StructureError,
)
from lockstep.local import (
    Broadcast,
    Gather,
    ReduceAdd,
    Scatter,
    comm,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from programs.networks import Applying, mlp, scripted
from programs.one_device import on

CPU2 = ["cpu", "cpu"]
ONE, ROW, PAIR, NUMBER = torch.ones(1), torch.ones(2, 3), torch.ones(6, 2), torch.tensor(1.0)
NAN = float("nan")
PACKED = pack_sequence([torch.ones(2), torch.ones(1)])


def empty(*shape, dtype=None):
    return torch.empty(shape, dtype=dtype)


class Named(dict):
    """Items, and a tensor beside them."""


NAMED = Named(x=torch.arange(4))
NAMED.mask = torch.ones(4)

EITHER, LONE = "Exactly one of 'devices' and 'out'", "expected a list of devices, got 'cpu'"
COMM = {
    "broadcast to devices and out": (lambda: comm.broadcast(ONE, ["cpu"], out=[ONE]), LayoutError, EITHER,
        "devices=['cpu']", "out=["),
    "broadcast to nothing": (lambda: comm.broadcast(ONE), LayoutError, EITHER, "devices=None", "out=None"),
    "broadcast to another shape": (lambda: comm.broadcast(ROW, out=[empty(2, 3), empty(3, 2)]), LayoutError,
        "Expected all output tensors to have same shape as the source", "at index 1", "(3, 2)", "(2, 3)"),
    "broadcast to another dtype": (lambda: comm.broadcast(ROW, out=[empty(2, 3, dtype=torch.float64)]), LayoutError,
        "Output tensor at index 0", "torch.float64", "torch.float32"),
    "broadcast to no device": (lambda: comm.broadcast(ONE, []), LengthError, "at least one device"),
    "broadcast to a lone device": (lambda: comm.broadcast(ONE, "cpu"), DeviceError, LONE, "['cpu']"),
    "broadcast_coalesced to no device": (lambda: comm.broadcast_coalesced([ONE], []), LengthError,
        "at least one device"),
    "broadcast_coalesced to a lone device": (lambda: comm.broadcast_coalesced([ONE], "cpu"), DeviceError, LONE,
        "['cpu']"),
    "a buffer of 0 bytes": (lambda: comm.broadcast_coalesced([ONE], ["cpu"], 0), LayoutError, "at least one byte", "0"),
    "a buffer of -1 bytes": (lambda: comm.broadcast_coalesced([ONE], ["cpu"], -1), LayoutError, "at least one byte",
        "-1"),
    "a sum of two shapes": (lambda: comm.reduce_add([ROW, ROW, ROW.t()]), LayoutError, "reduce_add",
        "input 2 has invalid size: got (3, 2)", "expected (2, 3)"),
    "a coalesced sum of two shapes": (lambda: comm.reduce_add_coalesced([[ROW], [ROW], [ROW.t()]]), LayoutError,
        "reduce_add", "input 2 has invalid size: got (3, 2)", "expected (2, 3)"),
    "a sum of two dtypes": (lambda: comm.reduce_add([ROW, ROW.double()]), LayoutError,
        "input 1 has invalid type: got torch.float64", "expected torch.float32"),
    "a coalesced sum of two dtypes": (lambda: comm.reduce_add_coalesced([[ROW], [ROW.double()]]), LayoutError,
        "input 1 has invalid type: got torch.float64", "expected torch.float32"),
    "a sum of dense and sparse": (lambda: comm.reduce_add([ROW, ROW.to_sparse()]), LayoutError,
        "input 1 has invalid type", "torch.sparse_coo", "torch.strided"),
    "a sum of nothing": (lambda: comm.reduce_add([]), LengthError, "reduce_add expects at least one tensor, got none"),
    "a coalesced sum of nothing": (lambda: comm.reduce_add_coalesced([]), LengthError, "reduce_add_coalesced",
        "at least one device"),
    "sums of other numbers": (lambda: comm.reduce_add_coalesced([[ONE] * 2, [ONE]]), LengthError, "input 0 has 2",
        "input 1 has 1"),
    "sizes for other devices": (lambda: comm.scatter(PAIR, CPU2, (1, 2, 3)), LengthError,
        "Expected devices and chunk_sizes to be of same length", "len(devices) = 2", "len(chunk_sizes) = 3"),
    "scatter to no device": (lambda: comm.scatter(PAIR, ()), LengthError, "Expected at least one device to scatter to"),
    "scatter to nothing": (lambda: comm.scatter(PAIR), LengthError, "Expected at least one device to scatter to"),
    **{
        f"sizes {sizes}": (lambda sizes=sizes: comm.scatter(PAIR, CPU2, sizes), LayoutError, "sum to 6", "dim 0",
            "(6, 2)", str(sizes), f"sum to {sum(sizes)}", "at least 0")
        for sizes in [(2, 3), (7, -1), (4, 4)]
    },
    **{
        f"scatter along dim {dim}": (lambda dim=dim: comm.scatter(PAIR, CPU2, dim=dim), LayoutError,
            f"dim {dim} is out of range", "(6, 2)", "2 dimensions")
        for dim in (2, -3)
    },
    "scatter of a number": (lambda: comm.scatter(NUMBER, CPU2), LayoutError, "dim 0 is out of range", "()"),
    "scatter to devices and out": (lambda: comm.scatter(PAIR, ["cpu"], out=[empty(6, 2)]), LayoutError,
        "'devices' must not be specified"),
    "scatter by sizes to out": (lambda: comm.scatter(PAIR, chunk_sizes=(6,), out=[empty(6, 2)]), LayoutError,
        "'chunk_sizes' must not be specified"),
    "scatter to no out": (lambda: comm.scatter(PAIR, out=[]), LengthError,
        "Expected at least one output tensor to scatter to"),
    "scatter to other dimensions": (lambda: comm.scatter(PAIR, out=[empty(6), empty(6, 2)]), LayoutError,
        "Output tensor at index 0 has incorrect shape", "(6,)", "(6, 2)"),
    "scatter to another shape": (lambda: comm.scatter(PAIR, out=[empty(3, 2), empty(3, 3)]), LayoutError,
        "Output tensor at index 1 has incorrect shape", "(3, 3)"),
    "scatter to fewer rows": (lambda: comm.scatter(PAIR, out=[empty(3, 2), empty(2, 2)]), LayoutError,
        "Total size for output tensors along scatter dim 0 does not match", "expected 6", "got 5"),
    "scatter to another dtype": (lambda: comm.scatter(PAIR, out=[empty(3, 2), empty(3, 2, dtype=torch.float16)]),
        LayoutError, "Output tensor at index 1", "torch.float16", "torch.float32"),
    "fewer streams than devices": (lambda: comm.scatter(PAIR, CPU2, streams=[None]), LengthError,
        "one stream for each of 2 devices", "got 1"),
    "gather of nothing": (lambda: comm.gather(()), LengthError, "Expected at least one tensor to gather from"),
    "gather to two places": (lambda: comm.gather([ROW], 0, "cpu", out=ROW), LayoutError,
        "'destination' must not be specified", "cpu"),
    "gather of other dimensions": (lambda: comm.gather([ROW, torch.ones(2)]), LayoutError,
        "Expected all input tensors to have the same number of dimensions", "index 1 has 1", "2"),
    "gather of a number": (lambda: comm.gather([ONE, NUMBER]), LayoutError, "same number of dimensions",
        "index 1 has 0"),
    "gather of other shapes": (lambda: comm.gather([ROW, torch.ones(2, 4)]), LayoutError,
        "Input tensor at index 1 has invalid shape (2, 4)", "(2, 3)", "dim 0"),
    "gather of two dtypes": (lambda: comm.gather([ROW, ROW.double()]), LayoutError, "Input tensor at index 1",
        "torch.float64", "torch.float32"),
    "gather along dim 2": (lambda: comm.gather([ROW, ROW], 2), LayoutError, "dim 2 is out of range"),
    "gather to another shape": (lambda: comm.gather([ROW, ROW], out=torch.ones(3, 3)), LayoutError,
        "Expected out to have shape (4, 3)", "(3, 3)"),
    "gather to another dtype": (lambda: comm.gather([ROW, ROW], out=empty(4, 3, dtype=torch.int64)), LayoutError,
        "Output tensor", "torch.int64", "torch.float32"),
    "Gather of a number and a vector": (lambda: Gather.apply("cpu", 0, NUMBER, torch.ones(2)), LayoutError,
        "same number of dimensions, but input tensor at index 1 has 1"),
    "Gather along dim 1": (lambda: Gather.apply("cpu", 1, ONE, ONE), LayoutError, "dim 1 is out of range"),
    "Gather of nothing": (lambda: Gather.apply("cpu", 0), LengthError, "at least one tensor to gather from"),
    "ReduceAdd of two shapes": (lambda: ReduceAdd.apply("cpu", torch.ones(2), torch.ones(3)), LayoutError,
        "input 1 has invalid size: got (3,), but expected (2,)"),
    "ReduceAdd of two dtypes": (lambda: ReduceAdd.apply("cpu", ONE, ONE, ONE.long()), LayoutError,
        "input 2 has invalid type: got torch.int64 ", " expected torch.float32"),
    "ReduceAdd of what needs a gradient": (lambda: ReduceAdd.apply("cpu", ONE, ONE.clone().requires_grad_()),
        GradientError, "Backward is not implemented for ReduceAdd, but input 1 requires"),
}  # fmt: skip

SIZES = "cannot split the inputs along dim 0: inputs"
MADE = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "_mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
NESTED = {
    "two sizes": (lambda: scatter([torch.ones(4), torch.ones(3)], CPU2), LayoutError,
        SIZES + "[0] has size 4 there, and inputs[1] has 3 (shape (3,))"),
    "two sizes, of which one is 1": (lambda: scatter({"x": torch.ones(4), "m": torch.ones(1, 2)}, CPU2), LayoutError,
        SIZES + "['x'] has size 4 there, and inputs['m'] has 1"),
    "two sizes, of which the first is 1": (lambda: scatter({"m": ONE, "x": [torch.ones(4)]}, CPU2), LayoutError,
        SIZES + "['m'] has size 1 there, and inputs['x'][0] has 4"),
    "1 and 2, either of which may be the batch": (lambda: scatter([ONE, torch.ones(2)], CPU2), LayoutError,
        SIZES + "[0] has size 1 there, and inputs[1] has 2"),
    "three sizes": (lambda: scatter([torch.ones(2), torch.ones(4), torch.ones(3)], CPU2), LayoutError,
        SIZES + "[0] has size 2 there, and inputs[1] has 4"),
    "sizes of positional and keyword arguments": (lambda: scatter_kwargs((1, {"x": torch.ones(4)}),
        {"mask": torch.ones(3)}, CPU2), LayoutError, "inputs[1]['x'] has size 4 there, and kwargs['mask'] has 3"),
    "both ways out of two sizes": (lambda: scatter([torch.ones(4), torch.ones(5, 5)], ["cpu"] * 3), LayoutError,
        "one for each of the 3 replicas", "lockstep.local.shared(tensor)"),
    "a tensor without the dimension": (lambda: scatter({"x": torch.ones(2, 4), "m": torch.ones(4)}, CPU2, dim=1),
        LayoutError, "cannot split inputs['m'] along dim 1: its shape is (4,)"),
    "a packed sequence": (lambda: scatter({"words": PACKED}, CPU2), StructureError,
        "inputs['words'] is a PackedSequence"),
    "a packed sequence in a tree": (lambda: Tree([{"words": PACKED}], "inputs"), StructureError,
        "inputs[0]['words'] is a PackedSequence", "pass the padded tensor"),
    "a packed sequence alone": (lambda: open_node(PACKED), StructureError, "the value is a PackedSequence"),
    "an object that cannot be made again": (lambda: scatter_kwargs((), {"batch": NAMED}, CPU2), StructureError,
        "another Named for kwargs['batch']: its attribute mask has tensors"),
    "an output that cannot be made again": (lambda: gather([(NAMED,)] * 2, "cpu"), StructureError,
        "another Named for outputs[0]"),
    **{
        f"a tensor that is {kind}": (lambda make=make: scatter_kwargs((torch.ones(4),), {"edges": make()}, CPU2),
            LayoutError, f"cannot split kwargs['edges']: it is a {'nested' if kind == 'jagged' else kind} tensor")
        for kind, make in MADE.items()
    },
    "outputs along dim 2": (lambda: gather([ONE, ONE], "cpu", 2), LayoutError, "cannot gather outputs along dim 2"),
    "no outputs": (lambda: gather([], "cpu"), LengthError,
        "gather expects the outputs of at least one replica, got none"),
    "inputs for other modules": (lambda: parallel_apply([pytest.fail] * 2, [ONE]), LengthError,
        "number of modules 2 is not equal to the number of inputs 1"),
    "keywords for other modules": (lambda: parallel_apply([pytest.fail] * 2, [ONE] * 2, [{}]), LengthError,
        "modules 2 is not equal to the number of kwargs_tup 1"),
    "devices for other modules": (lambda: parallel_apply([pytest.fail] * 2, [ONE] * 2, None, ["cpu"] * 3), LengthError,
        "modules 2 is not equal to the number of devices 3"),
    **{
        f"weights {split}": (lambda call=call, split=split: call(split), kind, word, f"got {split}")
        for split, kind, word in [
            *((split, LengthError, "one weight in split for each of 2 devices") for split in ([1], [1, 2, 3], [])),
            *((split, LayoutError, "weights above 0 in split") for split in ([1, -1], [0, 1], [NAN, 1])),
        ]
        for call in (lambda split: DataParallel(nn.Linear(1, 1), CPU2, split=split),)
    },
    "weights of scatter": (lambda: scatter(torch.ones(4), CPU2, split=[1]), LengthError,
        "one weight in split for each of 2 devices, got [1]"),
    "weights of scatter, of which one is 0": (lambda: scatter(torch.ones(4), CPU2, split=[1, 0]), LayoutError,
        "weights above 0 in split, got [1, 0]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("call", "kind", "words"), [(c, k, w) for c, k, *w in (COMM | NESTED).values()], ids=COMM | NESTED
)
def test_it_is_refused(call, kind, words):
    with refused(kind, *words) as caught:
        call()
    if kind is GradientError:
        assert isinstance(caught.value, NotImplementedError)
    elif kind is StructureError or "cannot split" in str(caught.value):
        assert isinstance(caught.value, ValueError)
    elif "is not equal to the number" in str(caught.value):
        assert isinstance(caught.value, AssertionError)  # PyTorch asserts it


# ------------------------------------------------------------------------------------ on any devices


def wrapped(d, function=None, **options):
    return DataParallel(Applying(function, (2, 1)).to(d[0]), d, **options)


def of_rows(d):
    return DataParallel(nn.Bilinear(2, 2, 1).to(d[0]), d), torch.ones(4, 2, device=d[0]), torch.ones(3, 2, device=d[0])


def lazy(d):
    return nn.Sequential(nn.ReLU(), nn.LazyLinear(2, device=d[0])), torch.ones(4, 3, device=d[0])


def with_a_python_child(d):
    network = scripted(nn.Linear(3, 3))
    network._modules._python_modules["python"] = nn.Identity()  # no public way leads to one any more
    return network.to(d[0]), torch.ones(4, 3, device=d[0])


def returning(d, *outputs):
    """A DataParallel whose replicas return these, and its input."""
    return wrapped(d, lambda m, x: outputs[int(x[0, 0])]), torch.arange(float(len(outputs)), device=d[0])[:, None]


def step_of(loss):
    return lambda d: wrapped(d).step(loss, torch.ones(4, 2, device=d[0]))


DISAGREE = "inputs[0] has size 4", "inputs[1] has 3", "along dim 0"
NO_SHAPE = "uninitialized parameter", "1 is a LazyLinear whose parameters have no shape yet", "dummy forward"
PYTHON = "python modules are children of ScriptModule"
ON_DEVICES = {
    "sizes": (lambda d: of_rows(d)[0](*of_rows(d)[1:]), LayoutError, *DISAGREE),
    "sizes in a step": (lambda d: of_rows(d)[0].step(lambda o: o.mean(), *of_rows(d)[1:]), LayoutError, *DISAGREE),
    "sizes by keyword": (lambda d: of_rows(d)[0](input1=of_rows(d)[1], input2=of_rows(d)[1][:1]), LayoutError,
        "kwargs['input1'] has size 4", "kwargs['input2'] has 1", "shape (1, 2)"),
    "sizes in a dict": (lambda d: scatter_kwargs(({"a": [None, of_rows(d)[1]], "b": torch.ones(5)},), {}, d),
        LayoutError, "inputs[0]['a'][1]", "inputs[0]['b'] has 5"),
    "a dimension that is not there": (lambda d: wrapped(d, dim=2)(of_rows(d)[1]), LayoutError,
        "inputs[0] along dim 2", "shape is (4, 2)"),
    "a packed sequence": (lambda d: returning(d, 0, 0)[0](PACKED), StructureError, "inputs[0] is a PackedSequence"),
    "an output that is a packed sequence": (lambda d: wrapped(d, lambda m, x: PACKED)(of_rows(d)[1]), StructureError,
        "PackedSequence", "pack inside forward"),
    "a step without a batch": (lambda d: wrapped(d).step(nn.MSELoss()), LengthError, "step(loss_fn, *inputs, target)"),
    "a lazy module": (lambda d: DataParallel(lazy(d)[0], d)(lazy(d)[1]), NotReplicableError, *NO_SHAPE),
    "a lazy module, replicate": (lambda d: replicate(lazy(d)[0], d), NotReplicableError, *NO_SHAPE),
    "a lazy module, function": (lambda d: data_parallel(*lazy(d), d), NotReplicableError, *NO_SHAPE),
    "a scripted module with a Python child": (lambda d: replicate(with_a_python_child(d)[0], d), NotReplicableError,
        PYTHON, "python is a Identity inside the scripted network"),
    "a scripted child with a Python child": (lambda d: DataParallel(nn.ModuleDict({"outer": with_a_python_child(d)[0]}),
        d)(with_a_python_child(d)[1]), NotReplicableError, PYTHON, "outer.python ", "inside the scripted outer"),
    **{
        f"a loss that is a {got}": (step_of(loss), LayoutError, "loss_fn must return one number", "in replica 0",
            f"gave {got}")
        for got, loss in {
            "(2, 1)": lambda output: output,
            "float": lambda output: output.sum().item(),
            "NoneType": lambda output: None,
            "dict": lambda output: {"loss": output.sum()},
        }.items()
    },
}  # fmt: skip
OUTPUTS = {
    "two dtypes": ((ONE, ONE.long()), LayoutError, "outputs along dim 0", "index 1", "int64", "float32"),
    "two shapes": ((torch.ones(2, 3), torch.ones(2, 4)), LayoutError, "outputs along dim 0", "index 1", "(2, 4)",
        "(2, 3)"),
    "other dimensions": ((torch.ones(2, 3), ONE), LayoutError, "outputs along dim 0", "same number of dimensions",
        "index 1 has 1"),
    "two shapes, deep": (({"a": [torch.ones(2, 3)]}, {"a": [torch.ones(2, 4)]}), LayoutError,
        "outputs['a'][0] along dim 0", "(2, 4)"),
    "None": ((ONE, None), StructureError, "outputs: the structures differ", "replica 0: Tensor; replica 1: NoneType"),
    "tuple and list": (((ONE,), [ONE]), StructureError, "replica 0: tuple with [0]; replica 1: list with [0]"),
    "lengths": (((ONE,), (ONE,) * 2), StructureError, "replica 0: tuple with [0];", "replica 1: tuple with [0], [1]"),
    "nothing": (([ONE], []), StructureError, "the structures differ", "replica 1: list with nothing"),
    "keys": (({"a": ONE}, {"b": ONE}), StructureError, "same keys", "replica 1: dict with ['b']"),
    "numbers of keys": (({"a": ONE}, {"a": ONE, "b": ONE}), StructureError,
        "All dicts must have the same number of keys", "['a'], ['b']"),
    "a number": (([{"a": ONE}], [{"a": 3}]), StructureError, "cannot gather outputs[0]['a']", "replica 1: int"),
    "a list and a tensor, deep": (({"x": (0, [ONE])}, {"x": (0, ONE)}), StructureError, "outputs['x'][1]",
        "replica 1: Tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("call", "kind_of", "words"), [(c, k, w) for c, k, *w in ON_DEVICES.values()], ids=ON_DEVICES)
def test_it_is_refused_on_any_devices(devices, call, kind_of, words):
    with refused(kind_of, *words):
        call(devices(2))


@pytest.mark.parametrize(("outputs", "kind_of", "words"), [(o, k, w) for o, k, *w in OUTPUTS.values()], ids=OUTPUTS)
def test_outputs_that_differ_are_refused_unless_they_stay_apart(devices, outputs, kind_of, words):
    parallel, x = returning(devices(2), *outputs)
    for call in (lambda: gather(outputs, "cpu"), lambda: parallel(x)):
        with refused(kind_of, *words):
            call()
    parallel.gather_outputs = False
    assert len(parallel(x)) == 2
    if kind_of is StructureError:
        parallel.gather_outputs = True
        with refused(kind_of, "gather_outputs=False"):
            parallel(x)


# ------------------------------------------------------------------------------------------- devices

ALL = "this process has 'cpu' and sim:0 to sim:7"
NO_DEVICES = {
    "8": (8, f"there is no accelerator with index 8; {ALL}"),
    "-2": (-2, f"there is no accelerator with index -2; {ALL}"),
    "sim:9": ("sim:9", f"there is no accelerator with index 9; {ALL}"),
    "cuda:0": ("cuda:0", f"device cuda:0 is not available; {ALL}"),
    "meta": (torch.device("meta"), "device meta is not available"),
    "gpu": ("gpu", "expected a device such as 'cpu' or 'cuda:0', got 'gpu'"),
    "True": (True, "expected a device as int, str or torch.device, got True of type bool"),
    "1.5": (1.5, "expected a device as int, str or torch.device, got 1.5 of type float"),
    "None": (None, "expected a device as int, str or torch.device, got None of type NoneType"),
}
USES = {
    "resolve_device": lambda device: resolve_device(device),
    "DataParallel": lambda device: DataParallel(nn.Linear(1, 1), [device, device]),
    "data_parallel": lambda device: data_parallel(nn.Linear(1, 1), ONE, ["cpu", device]),
    "scatter": lambda device: scatter(torch.ones(2), ["cpu", device]),
    "replicate": lambda device: replicate(nn.Linear(1, 1), ["cpu", device]),
    "comm.broadcast": lambda device: comm.broadcast(ONE, [device]),
    "comm.broadcast_coalesced": lambda device: comm.broadcast_coalesced([ONE], [device]),
    "comm.scatter": lambda device: comm.scatter(ONE, [device]),
    "Broadcast": lambda device: Broadcast.apply([device], ONE),
    "Scatter": lambda device: Scatter.apply([device], None, 0, ONE),
}
USES_OF_ONE = {  # for these, None means something
    "parallel_apply": lambda device: parallel_apply([abs], [ONE], devices=[device]),
    "output_device": lambda device: DataParallel(nn.Linear(1, 1), CPU2, output_device=device),
    "comm.reduce_add": lambda device: comm.reduce_add([ONE], device),
    "comm.gather": lambda device: comm.gather([ONE], 0, device),
}


@pytest.mark.parametrize(("device", "message"), NO_DEVICES.values(), ids=NO_DEVICES)
@pytest.mark.parametrize("use", USES | USES_OF_ONE)
def test_a_device_that_does_not_exist_is_named_with_those_that_do(sim, device, message, use):
    if device is None and use in USES_OF_ONE:
        return
    with refused(DeviceError, message):
        (USES | USES_OF_ONE)[use](device)


def test_no_device_and_a_lone_one(sim):
    for call in (
        lambda: DataParallel(nn.Linear(1, 1), []),
        lambda: data_parallel(nn.Linear(1, 1), ONE, []),
        lambda: scatter(ONE, []),
        lambda: resolve_devices([]),
    ):
        with refused(LengthError, "expected at least one device, got an empty device list") as caught:
            call()
        assert isinstance(caught.value, IndexError)  # as PyTorch's, which takes the first one for outputs
    assert replicate(nn.Linear(1, 1), []) == []  # as PyTorch has it
    for lone, fix in [("cpu", "['cpu']"), (0, "[0]"), (torch.device("cpu"), "[device(type='cpu')]")]:
        for call in (resolve_devices, lambda lone: DataParallel(nn.Linear(1, 1), lone)):
            with refused(DeviceError, f"expected a list of devices, got {lone!r}; write {fix}"):
                call(lone)


ONE_AND_ONE = lambda *on_: [torch.ones(1, device=place) for place in on_]  # noqa: E731
ELSEWHERE = {
    "broadcast_coalesced": (lambda: comm.broadcast_coalesced(ONE_AND_ONE("sim:0", "sim:0", "sim:1"), [0, 1]),
        "one device", "tensor 0 is on sim:0", "tensor 2 on sim:1"),
    "reduce_add_coalesced": (lambda: comm.reduce_add_coalesced([ONE_AND_ONE("sim:0", "sim:0"), ONE_AND_ONE("sim:0",
        "sim:1")], 0), "input 1", "tensor 0 is on sim:0", "tensor 1 on sim:1"),
    "replicate": (lambda: replicate(nn.ModuleList([on("sim:0", mlp), on("sim:1", mlp)]), [0, 1]), "sim:1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [(c, w) for c, *w in ELSEWHERE.values()], ids=ELSEWHERE)
def test_tensors_on_several_devices_are_named(sim, call, words):
    with refused(DeviceError, *words):
        call()
