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

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from local.containers import ClassifierOutput, Frozen
from lockstep._base import devices as lockstep_devices
from lockstep.errors import LayoutError
from lockstep.local import parallel_apply, replicate, scatter, scatter_kwargs
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


def test_replicate_costs_as_much_every_time(reference, sim):
    """#3930, #4216, #17540, #13824: replicas are the same modules, whose values are sent in one copy."""
    network = on("sim:0", mlp).eval()
    with torch.no_grad():
        first, again = (reference.replicate(network, [0, 1], detach=True) for _ in range(2))
        assert first[1] is not again[1]
        first, again = (replicate(network, [0, 1], detach=True) for _ in range(2))
        sim.reset_copies()
        reference.replicate(network, [0, 1], detach=True)
        assert sim.copies()["sim:0", "sim:1"].calls > 0
        sim.reset_copies()
        third = replicate(network, [0, 1], detach=True)
        assert sim.copies()["sim:0", "sim:1"].calls == 1
    assert all(a is b is c for a, b, c in zip(first, again, third, strict=True))


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


# ------------------------------------------------------------------------- what replicas have and are


NORMS = ["weight_norm", "legacy weight_norm", "spectral_norm", "legacy spectral_norm"]
THEIRS = {  # what PyTorch's DataParallel makes of it; None: it trains as alone, and regressions would show here
    "asks for its parameters": (StopIteration, None),
    "a list of layers, and a method": (RuntimeError, "same device"),
    "ParameterList and ParameterDict": (None, None),
    **dict.fromkeys(NORMS, (None, None)),
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", THEIRS)
def test_modules_that_use_their_own_parameters(reference, name):
    """#38493, #40457, #49828, #74426, huggingface/transformers#10215, espnet/espnet#2169, lucidrains/BS-RoFormer#25.

    Norms and lists: #36035, #42327, #40589 (fixed there), #2720, #7568, #11476 (works there).
    """
    network, (error, words) = on("sim:0", STRUCTURES[name]), THEIRS[name]
    theirs, ours = wrapped(network, reference)
    if error is None:
        trains_as_alone(network, theirs, rows())
    else:
        with pytest.raises(error, match=words):
            theirs(rows())
        assert not list(reference.replicate(network, [0, 1])[1].parameters())
    trains_as_alone(network, ours, rows())


def test_rnn_weights_of_a_replica_are_others_at_every_step(reference):
    """#24155, #32860, allenai/allennlp#2793: what cuDNN wants in one chunk must stay where it was put.

    (The warning itself needs CUDA. Its cause shows here: PyTorch's replica has other weights in every forward.)
    """
    network = on("sim:0", nn.LSTM, 3, 4)
    theirs = [reference.replicate(network, [0, 1])[1] for _ in range(2)]
    assert theirs[0]._flat_weights[0].data_ptr() != theirs[1]._flat_weights[0].data_ptr()
    ours, weights = [], []
    for _ in range(2):
        replica = replicate(network, [0, 1])[1]
        replica.flatten_parameters()
        ours.append(replica)
        weights.append([w.data_ptr() for w in replica._flat_weights])
    assert ours[0] is ours[1]
    assert weights[0] == weights[1]
    assert all(w is p for w, p in zip(ours[0]._flat_weights, ours[0].parameters(), strict=True))


def test_state_that_forward_sets_is_lost(reference):
    """#11476, #42478, and a warning in the docstring of torch.nn.DataParallel."""

    def forward(m, x):
        m.forwards, m.cache = m.forwards + 1, x.detach()
        return m.linear(x)

    network, x = Applying(forward, forwards=0, cache=None).to("sim:0"), rows()
    theirs, ours = wrapped(network, reference)
    for _ in range(3):
        theirs(x)
    assert (network.forwards, network.cache) == (0, None)
    for _ in range(3):
        ours(x)
    for replica, own in zip(ours.replicate(network, [0, 1]), x.chunk(2), strict=True):
        assert replica.forwards == 3
        assert torch.equal(replica.cache.cpu(), own.cpu())
    assert network.forwards == 3


def test_hooks_are_shared_among_replicas(reference):
    """#128272, #42478: a hook that a replica registers in its forward."""

    def forward(m, x):
        m.linear.register_forward_hook(lambda m, a, y: y * 2)
        return m.linear(x)

    for replicate_, of_each, of_network in ((reference.replicate, 2, 2), (replicate, 1, 0)):
        network = Applying(forward).to("sim:0")
        replicas = replicate_(network, [0, 1])
        for replica, device in zip(replicas, ("sim:0", "sim:1"), strict=True):
            replica(rows(1, device))
        assert [len(replica.linear._forward_hooks) for replica in replicas] == [of_each] * 2
        assert len(network.linear._forward_hooks) == of_network


def test_deepcopy_in_forward(reference):
    """#33785."""

    def forward(m, x):
        twin = copy.deepcopy(m)
        assert all(p.is_leaf for p in twin.parameters())
        with torch.no_grad():
            return m.linear(x) + 0 * twin.linear(x)

    network, x = Applying(forward).to("sim:0"), rows()
    theirs, ours = wrapped(network, reference)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        theirs(x)
    torch.testing.assert_close(ours(x), network.linear(x).detach())


# --------------------------------------------------------------------------------- inputs and outputs


def both(reference, make, **options):
    """The output of PyTorch's DataParallel, or its error; ours; and that of one device."""
    network, x = Applying(lambda m, x: make(m.linear(x))).to("sim:0"), rows()
    theirs, ours = wrapped(network, reference, **options)
    try:
        found = theirs(x)
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        found = error
    return found, ours(x), network(x)


def test_dataclasses(reference):
    """#41327, huggingface/transformers#5941, #5685, Lightning-AI/pytorch-lightning#2507."""
    theirs, ours, alone = both(reference, lambda y: Frozen(y))
    assert isinstance(theirs, TypeError)
    assert type(ours) is Frozen
    torch.testing.assert_close(ours.x, alone.x)
    theirs, ours, alone = both(reference, lambda y: ClassifierOutput(x=y, y=y * 2))
    assert isinstance(theirs, Exception) or not torch.is_tensor(theirs.x)
    assert type(ours) is ClassifierOutput
    torch.testing.assert_close([ours.y, ours["x"]], [alone.y, alone.x])


def test_other_outputs_than_tensors(reference):
    """#62466, #13447, #94699."""
    theirs, ours, alone = both(reference, lambda y: {"y": y, "name": "text"})
    assert "map object" in theirs["name"]
    assert ours["name"] == "text"
    torch.testing.assert_close(ours["y"], alone["y"])
    for value in (3, 0.5, True, None):
        theirs, ours, _ = both(reference, lambda y, value=value: (y, value))
        assert value is None or isinstance(theirs, TypeError)
        assert ours[1] is value
    theirs, ours, _ = both(reference, lambda y: (y, [y.device.index] * (1 + y.device.index)))
    assert isinstance(theirs, ValueError | TypeError)
    assert ours[1] == [[0], [1, 1]]


def test_outputs_without_dimensions(reference):
    """#9811, #7956, Lightning-AI/pytorch-lightning#256, #5613, airsplay/lxmert#17."""
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0"):
        theirs, ours, _ = both(reference, lambda y: y.mean())
    assert theirs.shape == ours.shape == (2,)
    network, x = Applying(lambda m, x: m.linear(x.t()).sum()).to("sim:0"), rows().t()
    theirs, ours = wrapped(network, reference, dim=1)
    with pytest.raises(IndexError):  # along another dim: an error there
        theirs(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ours(x).sum(), network(x))


def test_an_odd_last_batch_leaves_devices_idle(reference):
    """#15161, #31460, #16432, #52260, MIC-DKFZ/nnUNet#677, m-bain/frozen-in-time#23.

    9 rows on 4 devices are 3 chunks there, but a flag goes to all 4, and 3 rows beside a flag by position run on 3.
    """
    x = rows(9)
    assert [len(c) for c in reference.scatter(x, list(range(8)))] == [2, 2, 2, 2, 1]
    assert [len(c) for c in scatter(x, list(range(8)))] == [2, 1, 1, 1, 1, 1, 1, 1]
    network = Applying(lambda m, x, flag=False: m.linear(x) * flag).to("sim:0")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        reference.DataParallel(network, [0, 1, 2, 3])(x, flag=True)
    torch.testing.assert_close(lockstep.DataParallel(network, [0, 1, 2, 3])(x, flag=True), network(x, flag=True))
    args, kwargs = reference.scatter_gather.scatter_kwargs((True,), {"x": x[:3]}, [0, 1, 2, 3])
    assert (len(args), len(kwargs)) == (4, 3)
    args, kwargs = scatter_kwargs((True,), {"x": x[:3]}, [0, 1, 2, 3])
    assert args == ((True,),) * 3
    same([torch.cat([k["x"].cpu() for k in kwargs])], [x[:3]], rtol=0, atol=0)
    assert lockstep.DataParallel(network, [0, 1])(x[:0]).shape == (0, 2)  # no rows at all run on the first device


def test_rows_are_lost_where_sizes_differ(reference):
    """Found while reading `zip(..., strict=False)` in PyTorch's scatter; the last: plainly a row for each replica."""
    five, seven, four = (torch.arange(count, device="sim:0") for count in (5, 7, 4))
    for other in (seven, four):
        theirs = reference.scatter({"a": five, "b": other}, [0, 1, 2, 3])
        assert sum(len(part["b"]) for part in theirs) < len(other)
    with pytest.raises(LayoutError, match=r"inputs\['a'\] has size 5 there, and inputs\['b'\] has 7"):
        scatter({"a": five, "b": seven}, [0, 1, 2, 3])
    ours = scatter({"a": five, "b": four}, [0, 1, 2, 3])
    assert [part["b"].tolist() for part in ours] == [[0], [1], [2], [3]]
    assert torch.cat([part["a"].cpu() for part in ours]).tolist() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------- the caller's settings

setting = contextvars.ContextVar("setting", default="unset")


def settings(parallel_of):
    """Return what the replicas' forwards see under a caller who has set everything."""

    def forward(m, x):
        y = m.linear(x)
        m.seen.append(("autocast", str(y.dtype)))
        m.seen.append(("cache", str(torch.is_autocast_cache_enabled())))
        m.seen.append(("inference", str(torch.is_inference_mode_enabled())))
        m.seen.append(("variable", setting.get()))
        m.seen.append(("default device", torch.ones(1).device.type))
        return y.float()

    parallel, x = parallel_of(Applying(forward, seen=[]).to("sim:0"), [0, 1]), rows(2)
    token = setting.set("set")
    try:
        with torch.autocast("sim", torch.bfloat16, cache_enabled=False), torch.device("meta"):
            parallel(x)
        with torch.inference_mode():
            parallel(x)
    finally:
        setting.reset(token)
    return set(parallel.module.seen)


def test_the_callers_settings_are_not_those_of_the_replicas(reference):
    """#50170, #105682, #125186, #115917: bfloat16 autocast becomes float16, and other settings get lost."""
    asked = {("autocast", "torch.bfloat16"), ("cache", "False"), ("inference", "True"), ("variable", "set")}
    asked |= {("default device", "meta")}
    theirs = settings(reference.DataParallel)
    assert not asked & theirs
    assert ("autocast", "torch.float32") in theirs  # only CUDA's is looked at, and that without its dtype
    ours = settings(lockstep.DataParallel)
    assert asked <= ours
    assert ("variable", "unset") not in ours
    assert {("autocast", "torch.float16"), ("default device", "cpu")} & ours == {("default device", "cpu")}


def test_saved_tensor_hooks_do_not_reach_the_replicas(reference):
    """The same threads, for torch.autograd.graph.saved_tensors_hooks (save_on_cpu and the like)."""

    def packed(parallel):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
            parallel(torch.ones(4, 3, device="sim:0"))
        return shapes.count((2, 4))  # tanh saves its output, in every replica

    network = on("sim:0", mlp)
    assert packed(reference.DataParallel(network, [0, 1])) == 0
    assert packed(lockstep.DataParallel(network, [0, 1])) >= 2


# ------------------------------------------------------------------------------------------- machines


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


def test_devices_other_than_cuda(reference):
    """#143239, #69966, intel/torch-xpu-ops#2706, flagos-ai/Torch-FL#384, ahayler/s4c#6: nothing runs on the CPU."""
    network, x = mlp(), torch.randn(5, 3)
    for call in (
        lambda: reference.DataParallel(network, CPU),
        lambda: reference.replicate(network, CPU),
        lambda: reference.scatter(x, CPU),
        lambda: reference.gather([x, x], "cpu"),
        lambda: reference.parallel_apply([network, network], [x, x], devices=CPU),
    ):
        with pytest.raises((ValueError, RuntimeError, AssertionError)):
            call()
    trains_as_alone(network, lockstep.DataParallel(network, CPU), x)
    outputs = parallel_apply(replicate(network, CPU), scatter(x, CPU), devices=CPU)
    torch.testing.assert_close(lockstep.local.gather(outputs, "cpu"), network(x))


def test_an_accelerator_that_no_compiled_code_knows(sim):
    """The same threads, and no stand-ins: without CUDA, PyTorch has no code to scatter with."""
    network = on("sim:0", mlp)
    x = torch.randn(5, 3, device="sim:0")
    if not hasattr(torch._C, "_scatter"):
        with pytest.raises(AttributeError, match="_scatter"):
            torch.nn.DataParallel(network, [0, 1])(x)
    trains_as_alone(network, lockstep.DataParallel(network, [0, 1]), x)


# -------------------------------------------------------------------- gradients of gradients, compiling


@pytest.mark.parametrize("kind_of_devices", ["cpu", "sim"])
def test_gradient_penalty(reference, kind_of_devices):
    """#2467, #19024: gradients through a gradient, also through the scattered input and the gathered output.

    PyTorch's Python half of it is right today, as the last part of the test finds.
    """
    devices = CPU if kind_of_devices == "cpu" else ["sim:0", "sim:1"]
    network = on(devices[0], mlp)
    x = rows(5, devices[0]).requires_grad_()
    modules, found = [network, lockstep.DataParallel(network, devices)], []
    if kind_of_devices == "sim":
        modules.append(reference.DataParallel(network, [0, 1]))
    for module in modules:
        network.zero_grad()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
        found.append(gradients(network))
    for got in found[1:]:
        same(got, found[0])


def test_replicas_of_a_compiled_module(reference, compiler):
    """#94636, #118260, huggingface/transformers#22326: making replicas destroys the network itself.

    What is set on a compiled module goes to the module inside, which replicas share: their empty slots, their children.
    """
    network = on("sim:0", mlp)
    names = list(network.state_dict())
    reference.replicate(torch.compile(network, backend="eager"), [0, 1])
    with pytest.raises(RecursionError):
        network.state_dict()
    network = on("sim:0", mlp)
    compiled = torch.compile(network, backend="eager")
    replicas = replicate(compiled, [0, 1])
    assert list(network.state_dict()) == names
    assert all(list(r.state_dict()) == list(compiled.state_dict()) for r in replicas)


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
