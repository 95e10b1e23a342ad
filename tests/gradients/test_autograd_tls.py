"""Objects that PyTorch hands on to the engine's threads are held for as long as they are there, and no longer."""

import sys
import threading
import weakref

import pytest

from lockstep.distributed.reduction.autograd.engine import get_from_tls, put_in_tls, remove_from_tls
from processes import output_of


class Value:
    """Something that can be referred to weakly."""


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return f"lockstep.{request.node.name}"


def test_what_is_put_lives_until_it_is_removed(key: str) -> None:
    value = Value()
    alive = weakref.ref(value)
    put_in_tls(key, value)
    del value
    assert alive() is not None
    assert get_from_tls(key) is alive()
    remove_from_tls(key)
    assert alive() is None
    assert get_from_tls(key) is None


def test_what_is_put_in_place_of_another_leaves_as_many_references_as_there_were(key: str) -> None:
    values = [Value(), Value()]
    before = [sys.getrefcount(value) for value in values]
    for number in range(20):
        put_in_tls(key, values[number % 2])
    remove_from_tls(key)
    assert [sys.getrefcount(value) for value in values] == before


def test_removing_costs_none_no_references(key: str) -> None:
    before = sys.getrefcount(None)
    for _ in range(1000):
        put_in_tls(key, None)
        remove_from_tls(key)
    assert abs(sys.getrefcount(None) - before) < 100  # not exact: others use it


def test_a_thread_has_what_it_put_itself(key: str) -> None:
    value, seen = Value(), []
    put_in_tls(key, value)
    thread = threading.Thread(target=lambda: seen.append(get_from_tls(key)))
    thread.start()
    thread.join()
    remove_from_tls(key)
    assert seen == [None]


def test_a_backward_pass_ends_with_as_many_references_as_it_began_with() -> None:
    # In a process of its own: where PyTorch's count is wrong, the passes die while they run, and the process with them.
    program = """
import gc, torch, lockstep, torch.distributed as dist
from lockstep.distributed.reduction.autograd.engine import BackwardPass, current_pass

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = lockstep.replicate(torch.nn.Linear(3, 3))

def begin_another(gradient):
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()

for _ in range(200):
    loss = module(torch.ones(2, 3)).sum()
    loss.register_hook(begin_another)
    loss.backward()
del loss
gc.collect()
assert current_pass() is None
print(sum(isinstance(each, BackwardPass) for each in gc.get_objects()), "passes left")
dist.destroy_process_group()
"""
    assert output_of(program) == "0 passes left\n"
