"""Parameters that are replaced, added, removed or swapped after replicating are synchronised like all others, or every
rank raises by name."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import lockstep
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.errors import AgreementError, NotReplicableError, OutOfSyncError
from programs.ranks import on_ranks
from threaded import count_collectives, run_ranks


def linear(value=1.0):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def two_layers():
    return nn.Sequential(linear(), linear())


def rows(rank):
    """The gradient of the only weight of `linear()` is 1 on rank 0, 2 on rank 1: 1.5 as a mean."""
    return torch.full((1, 1), rank.rank + 1.0)


def grads(module):
    return [None if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()]


# ------------------------------------------------------------------------------- what programs do to their modules


def assign_a_checkpoint(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def replace_a_layer(net):
    net[1] = linear()


def add_a_layer(net):
    net.append(linear())


def add_a_layer_without_being_told(net):
    net._modules["2"] = linear()


def remove_a_layer(net):
    del net[1]


def write_into_the_slot(net):
    net[0]._parameters["weight"] = nn.Parameter(torch.ones(1, 1))


def tie(net):
    net[1].weight = net[0].weight


def untie(net):
    net[1].weight = nn.Parameter(net[0].weight.detach().clone())


def reverse_the_layers(net):
    net[0], net[1] = net[1], net[0]


def normalise_weights(net):
    parametrizations.weight_norm(net[0])


def normalise_weights_the_old_way(net):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net[0])


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrize_a_layer(net):
    parametrize.register_parametrization(net[0], "weight", Doubled())


def parametrize_and_remove(net):
    parametrize.register_parametrization(net[0], "weight", Doubled())
    parametrize.remove_parametrizations(net[0], "weight")


def swap_tensors(net):
    for layer in net:
        torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(1, 1)))


def swap_one_and_keep_the_other(net):
    net.other = [nn.Parameter(torch.ones(1, 1))]
    torch.utils.swap_tensors(net[1].weight, net.other[0])


def convert_back_and_forth(net):
    net.double()
    net.float()


CHANGES = [
    assign_a_checkpoint,
    replace_a_layer,
    add_a_layer,
    add_a_layer_without_being_told,
    remove_a_layer,
    write_into_the_slot,
    tie,
    normalise_weights,
    normalise_weights_the_old_way,
    parametrize_a_layer,
    parametrize_and_remove,
    swap_tensors,
    swap_one_and_keep_the_other,
]


@pytest.fixture
def conversion_flag(request):
    """One of the two ways in which `Module.to` may replace parameters instead of rewriting them."""
    get, put = (getattr(torch.__future__, f"{verb}_{request.param}_on_conversion") for verb in ("get", "set"))
    before = get()
    put(True)
    yield
    put(before)


def output(module, x, way):
    """Of a module that is called, or of the layers of one "past forward"."""
    if way != "past forward":
        return module(x)
    for layer in module:
        x = layer(x)
    return x


def change_in_training(rank, change, make, way):
    """Gradients of a replicated module that changes after its first step, beside those of two plain ones."""
    net = make()
    module = net if way == "wrapped" else lockstep.replicate(net, process_group=rank.group)
    call = lockstep.DistributedDataParallel(net, process_group=rank.group) if way == "wrapped" else module
    plain = [make(), make()]
    seen = []
    for step in range(4):
        if step == 1:
            change(module)
            for each in plain:
                change(each)
        for each in (module, *plain):
            each.zero_grad()
        output(call, rows(rank), way).sum().backward()
        for number, each in enumerate(plain):
            each(torch.full((1, 1), number + 1.0)).sum().backward()
        wanted = [(a.grad + b.grad) / 2 for a, b in zip(*(each.parameters() for each in plain), strict=True)]
        seen.append([torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), wanted, strict=True)])
        with torch.no_grad():
            for each in (module, *plain):
                for p, grad in zip(each.parameters(), wanted, strict=True):
                    p -= 0.25 * grad
    return seen


def all_true(results):
    return all(flag for seen in results for step in seen for flag in step)


@pytest.mark.parametrize("way", ["replicated", "wrapped", "past forward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_gradients_are_means_after_a_change_on_all_ranks(change, way):
    if way == "past forward" and change is swap_tensors:
        pytest.skip("nothing is left that has a hook, and nothing of ours is called")
    assert all_true(run_ranks(2, change_in_training, change, two_layers, way))


@pytest.mark.parametrize("way", ["replicated", "wrapped", "past forward"])
def test_a_layer_that_changes_before_it_has_been_used(way):
    """Of the only layer no parameter is left that had a hook, nor the module that had it."""

    def replace_and_change(net):
        net[0] = nn.Sequential(linear())
        net[0][0] = linear()
        assign_a_checkpoint(net)

    def make():
        return nn.Sequential(linear())

    assert all_true(run_ranks(2, change_in_training, replace_and_change, make, way))


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("first", ["replicated", "put in"])
@on_ranks(2, "hosts")
def test_a_replicated_part_that_comes_later_keeps_its_own_parameters(rank, first):
    """Put into a replicated module, before it is replicated or afterwards, it synchronises what is new in it itself."""
    whole = lockstep.replicate(nn.Sequential(linear()), process_group=rank.group)
    part = nn.Sequential(linear())
    if first == "put in":
        whole.append(part)
    lockstep.replicate(part, process_group=rank.group)
    if first == "replicated":
        whole.append(part)
    found = []
    for change in (lambda: None, lambda: part.append(linear()), lambda: assign_a_checkpoint(part)):
        change()
        whole.zero_grad()
        whole(rows(rank)).sum().backward()
        found.append(grads(whole))
    assert found == [[[1.5]] * 2, [[1.5]] * 3, [[1.5]] * 3]


MOVES = {
    "out, in": lambda source, target, layer: (source.pop(-1), target.append(layer)),
    "in, out": lambda source, target, layer: (target.append(layer), source.pop(-1)),
    "in and back": lambda source, target, layer: (target.append(layer), target.pop(-1)),
}


@pytest.mark.parametrize("way", ["replicated", "past forward"])
@pytest.mark.parametrize("weight", ["as it was", "new"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("first", ["source", "target"])
@on_ranks(2)
def test_a_layer_that_moves_between_replicated_modules(rank, first, move, weight, way):
    """It is synchronised by the one that has it, whichever was replicated first, and once: batches have weights."""
    source, target = two_layers(), nn.Sequential(linear())
    for module in (source, target) if first == "source" else (target, source):
        lockstep.replicate(module, process_group=rank.group)
    (source(rows(rank)) + target(rows(rank))).sum().backward()
    layer = source[1]
    MOVES[move](source, target, layer)
    found = []
    for _ in range(3):
        if weight == "new":
            layer.weight = nn.Parameter(torch.ones(1, 1))
        source.zero_grad()
        target.zero_grad()
        with lockstep.accumulate(source, weight=rank.rank + 3), lockstep.accumulate(target, weight=rank.rank + 3):
            sum(output(module, rows(rank), way).sum() for module in (source, target)).backward()
        found.append([p.grad.item() for p in (*source.parameters(), *target.parameters())])
    assert found == [pytest.approx([3 / 7] * 3)] * 3


@pytest.mark.parametrize("move", MOVES)
@on_ranks(2)
def test_a_layer_that_has_moved_and_changed_is_synchronised_when_it_is_used_alone(rank, move):
    """Its new weight is all that gets a gradient, so nothing else can notice it."""
    source, target = (lockstep.replicate(nn.Sequential(linear()), process_group=rank.group) for _ in range(2))
    layer = source[0]
    MOVES[move](source, target, layer)
    layer.weight = nn.Parameter(torch.ones(1, 1))
    layer(rows(rank)).sum().backward()
    assert grads(layer) == [[1.5]]


def test_a_replicated_part_lets_go_of_the_whole_that_it_was_in():
    def work(rank):
        part = lockstep.replicate(nn.Sequential(linear()), process_group=rank.group)
        whole = lockstep.replicate(nn.Sequential(linear()), process_group=rank.group)
        whole.append(part)
        whole(rows(rank)).sum().backward()
        return part, weakref.ref(whole[0].weight)

    found = run_ranks(2, work)
    gc.collect()  # not by each rank: while one thread collects, another's call does nothing
    assert all(part[0].weight.grad.item() == 1.5 and weight() is None for part, weight in found)


@pytest.mark.parametrize("way", ["replicated", "wrapped", "past forward"])
def test_layers_that_change_places_on_all_ranks(way):
    def make():
        return nn.Sequential(linear(1.0), linear(3.0))

    assert all_true(run_ranks(2, change_in_training, reverse_the_layers, make, way))


@pytest.mark.parametrize("conversion_flag", ["overwrite_module_params", "swap_module_params"], indirect=True)
def test_conversions_that_make_new_parameters(conversion_flag):
    assert all_true(run_ranks(2, change_in_training, convert_back_and_forth, two_layers, "replicated"))


def test_weights_that_are_untied():
    def make():
        net = two_layers()
        net[1].weight = net[0].weight
        return net

    assert all_true(run_ranks(2, change_in_training, untie, make, "replicated"))


# ------------------------------------------------------------------------------------------- ranks that differ

# What only the last rank does, and words of the error that every rank raises.
LONE_CHANGES = {
    "another layer": (lambda net: net.insert(1, linear()), AgreementError, ["rank 1 has parameter 2.weight"]),
    "a layer less": (remove_a_layer, AgreementError, ["rank 0 has parameter 1.weight", "rank 1 has no such thing"]),
    "another shape": (
        lambda net: net.__setitem__(0, nn.Linear(1, 2, bias=False)),
        AgreementError,
        [
            "ranks differ in parameter 0.weight",
            "rank 0 has float32 of shape (1, 1)",
            "rank 1 has float32 of shape (2, 1)",
        ],
    ),
    "tied": (tie, AgreementError, ["rank 0 has parameter 1.weight", "rank 1 has no such thing"]),
    "the same values in another tensor": (
        assign_a_checkpoint,
        AgreementError,
        ["parameter 0.weight is another object than when the module was replicated on rank 1", "the same on rank 0"],
    ),
    "layers in another order": (
        reverse_the_layers,
        AgreementError,
        [
            "ranks differ in parameter 0.weight",
            "rank 1 has float32 of shape (1, 1), which was parameter 1.weight before",
        ],
    ),
    "a lazy layer": (
        lambda net: net.append(nn.LazyLinear(1)),
        AgreementError,
        ["rank 1", "2.weight is not initialised"],
    ),
}


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize(("change", "kind", "words"), LONE_CHANGES.values(), ids=LONE_CHANGES)
def test_a_change_on_one_rank_is_an_error_on_every_rank_until_it_is_undone(change, kind, words, hosts):
    def call(rank):
        net = lockstep.replicate(two_layers(), process_group=rank.group)
        net(rows(rank)).sum().backward()
        before = list(net)
        messages = []
        if rank.rank == 1:
            change(net)
        for _ in range(2):
            net.zero_grad()
            with pytest.raises(kind) as caught:
                for layer in before[:1]:
                    layer(rows(rank)).sum().backward()
            messages.append(str(caught.value))
        if rank.rank == 1:
            while len(net):
                del net[0]
            net.extend(before)
            before[1].weight = before[1].weight if change is not tie else nn.Parameter(torch.ones(1, 1))
        return messages

    first, second = run_ranks(2, call, hosts=hosts)
    assert first == second
    assert len(set(first)) == 1
    for word in words:
        assert word in first[0]


@on_ranks(2)
def test_ranks_go_on_when_a_lone_change_has_been_undone(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    if rank.rank == 1:
        net.append(linear())
    with pytest.raises(AgreementError, match=r"rank 1 has parameter 2\.weight"):
        net(rows(rank)).sum().backward()
    if rank.rank == 1:
        del net[2]
    net.zero_grad()
    net(rows(rank)).sum().backward()
    assert grads(net) == [[1.5], [1.5]]


def test_a_new_parameter_with_other_values_on_some_rank_is_an_error_on_every_rank():
    def call(rank):
        net = lockstep.replicate(two_layers(), process_group=rank.group)
        net[1] = linear(1.0 + rank.rank)
        with pytest.raises(OutOfSyncError) as caught:
            net(rows(rank)).sum().backward()
        with torch.no_grad():
            net[1].weight.fill_(1)
        net.zero_grad()
        net(rows(rank)).sum().backward()
        return str(caught.value), grads(net)

    first, second = run_ranks(2, call)
    assert first == second
    assert "parameter 1.weight was put into the module after" in first[0]
    assert "other values on rank 1 than on rank 0" in first[0]
    assert first[1] == [[1.5], [1.5]]


@on_ranks(2)
def test_values_that_differ_are_not_compared_without_init_sync(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group, init_sync=False)
    net(rows(rank)).sum().backward()
    net[1] = linear(rank.rank + 1.0)
    net.zero_grad()
    net(rows(rank)).sum().backward()
    assert grads(net)[1] == [1.5]


# ------------------------------------------------------------------------------------------- all around


@on_ranks(2)
def test_hooks_of_a_new_parameter_see_the_mean(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net(rows(rank)).sum().backward()
    net[1] = linear()
    seen = []
    for _ in range(2):
        net.zero_grad()
        if not seen:
            net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        net(rows(rank)).sum().backward()
    assert seen == [1.5, 1.5]


@on_ranks(2)
def test_hooks_of_a_parameter_that_was_removed_go_on(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    layer, seen = net[1], []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    del net[1]
    net(rows(rank)).sum().backward()
    layer(rows(rank)).sum().backward()
    assert seen == [[1.0], [2.0]][rank.rank]


@on_ranks(2)
def test_gradients_that_have_piled_up_count_when_a_parameter_is_added_meanwhile(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    with net.no_sync():
        net(rows(rank)).sum().backward()
        net.append(linear())
        net(rows(rank)).sum().backward()
    net(rows(rank)).sum().backward()
    assert grads(net) == [[4.5], [4.5], [3.0]]


@on_ranks(2)
def test_a_new_parameter_that_only_one_rank_uses(rank):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear()
            self.second = None

        def forward(self, x, more):
            return self.second(self.first(x)) if more else self.first(x)

    net = lockstep.replicate(Net(), process_group=rank.group)
    net.second = linear()
    seen = []
    for more in (rank.rank == 1, False):
        net.zero_grad()
        net(rows(rank), more).sum().backward()
        seen.append(grads(net))
    assert seen == [[[1.5], [1.0]], [[1.5], None]]


@on_ranks(2)
def test_a_layer_made_in_the_first_forward(rank):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear()

        def forward(self, x):
            if not hasattr(self, "second"):
                self.second = linear()
            return self.second(self.first(x))

    net = lockstep.replicate(Net(), process_group=rank.group)
    net(rows(rank)).sum().backward()
    assert grads(net) == [[1.5], [1.5]]


@on_ranks(2)
def test_another_dtype_of_a_new_parameter(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net[1] = linear().double()
    net[1](net[0](rows(rank)).double()).sum().backward()
    assert (grads(net), net[1].weight.grad.dtype) == ([[1.5], [1.5]], torch.float64)


@on_ranks(2)
def test_parameters_lent_by_functional_call_are_no_change(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net(rows(rank)).sum().backward()
    net.zero_grad()
    lent = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
    with count_collectives(rank) as sent:
        functional_call(net, lent, (rows(rank),)).sum().backward()
    n = (1, 2)[rank.rank]
    assert (len(sent), grads(net), [lent[name].grad.item() for name in lent]) == (0, [None, None], [2.0 * n, 2.0 * n])


@pytest.mark.parametrize("puts_back", [True, False])
def test_parameters_that_an_inner_step_replaces(puts_back):
    """As meta-learning does: gradients go through the inner step to the module's own parameters."""

    def call(rank):
        net = lockstep.replicate(linear(), process_group=rank.group)
        own = net.weight
        (grad,) = torch.autograd.grad(net(rows(rank)).square().sum(), own, create_graph=True)
        net._parameters["weight"] = own - 0.1 * grad
        loss = net(rows(rank)).square().sum()
        if puts_back:
            net._parameters["weight"] = own
            loss.backward()
            return own.grad.item()
        with pytest.raises(
            (AgreementError, NotReplicableError), match="put the module's own parameters back"
        ) as caught:
            loss.backward()
        return "parameter weight is not a leaf of autograd" in str(caught.value)

    # x is 1 and 2, and of (w - 0.2 x^2 w)^2 x^2 the derivatives by w = 1 are 1.28 and 0.32
    assert run_ranks(2, call) == (pytest.approx([0.8, 0.8]) if puts_back else [True, True])


@pytest.mark.parametrize("weight", [None, 1.0])
@on_ranks(2)
def test_a_parameter_that_was_in_the_module_for_a_moment(rank, weight):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    layer = linear()
    net.append(layer)
    del net[2]
    with count_collectives(rank) as sent, lockstep.accumulate(net, weight=weight):
        layer(rows(rank)).sum().backward()
    assert (len(sent), layer.weight.grad.item()) == [(0, 1.0), (0, 2.0)][rank.rank]


def test_noticing_costs_no_collective_and_agreeing_only_the_step_of_the_change():
    def call(rank):
        net = lockstep.replicate(two_layers(), process_group=rank.group)
        counts = []
        for step in range(7):
            if step == 4:
                assign_a_checkpoint(net)
            with count_collectives(rank) as sent:
                net(rows(rank)).sum().backward()
            counts.append(len(sent))
        return counts

    counts = run_ranks(2, call)[0]
    assert counts[2:4] == [1, 1]
    assert counts[4] > 1
    assert counts[6] == 1


# ------------------------------------------------------------------------------------------- wholes that are dropped


@on_ranks(2)
def test_the_earlier_wrapper_of_a_module_with_other_weights_is_replaced(rank):
    module = two_layers()
    first = lockstep.DistributedDataParallel(module, process_group=rank.group)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    second = lockstep.DistributedDataParallel(module, process_group=rank.group)
    assert len(list(scheduler_of(rank.group).modules)) == 1
    second(rows(rank)).sum().backward()
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"), first.no_sync():
        pass
    assert grads(module) == [[1.5], [1.5]]


@on_ranks(2)
def test_a_module_is_synchronised_and_watched_when_its_wrapper_is_dropped(rank):
    net = lockstep.DistributedDataParallel(two_layers(), process_group=rank.group).module
    gc.collect()
    net[1] = linear()
    net(rows(rank)).sum().backward()
    assert grads(net) == [[1.5], [1.5]]


@pytest.mark.parametrize("wrapped", [False, True], ids=["replicated", "wrapped"])
@on_ranks(2)
def test_a_part_that_has_outlived_its_module_raises_until_it_is_replicated_itself(rank, wrapped):
    make = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
    whole = make(two_layers(), process_group=rank.group)
    part = (whole.module if wrapped else whole)[0]
    del whole
    gc.collect()
    with pytest.raises(NotReplicableError, match=r"parameter 0\.weight got a gradient, but the module that was"):
        part(rows(rank)).sum().backward()
    part.zero_grad()
    alone, together = copy.deepcopy(part), lockstep.replicate(part, process_group=rank.group)
    for each in (alone, together):
        each(rows(rank)).sum().backward()
    assert grads(alone) + grads(together) == [[[1.0], [1.5]], [[2.0], [1.5]]][rank.rank]


@on_ranks(2)
def test_a_part_of_a_module_that_a_wrapper_has_lost_raises_on_all_ranks(rank):
    """The wrapper keeps the reducer, which has no module any more on one rank."""
    wrapper = lockstep.DistributedDataParallel(two_layers(), process_group=rank.group)
    net = wrapper.module
    if rank.rank:
        wrapper.module, net = None, net[0]
    gc.collect()
    with pytest.raises(AgreementError, match=r"rank 1.*the module that was replicated does not exist any more"):
        net(rows(rank)).sum().backward()


# ------------------------------------------------------------------------------------------- replicated once more


WAYS = {
    "wrapper of a wrapper": (lockstep.DistributedDataParallel, lockstep.DistributedDataParallel, False),
    "second wrapper": (lockstep.DistributedDataParallel, lockstep.DistributedDataParallel, True),
    "wrapper of a replicated module": (lockstep.replicate, lockstep.DistributedDataParallel, False),
    "replicated wrapper": (lockstep.DistributedDataParallel, lockstep.replicate, False),
    "replicated module of a wrapper": (lockstep.DistributedDataParallel, lockstep.replicate, True),
}


@pytest.mark.parametrize(("first", "second", "inside"), WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_the_last_replication_replaces_the_first(rank, first, second, inside):
    net = two_layers()
    earlier = first(net, process_group=rank.group)
    later = second(net if inside else earlier, process_group=rank.group)
    with later.no_sync():
        later(rows(rank)).sum().backward()
    local = grads(net)
    with count_collectives(rank) as sent:
        later(rows(rank)).sum().backward()
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"):
        earlier.no_sync().__enter__() if later is not earlier else first.no_sync(earlier).__enter__()
    n = (1.0, 2.0)[rank.rank]
    assert (local[0], grads(net), {each.name for each in sent} <= {"all_reduce", "broadcast", "all_gather"}) == (
        [n],
        [[3.0], [3.0]],
        True,
    )


@on_ranks(2)
def test_what_an_earlier_replication_has_lost_does_not_keep_it(rank):
    """Its layer is replaced before the module is wrapped again; then both ranks use another part of what is new."""
    net = two_layers()
    earlier = lockstep.DistributedDataParallel(net, process_group=rank.group)
    net[1] = linear()
    lockstep.DistributedDataParallel(net, process_group=rank.group)
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"):
        earlier.no_sync().__enter__()
    with pytest.raises(NotReplicableError, match=r"register_comm_hook\(\).* once more"):
        earlier.register_comm_hook(None, default_hooks.allreduce_hook)
    net.append(linear())
    net[2 * rank.rank](rows(rank)).sum().backward()
    assert grads(net) == [[0.5], None, [1.0]]


@on_ranks(2)
def test_a_new_buffer_is_noticed_when_backward_first_goes_past_forward(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net.forward = net[0].forward
    net.register_buffer("new", torch.full((1,), float(rank.rank)))
    (net(rows(rank)) + net[1](rows(rank))).sum().backward()  # what was called last is gone through first
    assert net.new.item() == 0.0


@on_ranks(2)
def test_a_list_of_modules_is_still_watched_when_one_has_been_deleted(rank):
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net.append(linear())
    del net[-1]
    net[1] = linear()
    net(rows(rank)).sum().backward()
    assert grads(net) == [[1.5], [1.5]]


@on_ranks(2)
def test_a_new_layer_and_one_that_is_used_for_the_first_time_have_their_own_gradients(rank):
    """A new layer where one was that has not been used so far, and that is used again now."""
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    for _ in range(2):
        net[0](rows(rank)).sum().backward()
    net.insert(1, linear())
    net.zero_grad()
    sum(number * layer(rows(rank)).sum() for number, layer in enumerate(net, 1)).backward()
    assert grads(net) == [[1.5], [3.0], [4.5]]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_a_layer_that_one_rank_has_frozen_when_another_is_replaced(rank):
    """A layer that one rank has frozen, when another is replaced: plans begin with what is trained."""
    net = lockstep.replicate(two_layers(), process_group=rank.group)
    net(rows(rank)).sum().backward()
    net[1].requires_grad_(rank.rank == 0)
    net[0] = linear()
    seen = []
    for _ in range(3):
        net.zero_grad()
        net(rows(rank)).sum().backward()
        seen.append(grads(net))
    assert seen == [[[1.5], [0.5]]] * 3
