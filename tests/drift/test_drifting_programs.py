"""Programs whose replicas drift apart after some step: every rank raises, by name, as soon as it can be known.

Most are shapes of public reports. Rank 1 makes a mistake at step ``AT`` of a training that is otherwise right.
"""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.value_digests import Look
from lockstep.distributed.replication.replication import find_replication
from lockstep.errors import AgreementError, OutOfSyncError, ShardingError
from threaded import run_ranks

# The program of last_backward_under_no_sync is also told by a warning, in the step before.
pytestmark = pytest.mark.filterwarnings("ignore:.* of this rank alone, so the replicas drift apart")

AT = 9
SOON, LATE = 8, 30  # steps until a change of all weights is named, and of one tensor in this network of 4


class Training:
    """A network and its optimizer on one rank."""

    def __init__(self, rank, form, optimizer):
        self.rank, self.form = rank, form
        net = rank.make(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).to(rank.device)
        attach = lockstep.DistributedDataParallel if form == "wrapper" else lockstep.replicate
        shares = {"shares": 2} if form == "shares" else {}
        self.model = attach(net, process_group=rank.group, **shares)
        self.net = net
        self.parameters = list(net.parameters())
        make = {"SGD": lambda: torch.optim.SGD(self.parameters, 0.1, momentum=0.9)}
        make["AdamW"] = lambda: torch.optim.AdamW(self.parameters, 1e-2)
        make["tensor lr"] = lambda: torch.optim.AdamW(self.parameters, torch.tensor(1e-2), foreach=False)
        self.optimizer = make[optimizer]()
        if form == "sharded":
            self.optimizer = lockstep.shard_optimizer(self.optimizer)
        self.group = self.optimizer.param_groups[0]
        self.numbers = rank.generator()
        self.before_step = self.after_step = lambda number: None
        self.loss_of = lambda x: self.model(x).square().mean()

    @property
    def is_wrong(self):
        return self.rank.rank == 1

    def backward(self, number):
        self.optimizer.zero_grad()
        x = torch.randn(6, 4, generator=self.numbers, device="cpu").to(self.rank.device)
        if self.form != "shares":
            self.loss_of(x).backward()
            return
        data = TensorDataset(torch.linspace(-1, 1, 16).view(4, 4) + number)
        for batch in lockstep.shares.GlobalBatches(data, 4, 2, shuffle=False, process_group=self.rank.group):
            for (rows,) in batch:
                self.loss_of(rows.to(self.rank.device)).backward()

    def run(self, mistake, steps):
        """Return the step in whose backward an error was raised, and the error; None if there was none."""
        mistake = mistake(self)
        for number in range(steps):
            try:
                if number == AT + 1 and self.is_wrong and mistake is not None:
                    mistake()
                self.backward(number)
                self.before_step(number)
                self.optimizer.step()
            except (AgreementError, ShardingError) as error:
                return number, error
            self.after_step(number)
        return None


# Each program gives a training what it does otherwise from the beginning, or returns what rank 1 does once, after AT.


def once(do):
    return lambda t: lambda: do(t)


def from_then_on(when, do, on_all=False):
    """Before the optimizer's step, or after it."""

    def program(t):
        setattr(t, when, lambda number: do(t) if number > AT and (on_all or t.is_wrong) else None)

    return program


def scheduler_on_one_rank(t):
    if t.is_wrong:
        scheduler = torch.optim.lr_scheduler.StepLR(t.optimizer, AT + 1)
        t.after_step = lambda number: scheduler.step()


def plateau_of_the_rank_s_loss(t):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=AT - 1, cooldown=100)
    t.after_step = lambda number: plateau.step(1.0 if t.is_wrong else 1.0 / (1 + number))


def warm_up_by_own_rows(t):
    def set_rate(number):
        t.group["lr"] = 1e-2 * (1 + (number > AT and t.is_wrong))

    t.before_step = set_rate


def other_state(t, lr):
    parameters = [p.detach().clone().requires_grad_() for p in t.parameters]
    other = type(t.optimizer)(parameters, lr)
    for group in other.param_groups:
        group.update({key: value for key, value in t.group.items() if key not in ("params", "lr")})
    for p in parameters:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        other.step()
    return other.state_dict()


def average_written_back(t):
    average = copy.deepcopy(t.net.state_dict())

    def write():
        with torch.no_grad():
            for name, p in t.net.named_parameters():
                p.lerp_(average[name], 0.5)

    return write


def average_swapped_in_and_left(t):
    average = [p.detach().clone() for p in t.parameters]

    def swap():
        for p, value in zip(t.parameters, average, strict=True):
            p.data = value.clone()

    return swap


def checkpoint_loaded_late(t):
    other = {name: value + 0.1 for name, value in t.net.state_dict().items()}
    return lambda: t.net.load_state_dict(other)


def checkpoint_loaded_first(t):
    if t.is_wrong:
        checkpoint_loaded_late(t)()


def seed_of_the_rank(t):
    if t.is_wrong:
        t.net[0].bias.data.copy_(torch.randn(8, generator=t.rank.generator(), device="cpu"))


def each_rank_loads_its_own(t):
    other = {name: value + t.rank.rank for name, value in t.net.state_dict().items()}

    def load(number):
        if number == AT:
            t.net.load_state_dict(other)

    t.after_step = load


def add_noise_to_gradients(t):
    for p in t.parameters:
        p.grad += torch.randn(p.shape, generator=t.numbers, device="cpu").to(p.device)


def assign_gradients(t):
    loss = t.net(torch.full((2, 4), 1.0 + t.rank.rank, device=t.rank.device)).square().mean()
    for p, grad in zip(t.parameters, torch.autograd.grad(loss, t.parameters), strict=True):
        p.grad = grad


def scaler_with_another_scale(t):
    """The loss is scaled, and gradients are divided by each rank's own scale."""
    t.loss_of = lambda x: t.model(x).square().mean() * 8
    t.before_step = lambda number: [
        p.grad.div_(4 if t.is_wrong and number > AT else 8) for p in t.parameters if p.grad is not None
    ]


def last_backward_under_no_sync(t):
    """In one step all ranks forget to synchronise."""
    inner = t.backward

    def backward(number):
        t.model.set_requires_gradient_sync(number != AT + 1)
        inner(number)

    t.backward = backward


def take_a_parameter_out(t):
    t.group["params"] = t.group["params"][1:]


def cut_the_group_in_two(t):
    last = t.group["params"].pop()
    t.optimizer.add_param_group({**t.group, "params": [last], "lr": 1e-4})


def take_another_optimizer(t):
    t.optimizer = torch.optim.Adagrad(t.parameters, 1e-2)


NUMBERS = {
    "learning_rate": (once(lambda t: t.group.update(lr=1e-3)), "lr"),
    "scheduler_on_one_rank": (scheduler_on_one_rank, "lr"),
    "plateau_of_the_rank_s_loss": (plateau_of_the_rank_s_loss, "lr"),
    "warm_up_by_own_rows": (warm_up_by_own_rows, "lr"),
    "weight_decay": (once(lambda t: t.group.update(weight_decay=0.5)), "weight_decay"),
    "maximises": (once(lambda t: t.group.update(maximize=True)), "maximize"),
    "tensor_as_rate_replaced": (once(lambda t: t.group.update(lr=torch.tensor(1e-3))), "lr"),
    "tensor_as_rate_written": (once(lambda t: t.group["lr"].fill_(1e-3)), "lr"),
    "optimizer_loaded_on_one_rank": (once(lambda t: t.optimizer.load_state_dict(other_state(t, 2e-2))), "lr"),
    "momentum": (once(lambda t: t.group.update(momentum=0.5)), "momentum"),
    "betas": (once(lambda t: t.group.update(betas=(0.9, 0.9))), "betas"),
    "group_cut_in_two": (once(cut_the_group_in_two), "group 1"),
    "another_optimizer": (once(take_another_optimizer), "Ada"),
}
"""Named in the backward after the step that used them, with these words."""
SINGLE = {
    "seed_of_the_rank": seed_of_the_rank,
    "one_state_scaled": once(lambda t: t.optimizer.state[t.parameters[0]]["exp_avg"].mul_(1.5)),
    "one_weight_written": once(lambda t: t.net[2].bias.data[1].add_(1)),
    "one_bit_flipped": once(lambda t: t.net[0].weight.data.view(torch.int32)[3, 2].bitwise_xor_(1)),
    "two_rows_exchanged": once(lambda t: t.net[0].weight.data.copy_(t.net[0].weight.data[[1, 0, *range(2, 8)]])),
    "weights_clamped": from_then_on("after_step", torch.no_grad()(lambda t: t.net[2].weight.clamp_(-1e-2, 1e-2))),
    "gradient_dropped": from_then_on("before_step", lambda t: setattr(t.net[0].weight, "grad", None)),
    "parameter_taken_out": once(take_a_parameter_out),
    "norm_of_rows_bounded": from_then_on("after_step", lambda t: t.net[0].weight.data.renorm_(2, 0, 1e-2)),
}
"""Those that change a single tensor at first."""
ALL = {
    "state_loaded_on_one_rank": once(lambda t: t.optimizer.load_state_dict(other_state(t, t.group["lr"]))),
    "state_cleared": once(lambda t: t.optimizer.state.clear()),
    "average_written_back": average_written_back,
    "average_swapped_in_and_left": average_swapped_in_and_left,
    "checkpoint_loaded_late": checkpoint_loaded_late,
    "checkpoint_loaded_first": checkpoint_loaded_first,
    "weights_signs": once(lambda t: torch._foreach_neg_([p.data for p in t.parameters])),
    "weights_rounded": once(lambda t: [p.data.copy_(p.data.bfloat16()) for p in t.parameters]),
    "each_rank_loads_its_own": each_rank_loads_its_own,
    "clipped_on_one_rank": from_then_on("before_step", lambda t: nn.utils.clip_grad_norm_(t.parameters, 1e-4)),
    "gradient_noise": from_then_on("before_step", add_noise_to_gradients, on_all=True),
    "gradients_by_hand": from_then_on("before_step", assign_gradients, on_all=True),
    "scaler_with_another_scale": scaler_with_another_scale,
    "last_backward_under_no_sync": last_backward_under_no_sync,
}
FIRST = {"checkpoint_loaded_first", "seed_of_the_rank"}
"""Named in the second backward."""
OPTIMIZERS = {"momentum": "SGD", "tensor_as_rate_replaced": "tensor lr", "tensor_as_rate_written": "tensor lr"}
PROGRAMS = {name: program for name, (program, _) in NUMBERS.items()} | SINGLE | ALL


def some(programs):
    """For forms that are watched as the others are: of those that take hundreds of steps, all but two are around."""
    return [pytest.param(each, marks=pytest.mark.around) if each in list(SINGLE)[2:] else each for each in programs]


def check(found, program, first_step=AT + 2):
    """Check the error of one rank, and when it came."""
    assert found is not None, "silent"
    number, error = found
    assert isinstance(error, OutOfSyncError)
    if program in NUMBERS:
        assert number == first_step
        assert NUMBERS[program][1] in str(error)
        assert str(error).startswith("optimizer ")
        assert f" (after step {first_step}), " in str(error)
    elif program in FIRST:
        assert number == 1
        assert "between replicate() and step 1." in str(error)
    else:
        assert number <= AT + 1 + (LATE if program in SINGLE else SOON)
        assert " is out of sync: " in str(error)


def drift(rank, program, form):
    return Training(rank, form, OPTIMIZERS.get(program, "AdamW")).run(PROGRAMS[program], AT + LATE + 5)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("form", ["replicate", pytest.param("wrapper", marks=pytest.mark.around), "shares"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_drift_is_named_on_every_rank(program, form, hosts):
    if form == "shares" and program == "last_backward_under_no_sync":
        pytest.skip("a module with shares always synchronises")
    first, second = run_ranks(2, drift, program, form, hosts=hosts)
    check(first, program)
    assert str(first[1]) == str(second[1])


def drift_sharded(rank, program):
    """Return the error, and whether the weights are alike if there is none: a step gathers all of them."""
    training = Training(rank, "sharded", OPTIMIZERS.get(program, "AdamW"))
    found = training.run(PROGRAMS[program], AT + LATE + 5)
    if found is None:
        training.before_step = training.after_step = lambda number: None
        training.run(lambda training: None, 1)
    return found or all(rank.all_equal(p) for p in training.parameters)


NOT_SHARDED = {"state_cleared", "one_state_scaled", "another_optimizer"}  # each is an error on that rank alone


@pytest.mark.parametrize("program", some(each for each in PROGRAMS if each not in NOT_SHARDED))
def test_drift_is_named_or_mended_by_a_sharded_step(program):
    first, second = run_ranks(2, drift_sharded, program)
    assert (first is True) == (second is True)
    assert first is not False
    assert second is not False


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("program", some(PROGRAMS))
def test_drift_is_named_on_accelerators(program):
    """A few backwards later: digests travel meanwhile. A tensor as learning rate is compared with the values."""
    first, second = run_ranks(2, drift, program, "replicate", device="sim")
    assert first is not None
    number, error = first
    assert str(error) == str(second[1])
    assert number <= AT + 4 + (LATE if program in SINGLE else SOON)


HERE = threading.local()


class LateOnce(Look):
    """Digests of a slice, of which the first does not arrive in time on a rank that sets ``HERE.is_late``."""

    def __init__(self, *args):
        super().__init__(*args)
        self.is_late, HERE.is_late = HERE.is_late, False

    def digest(self):
        if self.is_late:
            self.is_late = False
            return None
        return super().digest()


def drift_with_late_digests(rank):
    HERE.is_late = rank.rank == 1
    training = Training(rank, "replicate", "AdamW")
    found = training.run(PROGRAMS["weights_signs"], AT + LATE)
    return found, find_replication(training.net).drift._late


@pytest.mark.usefixtures("sim")
def test_ranks_wait_alike_if_digests_are_late_on_one_of_them(monkeypatch):
    examine, rounds = DriftWatch.examine, []

    def noting(watch, **options):
        rounds.append(watch.round)
        examine(watch, **options)

    monkeypatch.setattr("lockstep.distributed.reduction.module.drift.Look", LateOnce)
    monkeypatch.setattr(DriftWatch, "examine", noting)
    (first, late), (second, other_late) = run_ranks(2, drift_with_late_digests, device="sim")
    assert late == other_late == 1
    assert str(first[1]) == str(second[1])
    assert first[0] <= AT + 4 + SOON
    assert min(rounds) > AT, "everything was compared where only digests were late"
