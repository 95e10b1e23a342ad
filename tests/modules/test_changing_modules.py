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
from programs.networks import Applying
from programs.ranks import clear, on_ranks, replicated, scalars, scalars_of
from small_modules import chain, filled, one_weight, x_of
from threaded import count_collectives, run_ranks

gloo_and_shm = pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])


# ------------------------------------------------------------------------------- what programs do to their modules


def assign_a_checkpoint(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def reverse_the_layers(net):
    net[0], net[1] = net[1], net[0]


def normalise_weights_the_old_way(net):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net[0])


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrize_and_remove(net):
    parametrize.register_parametrization(net[0], "weight", Doubled())
    parametrize.remove_parametrizations(net[0], "weight")


def swap_tensors(net):
    for layer in net:
        torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(1, 1)))


def swap_one_and_keep_the_other(net):
    net.other = [nn.Parameter(torch.ones(1, 1))]
    torch.utils.swap_tensors(net[1].weight, net.other[0])


def tie(net):
    net[1].weight = net[0].weight


def untie(net):
    net[1].weight = nn.Parameter(net[0].weight.detach().clone())


def come_and_go_and_replace(net):
    net.append(one_weight())
    del net[-1]
    net[1] = one_weight()


def replace_and_change(net):
    net[0] = chain(1)
    net[0][0] = one_weight()
    assign_a_checkpoint(net)


def tied_chain():
    net = chain(2)
    tie(net)
    return net


CHANGES = {
    "a checkpoint is assigned": assign_a_checkpoint,
    "a layer is replaced": lambda net: net.__setitem__(1, one_weight()),
    "a layer is added": lambda net: net.append(one_weight()),
    "a layer is added without a word": lambda net: net._modules.update({"2": one_weight()}),
    "a layer is removed": lambda net: net.__delitem__(1),
    "a layer comes and goes, another is replaced": come_and_go_and_replace,
    "a slot is written": lambda net: net[0]._parameters.update(weight=nn.Parameter(torch.ones(1, 1))),
    "tied": tie,
    "weights are normalised": lambda net: parametrizations.weight_norm(net[0]),
    "weights are normalised the old way": normalise_weights_the_old_way,
    "parametrized": lambda net: parametrize.register_parametrization(net[0], "weight", Doubled()),
    "parametrized and back": parametrize_and_remove,
    "tensors are swapped": swap_tensors,
    "a tensor is swapped, and the other one kept": swap_one_and_keep_the_other,
    "untied": untie,
    "layers change places": reverse_the_layers,
    "the only layer changes before it is used": replace_and_change,  # nothing is left that had a hook
}
MAKES = {
    "untied": tied_chain,
    "layers change places": lambda: nn.Sequential(one_weight(1.0), one_weight(3.0)),
    "the only layer changes before it is used": lambda: chain(1),
}
"""Those that are done to something else than a chain of two."""


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
    """Gradients of a replicated module that changes after its first step are the means of those of two plain ones."""
    net = make()
    module = net if way == "wrapped" else lockstep.replicate(net, process_group=rank.group)
    call = lockstep.DistributedDataParallel(net, process_group=rank.group) if way == "wrapped" else module
    plain = [make(), make()]
    for step in range(4):
        if step == 1:
            for each in (module, *plain):
                change(each)
        clear(module, *plain)
        output(call, x_of(rank), way).sum().backward()
        for number, each in enumerate(plain):
            each(torch.full((1, 1), number + 1.0)).sum().backward()
        wanted = [(a.grad + b.grad) / 2 for a, b in zip(*(each.parameters() for each in plain), strict=True)]
        assert all(torch.equal(p.grad, grad) for p, grad in zip(module.parameters(), wanted, strict=True))
        with torch.no_grad():
            for each in (module, *plain):
                for p, grad in zip(each.parameters(), wanted, strict=True):
                    p -= 0.25 * grad


CASES = [(change, way) for change in CHANGES for way in ("replicated", "wrapped", "past forward")]
CASES.remove(("tensors are swapped", "past forward"))  # nothing is left that has a hook, and nothing of ours is called


@pytest.mark.parametrize(("change", "way"), CASES)
@on_ranks(2)
def test_gradients_are_means_after_a_change_on_all_ranks(rank, change, way):
    change_in_training(rank, CHANGES[change], MAKES.get(change, chain), way)


@gloo_and_shm
@pytest.mark.parametrize("first", ["replicated", "put in"])
@on_ranks(2, "hosts")
def test_a_replicated_part_that_comes_later_keeps_its_own_parameters(rank, first):
    """Put into a replicated module, before it is replicated or afterwards, it synchronises what is new in it itself."""
    whole = replicated(rank, lambda: chain(1))
    part = chain(1)
    if first == "put in":
        whole.append(part)
    lockstep.replicate(part, process_group=rank.group)
    if first == "replicated":
        whole.append(part)
    found = []
    for change in (lambda: None, lambda: part.append(one_weight()), lambda: assign_a_checkpoint(part)):
        change()
        found.append(scalars_of(whole, loss=whole(x_of(rank)).sum()))
    assert found == [[1.5] * 2, [1.5] * 3, [1.5] * 3]


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
    source, target = chain(2), chain(1)
    for module in (source, target) if first == "source" else (target, source):
        lockstep.replicate(module, process_group=rank.group)
    (source(x_of(rank)) + target(x_of(rank))).sum().backward()
    layer = source[1]
    MOVES[move](source, target, layer)
    found = []
    for _ in range(3):
        if weight == "new":
            layer.weight = nn.Parameter(torch.ones(1, 1))
        clear(source, target)
        with lockstep.accumulate(source, weight=rank.rank + 3), lockstep.accumulate(target, weight=rank.rank + 3):
            sum(output(module, x_of(rank), way).sum() for module in (source, target)).backward()
        found.append(scalars(source, target))
    assert found == [pytest.approx([3 / 7] * 3)] * 3


@pytest.mark.parametrize("move", MOVES)
@on_ranks(2)
def test_a_layer_that_has_moved_and_changed_is_synchronised_when_it_is_used_alone(rank, move):
    """Its new weight is all that gets a gradient, so nothing else can notice it."""
    source, target = (replicated(rank, lambda: chain(1)) for _ in range(2))
    layer = source[0]
    MOVES[move](source, target, layer)
    layer.weight = nn.Parameter(torch.ones(1, 1))
    layer(x_of(rank)).sum().backward()
    assert scalars(layer) == [1.5]


def test_a_replicated_part_lets_go_of_the_whole_that_it_was_in():
    def work(rank):
        part = replicated(rank, lambda: chain(1))
        whole = replicated(rank, lambda: chain(1))
        whole.append(part)
        whole(x_of(rank)).sum().backward()
        return part, weakref.ref(whole[0].weight)

    found = run_ranks(2, work)
    gc.collect()  # not by each rank: while one thread collects, another's call does nothing
    assert all(part[0].weight.grad.item() == 1.5 and weight() is None for part, weight in found)


@pytest.mark.parametrize("conversion_flag", ["overwrite_module_params", "swap_module_params"], indirect=True)
@on_ranks(2)
def test_conversions_that_make_new_parameters(rank, conversion_flag):
    change_in_training(rank, lambda net: net.double().float(), chain, "replicated")


# ------------------------------------------------------------------------------------------- ranks that differ

# What only the last rank does, and words of the error that every rank raises.
LONE_CHANGES = {
    "another layer": (lambda net: net.insert(1, one_weight()), ["rank 1 has parameter 2.weight"]),
    "a layer less": (lambda net: net.pop(1), ["rank 0 has parameter 1.weight", "rank 1 has no such thing"]),
    "another shape": (
        lambda net: net.__setitem__(0, nn.Linear(1, 2, bias=False)),
        [
            "ranks differ in parameter 0.weight: rank 0 has float32 of shape (1, 1)",
            "rank 1 has float32 of shape (2, 1)",
        ],
    ),
    "tied": (tie, ["rank 0 has parameter 1.weight", "rank 1 has no such thing"]),
    "the same values in another tensor": (
        assign_a_checkpoint,
        ["parameter 0.weight is another object than when the module was replicated on rank 1", "the same on rank 0"],
    ),
    "layers in another order": (
        reverse_the_layers,
        [
            "ranks differ in parameter 0.weight",
            "rank 1 has float32 of shape (1, 1), which was parameter 1.weight before",
        ],
    ),
    "a lazy layer": (lambda net: net.append(nn.LazyLinear(1)), ["rank 1", "2.weight is not initialised"]),
}


@gloo_and_shm
@pytest.mark.parametrize(("change", "words"), LONE_CHANGES.values(), ids=LONE_CHANGES)
def test_a_change_on_one_rank_is_an_error_on_every_rank_until_it_is_undone(change, words, hosts):
    def call(rank):
        net = replicated(rank, chain)
        net(x_of(rank)).sum().backward()
        before = list(net)
        if rank.rank == 1:
            change(net)
        messages = []
        for _ in range(2):
            net.zero_grad()
            with pytest.raises(AgreementError) as caught:
                before[0](x_of(rank)).sum().backward()
            messages.append(str(caught.value))
        return messages

    (message,) = {message for messages in run_ranks(2, call, hosts=hosts) for message in messages}
    assert all(word in message for word in words), message


@on_ranks(2)
def test_ranks_go_on_when_a_lone_change_has_been_undone(rank):
    net = replicated(rank, chain)
    if rank.rank == 1:
        net.append(one_weight())
    with pytest.raises(AgreementError, match=r"rank 1 has parameter 2\.weight"):
        net(x_of(rank)).sum().backward()
    if rank.rank == 1:
        del net[2]
    assert scalars_of(net, loss=net(x_of(rank)).sum()) == [1.5, 1.5]


@on_ranks(2)
def test_a_new_parameter_with_other_values_on_some_rank_is_an_error_on_every_rank(rank):
    net = replicated(rank, chain)
    net[1] = one_weight(1.0 + rank.rank)
    words = r"parameter 1\.weight was put into the module after .*other values on rank 1 than on rank 0"
    with pytest.raises(OutOfSyncError, match=words):
        net(x_of(rank)).sum().backward()
    filled(net[1])
    assert scalars_of(net, loss=net(x_of(rank)).sum()) == [1.5, 1.5]


@on_ranks(2)
def test_values_that_differ_are_not_compared_without_init_sync(rank):
    net = lockstep.replicate(chain(2), process_group=rank.group, init_sync=False)
    net(x_of(rank)).sum().backward()
    net[1] = one_weight(rank.rank + 1.0)
    assert scalars_of(net, loss=net(x_of(rank)).sum())[1] == 1.5


# ------------------------------------------------------------------------------------------- all around


@on_ranks(2)
def test_hooks_of_a_new_parameter_see_the_mean(rank):
    net = replicated(rank, chain)
    net(x_of(rank)).sum().backward()
    net[1] = one_weight()
    seen = []
    for _ in range(2):
        net.zero_grad()
        if not seen:
            net[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        net(x_of(rank)).sum().backward()
    assert seen == [1.5, 1.5]


@on_ranks(2)
def test_hooks_of_a_parameter_that_was_removed_go_on(rank):
    net = replicated(rank, chain)
    layer, seen = net[1], []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    del net[1]
    net(x_of(rank)).sum().backward()
    layer(x_of(rank)).sum().backward()
    assert seen == [rank.rank + 1.0]


@on_ranks(2)
def test_gradients_that_have_piled_up_count_when_a_parameter_is_added_meanwhile(rank):
    net = replicated(rank, chain)
    with net.no_sync():
        net(x_of(rank)).sum().backward()
        net.append(one_weight())
        net(x_of(rank)).sum().backward()
    net(x_of(rank)).sum().backward()
    assert scalars(net) == [4.5, 4.5, 3.0]


def applying(forward):
    """A module of one weight, the first, and room for a second one."""
    return Applying(forward, (), first=one_weight(), second=None)


@on_ranks(2)
def test_a_new_parameter_that_only_one_rank_uses(rank):
    net = replicated(rank, lambda: applying(lambda m, x, more: m.second(m.first(x)) if more else m.first(x)))
    net.second = one_weight()
    seen = [scalars_of(net, loss=net(x_of(rank), more).sum()) for more in (rank.rank == 1, False)]
    assert seen == [[1.5, 1.0], [1.5, None]]


@on_ranks(2)
def test_a_layer_made_in_the_first_forward(rank):
    def forward(m, x):
        if m.second is None:
            m.second = one_weight()
        return m.second(m.first(x))

    net = replicated(rank, lambda: applying(forward))
    net(x_of(rank)).sum().backward()
    assert scalars(net) == [1.5, 1.5]


@on_ranks(2)
def test_another_dtype_of_a_new_parameter(rank):
    net = replicated(rank, chain)
    net[1] = one_weight().double()
    net[1](net[0](x_of(rank)).double()).sum().backward()
    assert (scalars(net), net[1].weight.grad.dtype) == ([1.5, 1.5], torch.float64)


@on_ranks(2)
def test_parameters_lent_by_functional_call_are_no_change(rank):
    net = replicated(rank, chain)
    net(x_of(rank)).sum().backward()
    net.zero_grad()
    lent = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
    with count_collectives(rank) as sent:
        functional_call(net, lent, (x_of(rank),)).sum().backward()
    n = (1, 2)[rank.rank]
    assert (len(sent), scalars(net), [lent[name].grad.item() for name in lent]) == (0, [None, None], [2.0 * n, 2.0 * n])


@pytest.mark.parametrize("puts_back", [True, False])
@on_ranks(2)
def test_parameters_that_an_inner_step_replaces(rank, puts_back):
    """As meta-learning does: gradients go through the inner step to the module's own parameters."""
    net = replicated(rank)
    own = net.weight
    (grad,) = torch.autograd.grad(net(x_of(rank)).square().sum(), own, create_graph=True)
    net._parameters["weight"] = own - 0.1 * grad
    loss = net(x_of(rank)).square().sum()
    if puts_back:
        net._parameters["weight"] = own
        loss.backward()
        # x is 1 and 2, and of (w - 0.2 x^2 w)^2 x^2 the derivatives by w = 1 are 1.28 and 0.32
        assert own.grad.item() == pytest.approx(0.8)
    else:
        told = "parameter weight is not a leaf of autograd.*put the module's own parameters back"
        with pytest.raises((AgreementError, NotReplicableError), match=told):
            loss.backward()


@pytest.mark.parametrize("weight", [None, 1.0])
@on_ranks(2)
def test_a_parameter_that_was_in_the_module_for_a_moment(rank, weight):
    net = replicated(rank, chain)
    layer = one_weight()
    net.append(layer)
    del net[2]
    with count_collectives(rank) as sent, lockstep.accumulate(net, weight=weight):
        layer(x_of(rank)).sum().backward()
    assert (len(sent), layer.weight.grad.item()) == [(0, 1.0), (0, 2.0)][rank.rank]


def enlarge(net):
    net[1].weight.data = torch.ones(5, 1)


@pytest.mark.parametrize("change", [assign_a_checkpoint, enlarge])
@on_ranks(2)
def test_noticing_costs_no_collective_and_agreeing_only_the_step_of_the_change(rank, change):
    net, counts = replicated(rank, chain), []
    for step in range(7):
        net.zero_grad()
        if step == 4:
            change(net)
        with count_collectives(rank) as sent:
            net(x_of(rank)).sum().backward()
        counts.append(len(sent))
    assert counts[2:4] == [1, 1]
    assert counts[4] > 1
    assert counts[6] == 1


# ------------------------------------------------------------------------------------------- wholes that are dropped


@on_ranks(2)
def test_the_earlier_wrapper_of_a_module_with_other_weights_is_replaced(rank):
    module = chain(2)
    first = lockstep.DistributedDataParallel(module, process_group=rank.group)
    assign_a_checkpoint(module)
    second = lockstep.DistributedDataParallel(module, process_group=rank.group)
    assert len(list(scheduler_of(rank.group).modules)) == 1
    second(x_of(rank)).sum().backward()
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"), first.no_sync():
        pass
    assert scalars(module) == [1.5, 1.5]


@on_ranks(2)
def test_a_module_is_synchronised_and_watched_when_its_wrapper_is_dropped(rank):
    net = lockstep.DistributedDataParallel(chain(2), process_group=rank.group).module
    gc.collect()
    net[1] = one_weight()
    net(x_of(rank)).sum().backward()
    assert scalars(net) == [1.5, 1.5]


@pytest.mark.parametrize("wrapped", [False, True], ids=["replicated", "wrapped"])
@on_ranks(2)
def test_a_part_that_has_outlived_its_module_raises_until_it_is_replicated_itself(rank, wrapped):
    make = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
    whole = make(chain(2), process_group=rank.group)
    part = (whole.module if wrapped else whole)[0]
    del whole
    gc.collect()
    with pytest.raises(NotReplicableError, match=r"parameter 0\.weight got a gradient, but the module that was"):
        part(x_of(rank)).sum().backward()
    part.zero_grad()
    alone, together = copy.deepcopy(part), lockstep.replicate(part, process_group=rank.group)
    for each in (alone, together):
        each(x_of(rank)).sum().backward()
    assert scalars(alone) + scalars(together) == [[1.0, 1.5], [2.0, 1.5]][rank.rank]


@on_ranks(2)
def test_a_part_of_a_module_that_a_wrapper_has_lost_raises_on_all_ranks(rank):
    """The wrapper keeps the reducer, which has no module any more on one rank."""
    wrapper = lockstep.DistributedDataParallel(chain(2), process_group=rank.group)
    net = wrapper.module
    if rank.rank:
        wrapper.module, net = None, net[0]
    gc.collect()
    with pytest.raises(AgreementError, match=r"rank 1.*the module that was replicated does not exist any more"):
        net(x_of(rank)).sum().backward()


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
    net = chain(2)
    earlier = first(net, process_group=rank.group)
    later = second(net if inside else earlier, process_group=rank.group)
    with later.no_sync():
        later(x_of(rank)).sum().backward()
    local = scalars(net)
    with count_collectives(rank) as sent:
        later(x_of(rank)).sum().backward()
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"):
        earlier.no_sync().__enter__() if later is not earlier else first.no_sync(earlier).__enter__()
    assert (local[0], scalars(net)) == (rank.rank + 1.0, [3.0, 3.0])
    assert {each.name for each in sent} <= {"all_reduce", "broadcast", "all_gather"}


@on_ranks(2)
def test_what_an_earlier_replication_has_lost_does_not_keep_it(rank):
    """Its layer is replaced before the module is wrapped again; then both ranks use another part of what is new."""
    net = chain(2)
    earlier = lockstep.DistributedDataParallel(net, process_group=rank.group)
    net[1] = one_weight()
    lockstep.DistributedDataParallel(net, process_group=rank.group)
    with pytest.raises(NotReplicableError, match="replicated or wrapped once more"):
        earlier.no_sync().__enter__()
    with pytest.raises(NotReplicableError, match=r"register_comm_hook\(\).* once more"):
        earlier.register_comm_hook(None, default_hooks.allreduce_hook)
    net.append(one_weight())
    net[2 * rank.rank](x_of(rank)).sum().backward()
    assert scalars(net) == [0.5, None, 1.0]


@on_ranks(2)
def test_a_new_buffer_is_noticed_when_backward_first_goes_past_forward(rank):
    net = replicated(rank, chain)
    net.forward = net[0].forward
    net.register_buffer("new", torch.full((1,), float(rank.rank)))
    (net(x_of(rank)) + net[1](x_of(rank))).sum().backward()  # what was called last is gone through first
    assert net.new.item() == 0.0


@on_ranks(2)
def test_a_new_layer_and_one_that_is_used_for_the_first_time_have_their_own_gradients(rank):
    """A new layer where one was that has not been used so far, and that is used again now."""
    net = replicated(rank, chain)
    for _ in range(2):
        net[0](x_of(rank)).sum().backward()
    net.insert(1, one_weight())
    net.zero_grad()
    sum(number * layer(x_of(rank)).sum() for number, layer in enumerate(net, 1)).backward()
    assert scalars(net) == [1.5, 3.0, 4.5]


@gloo_and_shm
@on_ranks(2, "hosts")
def test_a_layer_that_one_rank_has_frozen_when_another_is_replaced(rank):
    """A layer that one rank has frozen, when another is replaced: plans begin with what is trained."""
    net = replicated(rank, chain)
    net(x_of(rank)).sum().backward()
    net[1].requires_grad_(rank.rank == 0)
    net[0] = one_weight()
    assert [scalars_of(net, loss=net(x_of(rank)).sum()) for _ in range(3)] == [[1.5, 0.5]] * 3
