"""Random programs over a network: lines that change it, and lines that use it, in replicas and on one device.

In lines that change the network, ``n`` is a network: they run for the one that DataParallel holds, and for the one that
is used plainly. Those that use it begin with ``use.``, and compare. Those that cannot run on one device are left out.

The operations follow the table at the head of ``lockstep.local.changes``.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sim as simulator
from fuzz.programs import Program
from lockstep import DataParallel
from lockstep._base import tensor_state
from lockstep.local import SyncBatchNorm, replicate

WIDTH, LAYERS = 4, 4


class Setting(NamedTuple):
    """What holds for a whole program."""

    device: str
    devices: int
    guards: bool
    """False if nothing guards the layout of tensors, as with a PyTorch that has no guards."""


class Invalid(Exception):
    """A line that cannot run on one device either."""


class Strict:
    """Refuses to be compared with others."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value == other.value  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class Negated(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def increment(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def halve(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2,)


class Net(nn.Module):
    """Layers in every kind of container, tied, normalised, scripted, optional; state of every kind."""

    def __init__(self, norm: type[nn.Module], scripted: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[2].weight
        self.norm = norm(WIDTH)
        self.scripted = scripted
        self.one = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(WIDTH, WIDTH)})
        self.other = nn.ModuleDict({"c": nn.Sigmoid()})
        self.extra: nn.Module | None = None
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.gated = False
        self.path, self.deep, self.words = [self.layers[0], self.layers[1]], [[[[[[[[[[]]]]]]]]]], list(range(2000))
        self.table: dict[str, Any] = {"a": self.layers[0]}
        self.partial = partial(self.layers[3])
        self.method = self.layers[1].forward
        self.scale: Any = 1.0
        self.strict: Any = None
        self.recompute = False
        self.seen = False
        self.auxiliary: torch.Tensor | None = None
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("offset", None)

    def innermost(self) -> list[Any]:
        found = self.deep
        while found and isinstance(found[0], list):
            found = found[0]
        return found

    def named_layers(self) -> list[Any]:
        ends = [word for word in (*self.words[:3], self.words[1000], *self.words[-3:]) if isinstance(word, nn.Module)]
        return [*self.path, *self.innermost(), *self.table.values(), self.partial, *ends, self.method]

    def put(self, index: int, layer: nn.Module) -> None:
        """Replace a layer, wherever it is."""
        old = self.layers[index]
        for held in (self.path, self.innermost(), self.words):
            held[:] = [layer if each is old else each for each in held]
        self.table = {key: layer if each is old else each for key, each in self.table.items()}
        if self.partial.func is old:
            self.partial = partial(layer)
        if self.method.__self__ is old:
            self.method = layer.forward
        self.layers[index] = layer

    def through_layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.named_layers():
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = 10 * self.seen + 10 * self.count.detach()
        if self.seen is False and (x[:, 0] > 0).any():
            self.seen = True
            self.count += 1
        x = self.first(x)
        if self.recompute and torch.is_grad_enabled():
            x = checkpoint(self.through_layers, x, use_reentrant=False)
        else:
            x = self.through_layers(x)
        x = self.norm(self.tied(x) + self.layers[2](x))
        for module in (*self.one.values(), *self.other.values()):
            x = torch.tanh(2 * module(x))
        self.auxiliary = x.mean().detach()
        x = self.scripted(x) * self.scale + self.shift + before
        x = x * self.gate if self.gated else x
        x = x if self.offset is None else x + self.offset
        x = x if self.strict is None else x * self.strict.value
        return x if self.extra is None else self.extra(x)


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: F.dropout(t, 0.5, True), x, use_reentrant=False)


def batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Pair:
    """The network that DataParallel holds, and the one that is used plainly; the uses compare the two."""

    def __init__(self, devices: list[torch.device], scripted: nn.Module) -> None:
        torch.manual_seed(1)
        self.plain = Net(nn.BatchNorm1d, copy.deepcopy(scripted)).double()
        torch.manual_seed(1)
        self.network = Net(SyncBatchNorm, copy.deepcopy(scripted)).double().to(devices[0])
        self.network.tied.weight = self.network.layers[2].weight  # a move to a simulated device unties
        self.parallel, self.devices = DataParallel(self.network, devices), devices
        self.names = {
            "Strict": Strict,
            "Negated": Negated,
            "OrderedDict": OrderedDict,
            "partial": partial,
            "double": double,
            "increment": increment,
            "halve": halve,
            "nn": nn,
            "torch": torch,
            "linear": self.linear,
            "bare": self.bare,
            "use": self,
        }
        self.device = devices[0]

    # For lines that change #

    def linear(self, seed: int) -> nn.Module:
        """A new layer, the same for both networks."""
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, WIDTH).double().to(self.device)

    def bare(self, tensor: torch.Tensor, value: float) -> None:
        """Write past PyTorch, where that can be done."""
        if tensor.device.type == "cpu":
            tensor.detach().numpy().fill(value)
        else:
            tensor.data.fill_(value)

    def run(self, line: str) -> None:
        if line.startswith("use."):
            self.before_use()
            exec(line, {**self.names})
            return
        for network in (self.plain, self.network):
            self.device = next(network.parameters()).device
            try:
                with torch.no_grad():
                    exec(line, {**self.names, "n": network})
            except Exception as error:
                if network is self.network:
                    raise
                raise Invalid(line) from error

    # Uses #

    def before_use(self) -> None:
        """What a replica's rows have set is set back on the network, in ways that leave no trace."""
        for network in (self.plain, self.network):
            network.seen = False
            network.count.data.zero_()

    def same(self, one: torch.Tensor | None, other: torch.Tensor | None, what: str) -> None:
        assert (one is None) == (other is None), f"{what}: {one} and {other}"
        if one is not None and other is not None:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-9, msg=lambda m: f"{what}: {m}")

    def compare_gradients(self) -> None:
        pairs = zip(self.network.named_parameters(), self.plain.named_parameters(), strict=True)
        for (name, one), (_, other) in pairs:
            self.same(one.grad, other.grad, f"gradient of {name}")
        for network in (self.network, self.plain):
            network.zero_grad()

    def outputs(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch(rows, seed)
        outputs = self.parallel(x.to(self.devices[0])), self.plain(x)
        self.same(*outputs, "output")
        return outputs

    def train(self, rows: int, seed: int) -> None:
        outputs = self.outputs(rows, seed)
        if outputs[1].requires_grad:
            for output in outputs:
                output.square().mean().backward()
        self.compare_gradients()

    def inputs(self, rows: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two leaves, and two inputs that are computed from them; first those of the replicas."""
        leaves = [batch(rows, seed).to(d).requires_grad_() for d in (self.devices[0], torch.device("cpu"))]
        return leaves, [torch.tanh(2 * leaf) for leaf in leaves]

    def train_before(self, rows: int, seed: int) -> None:
        """Inputs that have a graph of their own."""
        leaves, inputs = self.inputs(rows, seed)
        outputs = self.parallel(inputs[0]), self.plain(inputs[1])
        self.same(*outputs, "output")
        for output in outputs:
            output.square().mean().backward()
        self.same(leaves[0].grad, leaves[1].grad, "gradient of the input")
        self.compare_gradients()

    def step_before(self, rows: int, seed: int) -> None:
        leaves, inputs = self.inputs(rows, seed)
        self.plain(inputs[1]).square().mean().backward()
        self.parallel.step(lambda output: output.square().mean(), inputs[0])
        self.same(leaves[0].grad, leaves[1].grad, "gradient of the input")
        self.compare_gradients()

    def gradients(self, rows: int, seed: int) -> None:
        """None for what was not used."""
        leaves, inputs = self.inputs(rows, seed)
        found = []
        for network, call, leaf, x in zip(
            (self.network, self.plain), (self.parallel, self.plain), leaves, inputs, strict=True
        ):
            wanted = [leaf, *(p for p in network.parameters() if p.requires_grad)]
            found.append(torch.autograd.grad(call(x).square().mean(), wanted, allow_unused=True))
        for one, other in zip(*found, strict=True):
            self.same(one, other, "gradient")

    def penalty(self, rows: int, seed: int) -> None:
        """A gradient of gradients."""
        leaves, inputs = self.inputs(rows, seed)
        for network in (self.plain, self.network):
            network.eval()
            network.recompute = False
        for call, leaf, x in zip((self.parallel, self.plain), leaves, inputs, strict=True):
            (gradient,) = torch.autograd.grad(call(x).sum(), leaf, create_graph=True)
            if gradient.requires_grad:
                gradient.square().sum().backward()
        self.same(leaves[0].grad, leaves[1].grad, "gradient of the input")
        pairs = zip(self.network.named_parameters(), self.plain.named_parameters(), strict=True)
        for (name, one), (_, other) in pairs:  # zero and None are alike in a pass of second order
            if one.grad is not None and other.grad is not None:
                self.same(one.grad, other.grad, f"second gradient of {name}")
        for network in (self.plain, self.network):
            network.zero_grad()

    def fail(self, rows: int, seed: int) -> None:
        """A forward that raises leaves nothing behind."""
        strict = self.network.strict
        self.network.strict = 1
        try:
            self.parallel(batch(rows, seed).to(self.devices[0]))
        except AttributeError:
            self.network.strict = strict
        else:
            raise AssertionError("forward did not raise")
        # statistics of a batch that failed later are the network's own
        for one, other in zip(self.network.buffers(), self.plain.buffers(), strict=True):
            one.copy_(other.to(one.device)) if one.dtype.is_floating_point else one.fill_(int(other))

    def write_through(self, rows: int, seed: int) -> None:
        """What is set on the wrapper is set on the module."""
        self.parallel.scale = self.plain.scale = 0.5 + seed / 1000
        self.train(rows, seed)

    def train_around_evaluation(self, rows: int, seed: int) -> None:
        training = [self.plain.training, self.network.training]
        outputs = self.outputs(rows, seed)
        self.before_use()
        for network in (self.plain, self.network):
            network.eval()
        self.evaluate(rows + 1, seed + 1)
        for network, mode in zip((self.plain, self.network), training, strict=True):
            network.train(mode)
        if outputs[1].requires_grad:
            for output in outputs:
                output.square().mean().backward()
        self.compare_gradients()

    def step(self, rows: int, seed: int) -> None:
        x, y = batch(rows, seed), batch(rows, seed + 1)
        loss = F.mse_loss(self.plain(x), y)
        if loss.requires_grad:
            loss.backward()
            got = self.parallel.step(F.mse_loss, x.to(self.devices[0]), y.to(self.devices[0]))
            self.same(got, loss.detach(), "loss")
        else:
            self.parallel(x.to(self.devices[0]))
        self.compare_gradients()

    def evaluate(self, rows: int, seed: int) -> None:
        with torch.no_grad():
            self.outputs(rows, seed)

    def infer(self, rows: int, seed: int) -> None:
        with torch.inference_mode():
            self.outputs(rows, seed)

    def by_hand(self, rows: int, seed: int) -> None:
        """The functional call, whose replicas the caller runs; without statistics of the batch."""
        modes = [(m, m.training) for network in (self.plain, self.network) for m in network.modules()]
        for network in (self.plain, self.network):
            network.eval()
        x = batch(rows, seed)
        with torch.no_grad():
            replicas = replicate(self.network, self.devices)
            shares = x.tensor_split(len(replicas))
            outputs = [r(s.to(d)).cpu() for r, s, d in zip(replicas, shares, self.devices, strict=True) if len(s)]
            self.same(torch.cat(outputs), self.plain(x), "output of replicate()")
        for module, mode in modes:
            module.training = mode

    def drop(self, rows: int, seed: int) -> None:
        """Recomputation draws the same numbers again."""
        x = torch.ones(rows, 64, dtype=torch.float64, device=self.devices[0], requires_grad=True)
        output = DataParallel(Dropping(), self.devices)(x)
        output.sum().backward()
        assert torch.equal(output != 0, x.grad != 0), "another mask in backward"


# ---------------------------------------------------------------------------------- operations

Operation = Callable[[random.Random], str]


def lines(*texts: str) -> list[Operation]:
    """One operation for each text, in which {i} is a layer, {j} an element, {v} a number, {s} a seed."""

    def operation(text: str) -> Operation:
        return lambda r: text.format(
            i=r.randrange(LAYERS), k=r.randrange(LAYERS), j=r.randrange(WIDTH), v=round(r.uniform(0.5, 1.5), 3),
            s=r.randrange(1000), b=r.random() < 0.5,
        )  # fmt: skip

    return [operation(text) for text in texts]


def uses(*names: str) -> list[Operation]:
    def operation(name: str) -> Operation:
        return lambda r: f"use.{name}({r.randint(2, 9)}, {r.randrange(1000)})"

    return [operation(name) for name in names]


USES = [
    *uses("train", "train_around_evaluation", "train_before", "step", "step_before", "gradients", "penalty"),
    *uses("evaluate", "evaluate", "infer", "infer", "by_hand", "by_hand", "drop", "fail", "write_through"),
]

CHANGES = {
    "values of parameters": lines(
        "n.layers[{i}].weight.mul_({v})",
        "n.layers[{i}].weight.data.mul_({v})",
        "n.layers[{i}].weight.data[{j}, 1] += 0.1",
        "n.layers[{i}].weight.data.copy_(n.layers[{i}].weight.data.flip(0))",
        "bare(n.first.weight[{j}], {v})",
        "[p.data.mul_(0.9) for p in n.parameters()]",
        "n.load_state_dict({{k: v * 0.99 for k, v in n.state_dict().items()}})",
    ),
    "data of parameters": lines(
        "n.layers[{i}].weight.data = n.layers[{i}].weight.data * {v}",
        "n.layers[{i}].weight.data = n.layers[{i}].weight.data.t()",
        "n.layers[{i}].weight.data = n.layers[{i}].weight.data.t().contiguous()",
        "n.first.weight.data, n.one['b'].weight.data = n.one['b'].weight.data, n.first.weight.data",
        "n.float().double()",
        "n.first.weight.data = torch.cat([n.first.weight.data, n.first.weight.data])[{j}:{j} + 4]",
    ),
    "parameters": lines(
        "n.layers[{i}].weight = nn.Parameter(n.layers[{i}].weight * {v})",
        "n.layers[{i}].bias = None",
        "n.layers[{i}].bias = nn.Parameter(torch.full_like(n.first.weight[0], {v}))",
        "n.tied.weight = n.layers[{i}].weight",
        "n.layers[{i}].requires_grad_({b})",
        "n.requires_grad_({b})",
        "n.requires_grad_(True)",
        "n.load_state_dict({{k: v * 0.99 for k, v in n.state_dict().items()}}, assign=True)",
        "n.register_parameter('unused', nn.Parameter(torch.full_like(n.gate, {v})))",
    ),
    "buffers": lines(
        "n.shift.add_({v})",
        "n.shift.data.fill_({v})",
        "bare(n.shift, {v})",
        "n.shift = n.shift * {v}",
        "n.shift.data = n.shift.data * {v}",
        "n.norm.running_mean.data.add_(0.1)",
        "n.norm.running_var[{j}] = {v}",
        "n.offset = torch.full_like(n.shift, {v})",
        "n.offset = None",
        "n.register_buffer('more', torch.full_like(n.shift, {v}))",
        "n.shift.data = n.shift.data[[3, 2, 1, 0]]",
    ),
    "attributes": lines(
        "n.scale = {v}",
        "n.scale = True",
        "n.scale = 1.0",
        "n.scale = torch.tensor({v}, dtype=torch.float64)",
        "n.strict = Strict({v})",
        "n.strict = None",
        "n.__dict__ = {{**vars(n), 'scale': {v}}}",
        "n.scripted.k = {v}",
        "n.gated = {b}",
        "n.recompute = {b}",
        "n.method = n.layers[{i}].forward",
        "n.layers[{i}].__class__ = Negated",
        "n.layers[{i}].__class__ = nn.Linear; n.method = n.layers[{i}].forward",
        "n._buffers = dict(n._buffers)",
        "n.first._parameters = {{**n.first._parameters, 'weight': nn.Parameter(n.first.weight * {v})}}",
    ),
    "hooks": lines(
        "n.norm.register_forward_hook(double)",
        "n.layers[{i}].register_forward_hook(increment)",
        "n.layers[{i}].register_forward_pre_hook(halve)",
        "n.norm._forward_hooks.update({{{s}: increment}})",
        "n.norm._forward_hooks.move_to_end(next(iter(n.norm._forward_hooks)))",
        "n.norm._forward_hooks.clear()",
        "n.norm._forward_hooks = OrderedDict(list(n.norm._forward_hooks.items())[-2:])",
        "[m._forward_hooks.clear() for m in n.modules() if not isinstance(m, torch.jit.ScriptModule)]",
        "[m._forward_pre_hooks.clear() for m in n.modules() if not isinstance(m, torch.jit.ScriptModule)]",
    ),
    "containers": lines(
        "n.path.append(n.layers[{i}])",
        "n.path[:] = [n.layers[{i}]]",
        "n.path = [n.layers[{i}], n.layers[{k}]]",
        "n.path.reverse()",
        "n.innermost().append(n.layers[{i}])",
        "n.innermost().clear()",
        "n.table['{j}'] = n.layers[{i}]",
        "n.table.clear()",
        "n.table = {{'a': n.layers[{i}]}}",
        "n.partial = partial(n.layers[{i}])",
        "n.words.append(n.layers[{i}])",
        "n.words[0] = n.layers[{i}]",
        "n.words[1000] = n.layers[{i}]",
        "n.words[:] = list(range(2000))",
    ),
    "submodules": lines(
        "n.put({i}, linear({s}))",
        "n.other['b'] = n.one.pop('b')",
        "n.one['b'] = n.other.pop('b')",
        "n.one['c'] = n.other.pop('c')",
        "n.other['c'] = n.one.pop('c')",
        "n.extra = linear({s})",
        "n.extra = None",
        "n.one['b'] = linear({s})",
        "n.layers[0], n.layers[1] = n.layers[1], n.layers[0]",
        "n.add_module('unused_layer', linear({s}))",
    ),
    "modes": lines("n.eval()", "n.train()", "n.norm.eval()", "n.train({b})"),
}


def draw(seed: int, length: int, device: str = "") -> Program:
    """Lines that change the network and lines that use it, so many times."""
    chance = random.Random(seed)
    lines: list[str] = []
    for _ in range(length):
        changes = [chance.choice(list(CHANGES.values())) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        lines += [chance.choice(operations)(chance) for operations in changes]
        lines += [chance.choice(USES)(chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    return Program(Setting(device, 2 + seed % 3, seed % 5 != 4), tuple(lines))


@functools.cache
def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Factor())


def play(program: Program) -> None:
    """Run a program; raises what replicas alone do wrong."""
    setting: Setting = program.setting
    devices = simulator.devices(setting.devices) if setting.device else [torch.device("cpu")] * setting.devices
    guards = nullcontext() if setting.guards else mock.patch.object(tensor_state, "_TensorGuards", None)
    with guards:
        pair = Pair(devices, scripted())
        for line in program.lines:
            try:
                pair.run(line)
            except Invalid:
                continue
            except Exception as error:
                error.add_note(f"in {line}")
                raise
