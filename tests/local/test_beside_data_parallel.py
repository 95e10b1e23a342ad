"""What people report about torch.nn.DataParallel, a test or a few for each complaint: PyTorch's own answer, then ours.

PyTorch's Python code runs here on simulated accelerators, over stand-ins for the three compiled functions that a build
without CUDA lacks (`reference`). The numbers are those of threads at pytorch/pytorch, unless they name a repository.

Not here: SyncBatchNorm (#38940), in test_sync_batch_norm.py.
"""

from __future__ import annotations

import contextvars
import copy
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from local.containers import ClassifierOutput, Frozen
from lockstep._base import devices as lockstep_devices
from lockstep._base.tree import tensors_in, tree_map
from lockstep.errors import LayoutError
from programs.networks import STRUCTURES, Applying, mlp
from programs.one_device import gradients, on, same

CPU = ["cpu", "cpu"]


def rows(count=4, on="sim:0"):
    return torch.randn(count, 3, device=on)


def wrapped(network, reference, **options):
    """By PyTorch's DataParallel, and by ours."""
    return [module.DataParallel(network, [0, 1], **options) for module in (reference, lockstep)]


def trains_as_alone(network, parallel, x):
    """The gradients of a batch through `parallel`, which wraps `network`, are those of `network` alone."""
    found = []
    for module in (network, parallel):
        network.zero_grad()
        module(x).square().sum().backward()
        found.append(gradients(network))
    same(*found)


def _scatter(tensor, devices, chunk_sizes, dim, streams):
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [chunk.to(f"sim:{index}") for chunk, index in zip(chunks, devices, strict=False)]


def _gather(tensors, dim, destination):
    target = "cpu" if destination == -1 else f"sim:{destination or 0}"
    return torch.cat([t.to(target) for t in tensors], dim)


def _broadcast_coalesced(tensors, devices, buffer_size):
    return [[t.to(f"sim:{index}") for t in tensors] for index in devices]


@pytest.fixture
def reference(sim, monkeypatch):
    """torch.nn.parallel, running on simulated accelerators."""
    for name, function in (
        ("_scatter", _scatter),
        ("_gather", _gather),
        ("_broadcast_coalesced", _broadcast_coalesced),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PyTorch is not compiled with NCCL support")
        yield torch.nn.parallel


def test_the_reference_is_the_reference(reference):
    """The stand-ins are good enough for PyTorch's own code to train as on one device."""
    network = on("sim:0", mlp)
    trains_as_alone(network, reference.DataParallel(network, [0, 1]), rows(5))


# ----------------------------------------------------- slow: threads and replicas made at every forward


class Started:
    """Counts the threads that are started, and the modules that are made into replicas."""

    def __init__(self, monkeypatch):
        self.threads = self.replicas = 0
        start, copy_of = threading.Thread.start, nn.Module._replicate_for_data_parallel

        def counted_start(thread):
            self.threads += 1
            start(thread)

        def counted_copy(module):
            self.replicas += 1
            return copy_of(module)

        monkeypatch.setattr(threading.Thread, "start", counted_start)
        monkeypatch.setattr(nn.Module, "_replicate_for_data_parallel", counted_copy)


@pytest.mark.parametrize("training", [True, False])
def test_slower_than_one_device(reference, monkeypatch, training):
    """facebookresearch/fairseq#34, #5421, #3917, #28212, #28275, dmlc/dgl#838, Lyken17/Efficient-PyTorch#19."""
    network, x, started = on("sim:0", mlp), rows(), Started(monkeypatch)
    theirs, ours = wrapped(network, reference)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            theirs(x)
        assert (started.threads, started.replicas) == (3 * 2, 3 * 2 * len(list(network.modules())))
        ours(x)
        started.threads = started.replicas = 0
        for _ in range(3):
            ours(x)
    assert (started.threads, started.replicas) == (0, 0)
    assert ours.statistics().calls["build"] == 1


# ---------------------------------------------------------------------- the first device runs full


def test_the_first_device_holds_all_outputs(reference, sim):
    """huggingface/transformers#279, facebookresearch/mmf#190, princeton-vl/RAFT#33, facebookresearch/DPR#104."""
    network = on("sim:0", nn.Linear, 1, 1000)
    x, target = torch.randn(64, 1), torch.randn(64, 1000)
    outputs, parameters = 32 * 1000 * 4, 2 * 1000 * 4

    def arriving(step):
        network.zero_grad()
        step()
        sim.reset_copies()
        step()
        return sim.copies()["sim:1", "sim:0"].bytes, gradients(network)

    theirs, ours = wrapped(network, reference)
    on_first = target.to("sim:0")
    theirs_bytes, expected = arriving(lambda: F.mse_loss(theirs(x), on_first).backward())
    ours_bytes, found = arriving(lambda: ours.step(F.mse_loss, x, target))
    assert theirs_bytes >= outputs
    assert ours_bytes < 2 * parameters
    same(found, expected)


# --------------------------------------------- what is in a forward, and what comes of it: a table of both answers

DEVICES = [0, 1]
ALONE, OTHER = "as alone", "anything but ours"
raises = partial(partial, pytest.raises)


def trains(name):
    """A structure by name: its gradients through DataParallel are those without, or it raises."""

    def look(parallel):
        network = on("sim:0", STRUCTURES[name])
        trains_as_alone(network, parallel.DataParallel(network, DEVICES), rows())
        return ALONE

    return look


def outputs(make):
    """What is gathered of a forward that returns `make` of its rows; all that is as from one device is "as alone"."""

    def look(parallel):
        network, x = Applying(lambda m, x: make(m.linear(x))).to("sim:0"), rows()
        alone = iter(list(tensors_in(network(x))))

        def told(value):
            return ALONE if isinstance(value, torch.Tensor) and torch.allclose(value, next(alone)) else value

        return tree_map(told, parallel.DataParallel(network, DEVICES)(x))

    return look


def same_replicas(parallel):
    network = on("sim:0", mlp).eval()
    with torch.no_grad():
        return parallel.replicate(network, DEVICES, detach=True)[1] is parallel.replicate(network, DEVICES, True)[1]


def place_of_weights(parallel):
    """(The warning itself needs CUDA. Its cause shows here: PyTorch's replica has other weights in every forward.)"""
    network, found = on("sim:0", nn.LSTM, 3, 4), []
    for _ in range(2):
        found.append(parallel.replicate(network, DEVICES)[1])
        found[-1].flatten_parameters()
    one, other = ([w.data_ptr() for w in each._flat_weights] for each in found)
    return one == other and all(w is p for w, p in zip(found[1]._flat_weights, found[1].parameters(), strict=True))


def state(parallel):
    def forward(m, x):
        m.forwards, m.cache = m.forwards + 1, len(x)
        return m.linear(x)

    network = Applying(forward, forwards=0, cache=None).to("sim:0")
    for _ in range(3):
        parallel.DataParallel(network, DEVICES)(rows())
    return network.forwards, network.cache


def hooks(parallel):
    """The hooks of each replica, and of the network, when each has registered one in its forward."""

    def forward(m, x):
        m.linear.register_forward_hook(lambda m, a, y: y * 2)
        return m.linear(x)

    network = Applying(forward).to("sim:0")
    replicas = parallel.replicate(network, DEVICES)
    for replica, device in zip(replicas, ("sim:0", "sim:1"), strict=True):
        replica(rows(1, device))
    return [len(each.linear._forward_hooks) for each in (*replicas, network)]


def deepcopy(parallel):
    def forward(m, x):
        twin = copy.deepcopy(m)
        assert all(p.is_leaf for p in twin.parameters())
        return m.linear(x) + 0 * twin.linear(x)

    network = Applying(forward).to("sim:0")
    trains_as_alone(network, parallel.DataParallel(network, DEVICES), rows())
    return ALONE


def chunks(parallel):
    return [len(chunk) for chunk in parallel.scatter(rows(9), list(range(8)))]


def rows_beside_a_flag(parallel):
    network = Applying(lambda m, x, flag=False: m.linear(x) * flag).to("sim:0")
    x, wrapper = rows(9), parallel.DataParallel(network, [0, 1, 2, 3])
    torch.testing.assert_close(wrapper(x, flag=True), network(x, flag=True))
    assert wrapper(x[:0]).shape == (0, 2)  # no rows at all run on the first device
    return ALONE


def sets_of_arguments(parallel):
    args, kwargs = parallel.scatter_gather.scatter_kwargs((True,), {"x": rows(3)}, [0, 1, 2, 3])
    return len(args), len(kwargs)


def scattered(one, other):
    """The second tensor's rows in each chunk, beside a first one of another size."""

    def look(parallel):
        a, b = (torch.arange(count, device="sim:0") for count in (one, other))
        return [part["b"].tolist() for part in parallel.scatter({"a": a, "b": b}, [0, 1, 2, 3])]

    return look


setting = contextvars.ContextVar("setting", default="unset")


def settings(parallel):
    """What the replicas' forwards see under a caller who has set everything."""
    seen = []

    def forward(m, x):
        y = m.linear(x)
        cache, inference = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
        seen.append((str(y.dtype), cache, inference, setting.get(), torch.ones(1).device.type))
        return y.float()

    wrapper, x = parallel.DataParallel(Applying(forward).to("sim:0"), DEVICES), rows(2)
    token = setting.set("set")
    try:
        with torch.autocast("sim", torch.bfloat16, cache_enabled=False), torch.device("meta"):
            wrapper(x)
        with torch.inference_mode():
            wrapper(x)
    finally:
        setting.reset(token)
    return seen


def packed(parallel):
    """How many tensors of two rows the caller's hooks for saved tensors have seen: tanh saves one in each replica."""
    network, shapes = on("sim:0", mlp), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        parallel.DataParallel(network, DEVICES)(torch.ones(4, 3, device="sim:0"))
    return shapes.count((2, 4)) >= 2


def on_the_cpu(parallel):
    network, x = mlp(), torch.randn(5, 3)
    pieces = parallel.parallel_apply(parallel.replicate(network, CPU), parallel.scatter(x, CPU), devices=CPU)
    torch.testing.assert_close(parallel.gather(pieces, "cpu"), network(x))
    return ALONE


def compiled(parallel):
    """What is set on a compiled module goes to the module inside, which replicas share: their empty slots, too."""
    network = on("sim:0", mlp)
    names = list(network.state_dict())
    module = torch.compile(network, backend="eager")
    replicas = parallel.replicate(module, DEVICES)
    assert all(list(each.state_dict()) == list(module.state_dict()) for each in replicas)
    return list(network.state_dict()) == names


NORMS = ["weight_norm", "legacy weight_norm", "spectral_norm", "legacy spectral_norm"]
LISTS = "ParameterList and ParameterDict"
COMPLAINTS = {  # the threads, and what shows it: the answer of PyTorch's calls, and that of ours
    "#3930, #4216, #17540, #13824: replicate() makes all anew": (same_replicas, False, True),
    "#38493, #40457, #49828, #74426, huggingface/transformers#10215, espnet/espnet#2169: a replica has no parameters":
        (trains("asks for its parameters"), raises(StopIteration), ALONE),
    "lucidrains/BS-RoFormer#25: a list of layers holds those of the network":
        (trains("a list of layers, and a method"), raises(RuntimeError), ALONE),
    "#2720, #7568, #11476: lists of parameters (works there)": (trains(LISTS), ALONE, ALONE),
    **{f"#36035, #42327, #40589: {norm} (fixed there)": (trains(norm), ALONE, ALONE) for norm in NORMS},
    "#24155, #32860, allenai/allennlp#2793: RNN weights are not one chunk": (place_of_weights, False, True),
    "#11476, #42478, and its docstring: state that forward sets is lost": (state, (0, None), (3, 2)),
    "#128272, #42478: replicas share hooks": (hooks, [2, 2, 2], [1, 1, 0]),
    "#33785: deepcopy in forward": (deepcopy, raises(RuntimeError), ALONE),
    "#41327, huggingface/transformers#5941, #5685: dataclasses": (outputs(Frozen), raises(TypeError), Frozen(ALONE)),
    "Lightning-AI/pytorch-lightning#2507: outputs of models":
        (outputs(lambda y: ClassifierOutput(x=y, y=y * 2)), OTHER, ClassifierOutput(x=ALONE, y=ALONE)),
    "#62466: texts": (outputs(lambda y: {"y": y, "name": "text"}), OTHER, {"y": ALONE, "name": "text"}),
    **{f"#13447, #94699: {value}": (outputs(lambda y, value=value: (y, value)), raises(TypeError), (ALONE, value))
        for value in (3, 0.5, True)},
    "#94699: None (works there)": (outputs(lambda y: (y, None)), (ALONE, None), (ALONE, None)),
    "#94699: other values in each replica":
        (outputs(lambda y: (y, [y.device.index] * (1 + y.device.index))), raises(TypeError), (ALONE, [[0], [1, 1]])),
    "#15161, #31460, #16432, #52260: an odd last batch leaves devices idle": (chunks, [2] * 4 + [1], [2] + [1] * 7),
    "MIC-DKFZ/nnUNet#677: 9 rows on 4 devices are 3 chunks, but a flag goes to all 4":
        (rows_beside_a_flag, raises(TypeError), ALONE),
    "m-bain/frozen-in-time#23: 3 rows beside a flag by position run on 3 of 4": (sets_of_arguments, (4, 3), (3, 3)),
    "rows are lost where sizes differ (found in its code)": (scattered(5, 7), OTHER, raises(LayoutError)),
    "and where there is plainly a row for each replica": (scattered(5, 4), OTHER, [[0], [1], [2], [3]]),
    "#50170, #105682, #125186, #115917: autocast and other settings get lost":
        (settings, [("torch.float32", True, False, "unset", "cpu")] * 4,
        [("torch.bfloat16", False, False, "set", "meta")] * 2 + [("torch.float32", True, True, "set", "cpu")] * 2),
    "the same threads: hooks for saved tensors": (packed, False, True),
    "#143239, #69966, intel/torch-xpu-ops#2706, flagos-ai/Torch-FL#384, ahayler/s4c#6: nothing runs on the CPU":
        (on_the_cpu, raises(ValueError), ALONE),
    "#94636, #118260, huggingface/transformers#22326: replicas of a compiled module destroy it":
        (compiled, raises(RecursionError), True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_what_people_report(reference, compiler, complaint):
    look, theirs, ours = COMPLAINTS[complaint]
    for parallel, answer in ((reference, theirs), (lockstep.local, ours)):
        if isinstance(answer, partial):
            with answer():
                look(parallel)
        else:
            found = look(parallel)
            assert found != ours if answer is OTHER else found == answer


# --------------------------------------------------------------------------------------- what needs more


def test_outputs_without_dimensions(reference):
    """#9811, #7956, Lightning-AI/pytorch-lightning#256, #5613, airsplay/lxmert#17."""
    theirs, ours = wrapped(Applying(lambda m, x: m.linear(x).mean()).to("sim:0"), reference)
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0"):
        assert theirs(rows()).shape == ours(rows()).shape == (2,)
    network, x = Applying(lambda m, x: m.linear(x.t()).sum()).to("sim:0"), rows().t()
    theirs, ours = wrapped(network, reference, dim=1)
    with pytest.raises(IndexError):  # along another dim: an error there
        theirs(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ours(x).sum(), network(x))


@pytest.fixture
def untried_connections():
    lockstep_devices.direct_copy_works.cache_clear()
    yield
    lockstep_devices.direct_copy_works.cache_clear()


def test_connections_that_deliver_something_else(reference, sim, untried_connections):
    """#52142, #7019, #10681, #8594, deepspeedai/DeepSpeed#4433: hangs and wrong results on some machines."""
    network = on("sim:0", mlp)
    x = torch.randn(4, 3, device="sim:0")
    expected = network(x)
    sim.break_peer_copies(0, 1)
    sim.break_peer_copies(1, 0)
    assert not torch.allclose(reference.DataParallel(network, [0, 1])(x), expected)  # and not a word
    parallel = lockstep.DataParallel(network, [0, 1])
    with pytest.warns(UserWarning, match="did not deliver what was sent") as told:
        torch.testing.assert_close(parallel(x), expected)
    assert {str(w.message).split(";")[0] for w in told} == {
        f"a direct copy from sim:{a} to sim:{b} did not deliver what was sent" for a, b in ((0, 1), (1, 0))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        trains_as_alone(network, parallel, x)


def test_an_accelerator_that_no_compiled_code_knows(sim):
    """#143239 and others again, and no stand-ins: without CUDA, PyTorch has no code to scatter with."""
    network = on("sim:0", mlp)
    x = torch.randn(5, 3, device="sim:0")
    if not hasattr(torch._C, "_scatter"):
        with pytest.raises(AttributeError, match="_scatter"):
            torch.nn.DataParallel(network, [0, 1])(x)
    trains_as_alone(network, lockstep.DataParallel(network, [0, 1]), x)


@pytest.mark.parametrize("ids", [[0], [0, 1]])
def test_the_module_of_a_compiled_wrapper_is_compiled_on_one_device_and_has_replicas_on_several(compiler, sim, ids):
    graphs, plain, x = [], mlp().to("sim:0"), torch.randn(5, 3)
    calls = []
    plain.register_forward_pre_hook(lambda *_: calls.append(1))

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lockstep.DataParallel(plain, ids), backend=backend)
    torch.testing.assert_close(compiled(x), plain(x.to("sim:0")))
    assert len(graphs) == (len(ids) == 1)
    assert len(calls) == len(ids) + 1


@pytest.mark.around
@pytest.mark.parametrize(
    ("order", "backend"),
    [
        ("DataParallel(compile)", "eager"),
        ("compile(DataParallel)", "aot_eager"),
        ("DataParallel(compile)", "aot_eager"),
    ],
)
def test_compiled_modules(compiler, backend, order):
    """#94636, #118260 (Dynamo is not thread-safe), huggingface/transformers#22326."""
    plain = mlp()
    network = copy.deepcopy(plain)
    if order == "DataParallel(compile)":
        parallel = lockstep.DataParallel(torch.compile(network, backend=backend), CPU)
    else:
        parallel = torch.compile(lockstep.DataParallel(network, CPU), backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, network)]
    for rows in (5, 4, 5):
        x = torch.randn(rows, 3)
        for module, optimizer in ((plain, optimizers[0]), (parallel, optimizers[1])):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        for got, want in zip(network.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), plain(x))
