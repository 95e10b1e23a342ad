"""parallel_apply: its threads, the context they carry over, errors, and the meetings of replicas."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import textwrap
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import DeviceError, LengthError, ReplicaError
from lockstep.local import current_replica, parallel_apply

TIMEOUT = 30  # seconds, for events that come at once or never


def run(function, count=2, devices=None):
    """What ``function`` gives in each of ``count`` workers."""
    return parallel_apply([function] * count, [()] * count, devices=devices)


def ident():
    return threading.get_ident()


class Together:
    """Calls that go on only when all of them are there, so that they must run side by side."""

    def __init__(self, count, result=ident):
        self.barrier, self.result = threading.Barrier(count, timeout=TIMEOUT), result

    def __call__(self, *_):
        self.barrier.wait()
        return self.result()


# ------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("count", [2, 5])
def test_one_worker_for_each_module_at_the_same_time(count):
    idents = run(Together(count), count)
    assert len(set(idents)) == count
    assert ident() not in idents


def test_the_same_threads_in_every_call():
    before = run(Together(3), 3)
    threads = set(threading.enumerate())
    for _ in range(20):
        assert run(Together(3), 3) == before  # replica i on the same thread
        assert run(Together(2), 2) == before[:2]
    assert set(threading.enumerate()) == threads


def test_no_thread_is_started_in_the_steady_state(monkeypatch):
    run(Together(4), 4)

    def refuse(self):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for count in (2, 3, 4):
        run(Together(count), count)
    with pytest.raises(ValueError, match="as usual"):
        run(partial(int, "as usual"))
    run(Together(4), 4)
    with pytest.raises(AssertionError, match="a thread was started"):
        run(Together(64), 64)


def test_workers_do_not_keep_the_process_alive():
    run(Together(2))
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("lockstep-worker"))


def test_nested_calls():
    def outer():
        return [ident(), *run(Together(2))]

    barrier = threading.Barrier(3, timeout=TIMEOUT)
    idents = run(lambda: (barrier.wait(), outer())[1], 3)
    assert all(len(set(own)) == 3 for own in idents)
    outer_idents = {own[0] for own in idents}
    assert not outer_idents & {i for own in idents for i in own[1:]}
    threads = set(threading.enumerate())
    run(outer, 1)
    assert set(threading.enumerate()) == threads


def test_calls_from_several_threads():
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda n: parallel_apply([torch.add] * 2, [(n, 1), (n, 2)]), map(torch.tensor, range(40)))
        )
    assert [[int(t) for t in r] for r in results] == [[n + 1, n + 2] for n in range(40)]


def test_after_a_fork():
    script = """
        import os, sys, threading
        from lockstep.local import parallel_apply
        barrier = threading.Barrier(2, timeout=30)
        together = lambda: (barrier.wait(), threading.get_ident())[1]
        parent = parallel_apply([together] * 2, [(), ()])
        child = os.fork()
        if child == 0:
            barrier = threading.Barrier(2, timeout=30)
            idents = parallel_apply([together] * 2, [(), ()])
            os._exit(0 if len(set(idents)) == 2 and parallel_apply([together] * 2, [(), ()]) == idents else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parallel_apply([together] * 2, [(), ()]) == parent
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_idle_workers_keep_nothing_alive():
    import gc
    import weakref

    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    outputs = parallel_apply([module, module], [x, x])
    alive = [weakref.ref(o) for o in (module, x, *outputs)]
    del module, x, outputs
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


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


def test_no_modules():
    assert parallel_apply([], []) == []


def test_outputs_are_in_the_order_of_the_modules():
    """Whatever the order in which they end."""
    events = [threading.Event() for _ in range(4)]
    events[3].set()

    def end(i):
        assert events[i].wait(TIMEOUT)
        if i:
            events[i - 1].set()
        return i

    assert parallel_apply([end] * 4, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_a_single_module_runs_in_the_calling_thread(first):
    device = None if first.type == "cpu" else first.index
    seen = parallel_apply(
        [lambda x: (ident(), torch.is_grad_enabled(), x)], [torch.ones(1, device=first)], None, [first]
    )
    assert seen[0][:2] == (ident(), True)
    assert device is None or torch.accelerator.current_device_index() == 0


def test_a_single_module_has_its_device_current(sim):
    index = torch.accelerator.current_device_index
    assert parallel_apply([index], [()], devices=[3]) == [3]
    assert index() == 0


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


def test_outputs_are_moved_to_the_device_of_their_module(sim):
    def elsewhere():
        return {"a": torch.ones(2, dtype=torch.int32), "b": [torch.ones(1, device="sim:5")], "c": "text"}

    for count, devices in ((3, [1, 0, "cpu"]), (1, [2])):
        for device, output in zip(devices, run(elsewhere, count, devices), strict=True):
            expected = torch.device("cpu" if device == "cpu" else f"sim:{device}")
            assert output["a"].device == output["b"][0].device == expected
            assert output["a"].dtype == torch.int32
            assert output["c"] == "text"


def test_without_devices_outputs_stay_where_they_are(sim):
    networks = [nn.Linear(2, 2), nn.Linear(2, 2).to("sim:0"), nn.Linear(2, 2).to("sim:1")]
    places = [next(n.parameters()).device for n in networks]
    outputs = parallel_apply(networks, [torch.ones(1, 2, device=d) for d in places])
    assert [o.device for o in outputs] == places
    assert run(lambda: torch.ones(1), 2, [None, "sim:1"])[0].device.type == "cpu"


def test_an_output_that_is_moved_keeps_its_gradient(sim):
    x = torch.ones(2, requires_grad=True)
    outputs = parallel_apply([torch.mul] * 2, [(x, 2), (x, 3)], None, [0, 1])
    sum(o.sum().cpu() for o in outputs).backward()
    assert x.grad.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([abs, abs], [(1,)]), "modules 2 is not equal to the number of inputs 1"),
        (([abs], [(1,)], [{}, {}]), "modules 1 is not equal to the number of kwargs_tup 2"),
        (([abs, abs], [(1,), (2,)], None, ["cpu"]), "modules 2 is not equal to the number of devices 1"),
    ],
)
def test_lists_of_different_lengths(arguments, words):
    with pytest.raises(LengthError, match=words):
        parallel_apply(*arguments)
    with pytest.raises(AssertionError):  # as PyTorch raises there
        parallel_apply(*arguments)


def test_an_unknown_device():
    with pytest.raises(DeviceError, match="nowhere"):
        parallel_apply([abs], [(1,)], devices=["nowhere"])


# ------------------------------------------------------------------------------------------- context


def worker_types():
    found = torch.accelerator.current_accelerator()
    return ["cpu"] if found is None else ["cpu", found.type]


def autocast_state():
    on = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in worker_types()]
    return on, torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_mode(devices, enabled):
    x = [torch.ones(1, device=d, requires_grad=True) for d in devices(2)]
    for mode in (enabled, not enabled, enabled):  # the same threads, one after the other
        with torch.set_grad_enabled(mode):
            assert run(torch.is_grad_enabled, devices=devices(2)) == [mode, mode]
            assert [y.requires_grad for y in parallel_apply([torch.neg] * 2, x)] == [mode, mode]


def test_inference_mode(devices):
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert run(torch.is_inference_mode_enabled, devices=devices(2)) == [mode, mode]
            outputs = parallel_apply([torch.neg] * 2, [torch.ones(1, device=d) for d in devices(2)])
            assert [o.is_inference() for o in outputs] == [mode, mode]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(devices, kind, dtype, cache):
    usual = autocast_state()
    with torch.autocast(kind, dtype=dtype, cache_enabled=cache):
        assert run(autocast_state, devices=devices(2)) == [autocast_state()] * 2
        outputs = parallel_apply(
            [torch.mm] * 2, [(torch.ones(2, 2, device=d), torch.ones(2, 2, device=d)) for d in devices(2)]
        )
        assert [o.dtype for o in outputs] == [dtype] * 2
        with torch.autocast(kind, enabled=False):
            assert run(autocast_state, devices=devices(2)) == [autocast_state()] * 2
    assert run(autocast_state, devices=devices(2)) == [usual] * 2


def test_autocast_of_several_device_types(sim):
    with torch.autocast("sim", dtype=torch.float16), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = autocast_state()
        assert [on for _, on, _ in expected[0]] == [True, True]
        assert run(autocast_state, 3, ["cpu", 0, 1]) == [expected] * 3


def test_the_autocast_dtype_of_a_forward_that_turns_it_on():
    """The dtype that the caller has chosen, although autocast is off around the call."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:

        def forward():
            with torch.autocast("cpu"):
                return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

        assert run(forward) == [forward()] * 2 == [torch.float16] * 2
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_what_a_forward_leaves_on_is_off_in_the_next_call(devices):
    def untidy():
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_cache_enabled(False)

    run(untidy, devices=devices(2))
    assert run(torch.is_grad_enabled) == [True, True]
    assert run(autocast_state) == [autocast_state()] * 2


def test_current_streams(sim):
    def streams():
        return [torch.accelerator.current_stream(i).stream_id for i in range(3)]

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


def test_default_dtype():
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert run(lambda: torch.ones(1).dtype) == [dtype] * 2
    finally:
        torch.set_default_dtype(before)


def test_default_device_is_that_of_the_replica(sim):
    def made():
        return torch.ones(1).device, nn.Linear(1, 1).weight.device

    with torch.device("sim:0"):
        assert run(made, 2, [0, 1]) == [(torch.device("sim", i),) * 2 for i in (0, 1)]
    torch.set_default_device("sim:0")
    try:
        assert run(made, 2, [1, 2]) == [(torch.device("sim", i),) * 2 for i in (1, 2)]
    finally:
        torch.set_default_device(None)
    assert run(made, 2, [0, 1]) == [(torch.device("cpu"),) * 2] * 2


def test_a_default_device_of_another_type(devices):
    with torch.device("meta"):
        assert run(lambda: torch.ones(1).device.type, devices=devices(2)) == ["meta", "meta"]
    assert run(lambda: torch.ones(1).device.type, devices=devices(2)) == ["cpu", "cpu"]


variable = contextvars.ContextVar("variable", default="unset")


def test_context_variables():
    token = variable.set("the caller's")
    try:
        assert run(variable.get) == ["the caller's"] * 2
        seen = []

        def change():
            seen.append(variable.get())
            variable.set("a worker's")
            return variable.get()

        assert run(change) == ["a worker's"] * 2
        assert run(change) == ["a worker's"] * 2
        assert seen == ["the caller's"] * 4  # neither another worker's, nor one left from the last call
        assert variable.get() == "the caller's"
    finally:
        variable.reset(token)
    assert run(variable.get) == ["unset"] * 2


def test_saved_tensor_hooks(devices):
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.cpu() * 2

    def unpack(t):
        return t.clone()

    x = [torch.ones(3, device=d, requires_grad=True) for d in devices(2)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: unpack(t)):
        outputs = parallel_apply([lambda t: (t.cpu() ** 2).sum()] * 2, x)
    assert packed == [(3,), (3,)]
    sum(outputs).backward()
    assert all(t.grad.tolist() == [4, 4, 4] for t in x)  # 2 x, of a value that packing doubled
    parallel_apply([lambda t: (t.cpu() ** 2).sum()] * 2, x)
    assert len(packed) == 2


def test_the_context_of_nested_calls():
    def outer():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            return run(lambda: (torch.is_grad_enabled(), torch.get_autocast_dtype("cpu")))

    assert run(outer) == [[(False, torch.float16)] * 2] * 2
    assert run(torch.is_grad_enabled) == [True, True]


def test_a_forward_that_sets_its_threads_does_not_keep_them():
    before = torch.get_num_threads()

    def grab():
        torch.set_num_threads(before + 3)

    try:
        run(torch.get_num_threads, 2, ["cpu"] * 2)
        run(grab, 2, ["cpu"] * 2)
        torch.set_num_threads(before)
        assert max(run(torch.get_num_threads, 2, ["cpu"] * 2)) <= max(1, -(-before // 2))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("total", [1, 2, 5])
def test_intra_op_threads_are_split(total):
    before = torch.get_num_threads()

    def of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    torch.set_num_threads(total)
    try:
        new = of_a_new_thread()
        for count in (2, 3, 8, 2):
            inside = run(torch.get_num_threads, count, ["cpu"] * count)
            assert inside == sorted(inside, reverse=True)
            assert sum(inside) == max(total, count)
            assert max(inside) - min(inside) <= 1
            assert torch.get_num_threads() == total
            assert of_a_new_thread() == new
        assert run(torch.get_num_threads, 1, ["cpu"]) == [total]
    finally:
        torch.set_num_threads(before)


def test_nested_calls_leave_new_threads_the_callers_intra_op_threads():
    before = torch.get_num_threads()

    def count_in_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    torch.set_num_threads(4)
    try:
        for _ in range(2):  # in the second, the outer workers have their share already
            run(lambda: run(torch.get_num_threads, 2, ["cpu"] * 2), 2, ["cpu"] * 2)
            assert (torch.get_num_threads(), count_in_a_new_thread()) == (4, 4)
    finally:
        torch.set_num_threads(before)


def test_workers_of_accelerators_leave_the_intra_op_threads(sim):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert run(torch.get_num_threads, 3, ["cpu", 0, "cpu"])[::2] == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------------------------------------------------- errors


class Unusual(Exception):
    """Asks for other arguments than a message."""

    def __init__(self, code, *, reason):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


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


def shown(error):
    """What a traceback ends with: the message, and the notes."""
    return "".join(traceback.format_exception_only(error))


def test_every_worker_finishes_before_an_error_is_raised():
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
            parallel_apply(modules, [(), ()])
        assert finished.is_set()


ERRORS = {
    "ValueError": ValueError("bad value"),
    "KeyError": KeyError("bad key"),
    "a type with a constructor of its own": Unusual(3, reason="bad reason"),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    "OSError": FileNotFoundError(2, "bad file", "name"),
    "StopIteration": StopIteration("bad stop"),
    "out of memory": torch.OutOfMemoryError("bad memory"),
    "SystemExit": SystemExit("bad exit"),
    "KeyboardInterrupt": KeyboardInterrupt("bad key stroke"),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_keeps_its_type_where_it_can_be_rebuilt(devices, error, which):
    modules = [ok, ok]
    modules[which] = partial(fail, error)
    with pytest.raises(type(error)) as caught:
        parallel_apply(modules, [(), ()], devices=devices(2))
    device = devices(2)[which]
    label = "cpu" if device.type == "cpu" else device.index
    assert f"Caught {type(error).__name__} in replica {which} on device {label}." in shown(caught.value)
    assert "bad" in shown(caught.value)
    assert caught.value.__cause__ is error
    assert type(caught.value) is type(error)
    if isinstance(error, Unusual):
        assert (caught.value.code, caught.value.reason) == (3, "bad reason")


def test_an_error_that_cannot_be_rebuilt():
    error = Picky("the only one")
    with pytest.raises(ReplicaError, match=r"Caught Picky in replica 1 on device cpu\.(.|\n)*the only one") as caught:
        parallel_apply([ok, partial(fail, error)], [(), ()], devices=["cpu", "cpu"])
    assert caught.value.__cause__ is error


def test_the_original_traceback():
    def innermost():
        raise ValueError("deep inside")

    def outer():
        innermost()

    with pytest.raises(ValueError, match="deep inside") as caught:
        parallel_apply([ok, outer], [(), ()])
    assert "in innermost" in str(caught.value)
    assert "in outer" in str(caught.value)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [f.name for f in frames][-2:] == ["outer", "innermost"]


def test_several_failures_are_all_reported():
    modules = [ok, *(partial(fail, kind(f"number {i}")) for i, kind in enumerate((ValueError, TypeError, KeyError), 1))]
    with pytest.raises(ValueError) as caught:
        parallel_apply(modules, [()] * 4, devices=["cpu"] * 4)
    message = str(caught.value)
    assert message.startswith("Caught ValueError in replica 1 on device cpu.")
    assert "Also failed: replica 2 on device cpu: TypeError('number 2')" in message
    assert "Also failed: replica 3 on device cpu: KeyError('number 3')" in message
    assert "replica 0" not in message


def test_a_single_module_that_fails():
    with pytest.raises(ValueError, match="Caught ValueError in replica 0 on device cpu"):
        parallel_apply([partial(fail, ValueError("x"))], [()], devices=["cpu"])


def test_workers_go_on_after_an_error():
    idents = run(Together(2))
    with pytest.raises(ValueError):
        parallel_apply([partial(fail, ValueError("x"))] * 2, [(), ()])
    assert run(Together(2)) == idents
    assert run(torch.is_grad_enabled) == [True, True]


def test_an_error_does_not_leave_the_context_behind():
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), pytest.raises(ValueError):
        parallel_apply([partial(fail, ValueError("x"))] * 2, [(), ()])
    usual = (True, autocast_state(), "cpu")
    assert run(lambda: (torch.is_grad_enabled(), autocast_state(), torch.ones(1).device.type)) == [usual] * 2


# ------------------------------------------------------------------------------ replicas that meet


def test_outside_there_is_no_replica():
    assert current_replica() is None
    run(current_replica)
    assert current_replica() is None


def test_each_worker_knows_its_replica():
    found = run(current_replica, 3)
    assert [(r.index, r.count) for r in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({id(r.exchange) for r in found}) == 1
    assert len({id(r.exchange) for r in found + run(current_replica, 3)}) == 2  # one for each call
    assert run(current_replica, 1) == [None]


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


def share(key, value):
    replica = current_replica()
    return replica.exchange.all_gather(key, replica.index, value)


def test_replicas_get_everybodys_values_in_order():
    """Also where the last replica comes first."""
    arrived = [threading.Event() for _ in range(3)]
    arrived[2].set()

    def meet(i):
        assert arrived[i].wait(TIMEOUT)
        if i:
            arrived[i - 1].set()
        return share("here", f"value {i}")

    assert parallel_apply([meet] * 3, [0, 1, 2]) == [["value 0", "value 1", "value 2"]] * 3


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


def test_a_meeting_inside_a_forward():
    class Mean(nn.Module):
        def forward(self, x):
            means = share(id(x.shape) * 0, x.mean())
            return x - sum(means) / len(means)

    module = Mean()
    outputs = parallel_apply([module] * 2, [torch.zeros(2), torch.full((2,), 4.0)])
    assert [o.tolist() for o in outputs] == [[-2, -2], [2, 2]]


# ---------------------------------------------------------------------------------- with real modules


def test_modules_run_as_they_would_alone(devices):
    modules = [nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)).to(d) for d in devices(3)]
    inputs = [torch.randn(5, 3).to(d) for d in devices(3)]
    outputs = parallel_apply(modules, inputs, devices=devices(3))
    for module, x, output in zip(modules, inputs, outputs, strict=True):
        torch.testing.assert_close(output, module(x))
    sum(F.mse_loss(o, torch.zeros_like(o)).cpu() for o in outputs).backward()
    assert all(p.grad is not None for m in modules for p in m.parameters())
