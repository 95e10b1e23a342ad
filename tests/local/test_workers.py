"""parallel_apply: turns and threads, the context that threads carry over, errors, and the meetings of replicas."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.errors import ReplicaError
from lockstep.local import current_replica, parallel_apply, workers
from processes import output_of

TIMEOUT = 30  # seconds, for events that come at once or never


def run(function, count=2, devices=None):
    """Return what ``function`` gives in each of ``count`` replicas."""
    return parallel_apply([function] * count, [()] * count, devices=devices)


def ident():
    return threading.get_ident()


class Met:
    """A call whose replicas meet first, so that each runs in a thread of its own."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        share("the replicas", None)
        return self.function(*args)


def run_met(function, count=2, devices=None):
    return run(Met(function), count, devices)


def share(key, value):
    replica = current_replica()
    return replica.exchange.all_gather(key, replica.index, value)


# ------------------------------------------------------------------------------------ turns and threads


def test_replicas_on_one_device_run_one_after_the_other_in_the_callers_thread(first):
    running, order = [], []

    def call(index, x):
        assert running == []
        running.append(index)
        order.append((index, ident()))
        running.remove(index)

    parallel_apply([call] * 3, [(i, torch.ones(1, device=first)) for i in range(3)])
    assert order == [(i, ident()) for i in range(3)]


def test_those_on_several_devices_run_side_by_side_and_those_on_one_take_turns(sim):
    devices, running, idents = [0, "cpu", 0, 1, "cpu", 0], set(), {}
    together = threading.Barrier(3, timeout=TIMEOUT)  # one from each device

    def call(index):
        assert devices[index] not in running
        running.add(devices[index])
        idents.setdefault(devices[index], ident())
        if index in (0, 1, 3):
            together.wait()
        running.discard(devices[index])

    parallel_apply([call] * 6, range(6), devices=devices)
    assert idents[0] == ident()
    assert len(set(idents.values())) == 3


def test_replicas_that_meet_have_threads_and_still_take_turns():
    for _ in range(10):
        running, order = [], []

        def call(index):
            idents = []
            for _ in range(5):
                assert running == []  # noqa: B023
                running.append(index)  # noqa: B023
                order.append(index)  # noqa: B023
                idents.append(ident())
                running.remove(index)  # noqa: B023
                share("again", index)
            return idents

        found = parallel_apply([call] * 4, range(4))
        assert order == [0, 1, 2, 3] * 5
        assert [len(set(each)) for each in found] == [1] * 4
        assert len({each[0] for each in found}) == 4
        assert found[0][0] == ident()


def test_the_same_threads_in_every_call_and_none_is_started_then(monkeypatch):
    before, threads = run_met(ident, 4), set(threading.enumerate())

    def refuse(self):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for count in (2, 3, 4) * 5:
        assert run_met(ident, count) == before[:count]  # replica i on the same thread
    with pytest.raises(ValueError, match="as usual"):
        run_met(partial(int, "as usual"))
    assert run_met(ident, 4) == before
    with pytest.raises(AssertionError, match="a thread was started"):
        run_met(ident, 64)
    assert run_met(ident, 4) == before
    assert set(threading.enumerate()) == threads
    assert all(t.daemon for t in threads if t.name.startswith("lockstep-worker"))  # and the process can end


def test_nested_calls():
    def outer():
        return [ident(), *run_met(ident)]

    idents = run_met(outer, 3)
    assert all(own[0] == own[1] != own[2] for own in idents)  # the first inner replica runs in the outer one's thread
    assert len({own[0] for own in idents}) == 3
    assert not {own[0] for own in idents} & {own[2] for own in idents}
    threads = set(threading.enumerate())
    run(outer, 1)
    assert set(threading.enumerate()) == threads


def test_calls_from_several_threads():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: parallel_apply([Met(torch.add)] * 2, [(n, 1), (n, 2)]), torch.arange(40)))
    assert [[int(t) for t in r] for r in results] == [[n + 1, n + 2] for n in range(40)]


def test_after_a_fork():
    script = """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore")  # of forking with threads
        from lockstep.local import current_replica, parallel_apply, workers
        met = lambda: (current_replica().all_gather("here", None), threading.get_ident())[1]
        parent = parallel_apply([met] * 2, [(), ()])
        child = os.fork()
        if child == 0:
            idents = parallel_apply([met] * 2, [(), ()])
            os._exit(0 if len(set(idents)) == 2 and parallel_apply([met] * 2, [(), ()]) == idents else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parallel_apply([met] * 2, [(), ()]) == parent
        print("right")
    """
    assert output_of(textwrap.dedent(script)) == "right\n"


def test_an_interrupt_that_becomes_another_error_is_still_an_interrupt():
    """A second Ctrl-C may come while a ``threading.Condition`` is left, which raises a RuntimeError then."""

    def call(index):
        if index == 0:
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("release unlocked lock")

    with pytest.raises(KeyboardInterrupt) as caught:
        parallel_apply([call] * 2, range(2))
    assert str(caught.value.__context__) == "release unlocked lock"
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # while it is handled, an error is an error
        with pytest.raises(ValueError, match="as usual"):
            run(partial(int, "as usual"))


def test_a_worker_that_is_left_behind_ends_without_an_error(monkeypatch):
    """A second Ctrl-C does not wait for it."""
    errors, second, freed = [], threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    class Output:
        def __del__(self):
            freed.set()

    def call(index):
        share("begin", None)
        if index == 0:
            raise KeyboardInterrupt
        second.wait(TIMEOUT)
        return Output()

    def interrupted(self):
        raise KeyboardInterrupt("second")

    monkeypatch.setattr(workers._Running, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt, match="second"):
        parallel_apply([call] * 2, range(2))
    second.set()
    assert freed.wait(TIMEOUT)
    assert errors == []


@pytest.mark.parametrize("call", [torch.neg, Met(torch.neg)], ids=["turns", "met"])
def test_a_call_keeps_nothing_alive(call):
    class Function:
        def __call__(self, x):
            return call(x)

    function, x = Function(), torch.ones(1, 2)
    gc.disable()  # nor a circle, which only the collector ends
    try:
        outputs = parallel_apply([function, function], [x, x])
        alive = [weakref.ref(o) for o in (function, x, *outputs)]
        del function, x, outputs
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


# -------------------------------------------------------------------------------- inputs and outputs


def test_a_bare_argument_is_the_only_one(first):
    x = torch.ones(3, 2, device=first)
    for inputs in ([x, x], [(x,), (x,)], [[x], [x]]):
        for output in parallel_apply([torch.neg] * 2, inputs):
            assert torch.equal(output, -x)
    assert parallel_apply([str, str], [{"a": 1}, None]) == ["{'a': 1}", "None"]


def test_keyword_arguments():
    outputs = parallel_apply([dict] * 2, [(), ()], [{"a": 1}, {"b": 2}])
    assert outputs == [{"a": 1}, {"b": 2}]
    assert parallel_apply([dict] * 2, [([("c", 3)],), ()], ({"a": 1}, {})) == [{"c": 3, "a": 1}, {}]


def test_a_single_module_runs_in_the_calling_thread_and_has_its_device_current(sim):
    index = torch.accelerator.current_device_index
    for device, current in (("cpu", 0), (0, 0), (3, 3)):
        assert run(lambda: (ident(), torch.is_grad_enabled(), index()), 1, [device]) == [(ident(), True, current)]
    assert index() == 0
    assert parallel_apply([], []) == []


def test_each_device_is_current_in_its_worker(sim):
    index = torch.accelerator.current_device_index
    assert run(index, 3, [2, "sim:1", torch.device("sim:5")]) == [2, 1, 5]
    inputs = [torch.ones(1, device=f"sim:{i}") for i in (4, 2)]
    assert parallel_apply([lambda _: index()] * 2, inputs) == [4, 2]  # that of the first tensor
    nested = [({"a": [x]}, 1) for x in inputs]
    assert parallel_apply([lambda *_: index()] * 2, nested) == [4, 2]
    with torch.accelerator.device_index(6):
        assert run(index) == [6, 6]  # no tensor: the caller's
    assert index() == 0
    assert run(index, 2, [0, 0]) == [0, 0]


def test_outputs_are_moved_to_the_device_of_their_module_with_their_gradients(sim):
    x = torch.ones(2, requires_grad=True)

    def elsewhere():
        return {"a": torch.ones(2, dtype=torch.int32), "b": [torch.ones(1, device="sim:5")], "c": "text", "x": x * 2}

    for count, devices in ((3, [1, 0, "cpu"]), (1, [2])):
        outputs = run(elsewhere, count, devices)
        for device, output in zip(devices, outputs, strict=True):
            expected = torch.device("cpu" if device == "cpu" else f"sim:{device}")
            assert output["a"].device == output["b"][0].device == output["x"].device == expected
            assert output["a"].dtype == torch.int32
            assert output["c"] == "text"
        x.grad = None
        sum(output["x"].sum().cpu() for output in outputs).backward()
        assert x.grad.tolist() == [2 * count] * 2


def test_without_devices_outputs_stay_where_they_are(sim):
    networks = [nn.Linear(2, 2), nn.Linear(2, 2).to("sim:0"), nn.Linear(2, 2).to("sim:1")]
    places = [next(n.parameters()).device for n in networks]
    outputs = parallel_apply(networks, [torch.ones(1, 2, device=d) for d in places])
    assert [o.device for o in outputs] == places
    assert run(lambda: torch.ones(1), 2, [None, "sim:1"])[0].device.type == "cpu"


# ------------------------------------------------------------------------------------------- context


@pytest.fixture(params=[run, run_met], ids=["turns", "met"])
def run_either(request):
    """On one device: in the caller's thread, or, after a meeting, in threads that are kept."""
    return request.param


def autocast_state():
    found = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if found is None else ["cpu", found.type]
    on = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return on, torch.is_autocast_cache_enabled()


variable = contextvars.ContextVar("variable", default="unset")


@contextlib.contextmanager
def put(read, write, value):
    """For settings that are no context managers of PyTorch."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


CONTEXTS = {
    "no grad": (lambda kind: torch.no_grad(), torch.is_grad_enabled),
    "inference": (lambda kind: torch.inference_mode(), torch.is_inference_mode_enabled),
    "bfloat16": (lambda kind: torch.autocast(kind, torch.bfloat16), autocast_state),
    "float16": (lambda kind: torch.autocast(kind, torch.float16), autocast_state),
    "float16, not cached": (lambda kind: torch.autocast(kind, torch.float16, cache_enabled=False), autocast_state),
    "double": (
        lambda kind: put(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        lambda: torch.ones(1).dtype,
    ),
    "default device": (lambda kind: torch.device("meta"), lambda: torch.ones(1).device.type),
    "context variable": (lambda kind: put(variable.get, variable.set, "the caller's"), variable.get),
}


@pytest.mark.parametrize(("enter", "read"), CONTEXTS.values(), ids=CONTEXTS)
def test_the_callers_context(devices, kind, run_either, enter, read):
    """In the same threads, one call after the other: without it, in it, in the opposite within it, and without it."""

    def told(output):
        return output.dtype, output.requires_grad, output.is_inference()

    def check():
        assert run_either(read, devices=devices(2)) == [read()] * 2
        assert [told(y) for y in parallel_apply([torch.mm] * 2, x)] == [told(torch.mm(*each)) for each in x]
        return read()

    x = [(torch.ones(2, 2, device=d, requires_grad=True), torch.ones(2, 2, device=d)) for d in devices(2)]
    usual = check()
    with enter(kind):
        assert check() != usual
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
            check()
        assert check() != usual
    assert check() == usual
    assert current_replica() is None


def test_autocast_of_several_device_types(sim):
    with torch.autocast("sim", dtype=torch.float16), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = autocast_state()
        assert [on for _, on, _ in expected[0]] == [True, True]
        assert run(autocast_state, 3, ["cpu", 0, 1]) == [expected] * 3


def test_the_autocast_dtype_of_a_forward_that_turns_it_on(run_either):
    """The dtype that the caller has chosen, although autocast is off around the call."""

    def forward():
        with torch.autocast("cpu"):
            return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    with put(partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu"), torch.float16):
        assert run_either(forward) == [forward()] * 2 == [torch.float16] * 2


def test_what_a_forward_leaves_on_in_a_worker_is_off_in_the_next_call():
    def state():
        return torch.is_grad_enabled(), autocast_state(), torch.get_num_threads(), variable.get()

    def untidy():
        seen = state()
        if current_replica().index:
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_cache_enabled(False)
            torch.set_num_threads(torch.get_num_threads() + 3)
            variable.set("a worker's")
        return seen

    usual = state()
    for _ in range(2):
        assert run_met(untidy, 3) == [usual] * 3
    assert run_met(state, 3) == [usual] * 3
    assert state() == usual


def test_what_a_forward_leaves_on_without_threads_stays_on_as_without_replicas():
    with torch.enable_grad():
        run(lambda: torch.set_grad_enabled(False))
        assert not torch.is_grad_enabled()


def test_current_streams_and_devices(sim):
    """And those of an earlier call are forgotten."""

    def streams():
        return [torch.accelerator.current_stream(i).stream_id for i in range(3)]

    def current():
        return streams(), torch.accelerator.current_device_index()

    usual = run(streams, 3, [0, 1, 2])
    assert usual == [streams()] * 3
    one, two = torch.Stream(device="sim:1"), torch.Stream(device="sim:2")
    with one, two, torch.accelerator.device_index(0):
        expected = [usual[0][0], one.stream_id, two.stream_id]
        assert streams() == expected
        assert run(streams, 3, [0, 1, 2]) == [expected] * 3
        sim.reset_stream_log()
        parallel_apply([torch.neg] * 2, [torch.ones(1, device=f"sim:{i}") for i in (1, 2)])
        launched = sim.launches()
    assert launched["sim:1", one.stream_id] > 0
    assert launched["sim:2", two.stream_id] > 0
    assert run(streams, 3, [0, 1, 2]) == usual
    for devices in ([0, 0], [0, 3]):
        assert run(streams, 2, devices) == usual[:2]
    assert run(current, 2, [0, "cpu"])[1] == (usual[0], 0)


def test_default_device_is_that_of_the_replica(sim):
    def made():
        return torch.ones(1).device, nn.Linear(1, 1).weight.device

    with torch.device("sim:0"):
        assert run(made, 2, [0, 1]) == [(torch.device("sim", i),) * 2 for i in (0, 1)]
    with put(lambda: None, torch.set_default_device, "sim:0"):
        assert run(made, 2, [1, 2]) == [(torch.device("sim", i),) * 2 for i in (1, 2)]
    assert run(made, 2, [0, 1]) == [(torch.device("cpu"),) * 2] * 2


@pytest.mark.parametrize("met", [False, True])
def test_saved_tensor_hooks(devices, met):
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.cpu() * 2

    square = lambda t: (t.cpu() ** 2).sum()  # noqa: E731
    square = Met(square) if met else square
    x = [torch.ones(3, device=d, requires_grad=True) for d in devices(2)]
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        outputs = parallel_apply([square] * 2, x)
    assert packed == [(3,), (3,)]
    sum(outputs).backward()
    assert all(t.grad.tolist() == [4, 4, 4] for t in x)  # 2 x, of a value that packing doubled
    parallel_apply([square] * 2, x)
    assert len(packed) == 2


def test_the_context_of_nested_calls(run_either):
    def outer():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            return run_either(lambda: (torch.is_grad_enabled(), torch.get_autocast_dtype("cpu")))

    assert run_either(outer) == [[(False, torch.float16)] * 2] * 2
    assert run_either(torch.is_grad_enabled) == [True, True]


@pytest.mark.parametrize("devices", [["cpu"] * 3, [0, 1, 2]], ids=["cpu", "sim"])
def test_each_replica_has_all_intra_op_threads(sim, run_either, devices):
    def of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    for total in (1, 4, 2):
        with put(torch.get_num_threads, torch.set_num_threads, total):
            assert run_either(torch.get_num_threads, 3, devices) == [total] * 3
            assert (torch.get_num_threads(), of_a_new_thread()) == (total, total)


# -------------------------------------------------------------------------------------------- errors


class Picky(Exception):
    """Can be made once only."""

    made = 0

    def __new__(cls, *args):
        cls.made += 1
        if cls.made > 1:
            raise TypeError("there is one already")
        return super().__new__(cls, *args)


def fail(error):
    raise error


def ok():
    return 1


def test_every_worker_finishes_before_an_error_is_raised(sim):
    failed, finished = threading.Event(), threading.Event()

    def failing():
        try:
            raise ValueError("early")
        finally:
            failed.set()

    def late():
        assert failed.wait(TIMEOUT)
        x = torch.ones(50, 50)
        for _ in range(200):
            x = torch.tanh(x @ x)
        finished.set()

    for modules in ([failing, late], [late, failing]):
        failed.clear()
        finished.clear()
        with pytest.raises(ValueError, match="early"):
            parallel_apply(modules, [(), ()], devices=[0, 1])
        assert finished.is_set()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_raised_as_it_is_and_nothing_else_begins(kind):
    interrupt, ran = kind("now"), []

    def call(index):
        ran.append(index)
        if index == 1:
            raise interrupt
        raise ValueError("of less weight")

    with pytest.raises(kind) as caught:
        parallel_apply([call] * 3, range(3))
    assert caught.value is interrupt
    assert ran == [0, 1]
    assert current_replica() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_callers_thread_waits_for_the_workers(kind):
    ended = []

    def call(index):
        share("here", index)
        if index == 0:
            raise kind("now")
        ended.append(index)

    with pytest.raises(kind, match="now"):
        parallel_apply([call] * 3, range(3))
    assert ended == [1, 2]
    assert run_met(torch.is_grad_enabled, 3) == [True] * 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_worker_is_a_failure(kind):
    with pytest.raises(kind, match=r"Caught .* in replica 1") as caught:
        run_met(lambda: fail(kind(3)) if current_replica().index else None)
    assert getattr(caught.value, "code", 3) == 3  # with which the process ends


def test_an_error_that_cannot_be_rebuilt():
    error = Picky("the only one")
    with pytest.raises(ReplicaError, match=r"Caught Picky in replica 1 on device cpu\.(.|\n)*the only one") as caught:
        parallel_apply([ok, partial(fail, error)], [(), ()], devices=["cpu", "cpu"])
    assert caught.value.__cause__ is error


def test_an_error_of_a_single_module_is_that_of_replica_0():
    with pytest.raises(ValueError, match=r"^Caught ValueError in replica 0 on device cpu\.") as caught:
        parallel_apply([partial(fail, ValueError("alone"))], [()], devices=["cpu"])
    assert "Also failed" not in str(caught.value)


def test_an_error_leaves_the_threads_and_not_the_context():
    idents = run_met(ident)
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), pytest.raises(ValueError):
        run_met(partial(fail, ValueError("x")))
    assert run_met(ident) == idents
    usual = (True, autocast_state(), "cpu")
    assert run_met(lambda: (torch.is_grad_enabled(), autocast_state(), torch.ones(1).device.type)) == [usual] * 2


# ------------------------------------------------------------------------------ replicas that meet


def test_each_worker_knows_its_replica():
    found = run(current_replica, 3)
    assert [(r.index, r.count) for r in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({id(r.exchange) for r in found}) == 1
    assert len({id(r.exchange) for r in found + run(current_replica, 3)}) == 2  # one for each call
    assert run(current_replica, 1) == [None]
    assert current_replica() is None


def test_a_nested_call_has_replicas_of_its_own():
    def outer():
        inner = run(current_replica)
        alone = run(current_replica, 1)
        return current_replica(), inner, alone

    for index, (own, inner, alone) in enumerate(run(outer, 3)):
        assert (own.index, own.count) == (index, 3)
        assert [(r.index, r.count) for r in inner] == [(0, 2), (1, 2)]
        assert alone == [own]  # one call runs in the thread, and the replica, that it is called in
        assert inner[0].outer is own
        assert own.exchange is not inner[0].exchange


def test_values_and_outputs_are_in_the_order_of_the_replicas(sim):
    """Also where the last replica comes first, and where it ends first."""
    arrived, ended = ([threading.Event() for _ in range(3)] for _ in range(2))

    def after_the_next(events, i):
        assert i == 2 or events[i + 1].wait(TIMEOUT)
        events[i].set()

    def meet(i):
        after_the_next(arrived, i)
        values = share("here", f"value {i}")
        after_the_next(ended, i)
        return i, values

    found = parallel_apply([meet] * 3, [0, 1, 2], devices=[0, 1, 2])
    assert found == [(i, ["value 0", "value 1", "value 2"]) for i in range(3)]


def test_several_meetings():
    def meet(i):
        first = [share("a", (i, n)) for n in range(3)]  # the n-th visits are one meeting
        other = share("b", i)
        return first, other, share("a", "again")

    expected = ([[(0, n), (1, n)] for n in range(3)], [0, 1], ["again", "again"])
    assert parallel_apply([meet] * 2, [0, 1]) == [expected] * 2


@pytest.mark.parametrize("failing", [0, 2])
def test_a_replica_that_fails_makes_the_others_fail_and_its_error_is_raised(failing):
    def meet(i):
        if i == failing:
            raise ValueError("the cause")
        return share("layer", i)

    with pytest.raises(ValueError, match=f"Caught ValueError in replica {failing}(.|\n)*the cause") as caught:
        parallel_apply([meet] * 3, [0, 1, 2])
    assert "Also failed" not in str(caught.value)  # what follows from it is no failure of its own


def test_a_replica_that_ends_without_coming_is_named():
    def meet(i):
        return share("layer", i) if i else None

    with pytest.raises(ReplicaError, match=r"waits at layer for replicas \[0\], which ended without coming"):
        parallel_apply([meet] * 2, [0, 1])
    assert run(lambda: share("layer", 1)) == [[1, 1]] * 2  # nothing is left of it


def test_a_replica_that_handles_the_error_of_a_meeting_goes_on_in_its_turn():
    side_by_side = threading.Barrier(2)

    def meet(i):
        share("layer", i)
        if i == 0:
            return
        with pytest.raises(ReplicaError):
            share("another", i)
        with pytest.raises(threading.BrokenBarrierError):  # the first one waits in vain, which breaks it for the second
            side_by_side.wait(0.1)

    parallel_apply([meet] * 3, range(3))
