"""Small networks of every structure, by name: `STRUCTURES[name]()` makes two columns of rows of three."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from small_modules import fails_in_backward


def mlp(*sizes):
    """Linear layers with a tanh between any two."""
    sizes = sizes or (3, 4, 2)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Applying(nn.Module):
    """A linear layer, and what forward does as a function of the module and its inputs: `Applying(lambda m, x: x)`.

    Without a function it is the layer; without sizes there is none. What is given by name is a buffer if it is a
    tensor, and else an attribute.
    """

    def __init__(self, function=None, sizes=(3, 2), **given):
        super().__init__()
        self.function = function
        if sizes:
            self.linear = nn.Linear(*sizes)
        for name, value in given.items():
            buffer = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            self.register_buffer(name, value) if buffer else setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.linear(*args) if self.function is None else self.function(self, *args, **kwargs)


class Base:
    """Has slots."""

    __slots__ = ("layers", "rate")


class Slotted(Base, nn.Module):
    """Attributes in slots, which no `__dict__` shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.rate, self.layers = 2.0, [self.linear]

    def forward(self, x):
        return self.layers[0](x) * self.rate


class Recurrent(nn.Module):
    """A recurrent network without its last state, of which a row is a sequence of one."""

    def __init__(self, kind, flattens=False):
        super().__init__()
        self.rnn, self.flattens = kind(3, 2, 2, batch_first=True), flattens

    def forward(self, x):
        if self.flattens:
            self.rnn.flatten_parameters()
        return self.rnn(x[:, None])[0][:, 0]


class Deep(nn.Module):
    """Layers, of which forward takes those listed."""

    def __init__(self, count=5, width=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x, chosen):
        for index in chosen:
            x = torch.tanh(self.layers[index](x))
        return x


class Signed(nn.Module):
    """One weight, whose gradient is what is given. Forward writes into a buffer which turn it is, and on which rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("written", torch.zeros(2))

    def forward(self, turn, rank, value=1.0):
        self.written = torch.tensor([float(turn), float(rank)])
        return value * self.weight

    def signature(self):
        return tuple(map(int, self.written.tolist()))


class OnDemand(nn.Module):
    """The loss of layers, one of which is used on demand, with a batch norm; backward fails on demand."""

    def __init__(self, width=7):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, width)
        self.norm, self.extra = nn.BatchNorm1d(5), nn.Linear(3, 5)

    def forward(self, x, extra=False, fails=False):
        y = self.norm(self.first(x))
        y = y + self.extra(x) if extra else y
        return fails_in_backward(self.last(y), fails).square().mean(1).sum()


class Positive(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return F.softplus(x)


def tied():
    """Weights, a block and a buffer under two names each."""
    forward = lambda m, x: (m.head(m.again(m.block(m.embed(x)))) * m.mask * m.mask_too)[:, :2]  # noqa: E731
    embed, head, block, mask = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), mlp(3, 3, 3), torch.ones(3)
    head.weight = embed.weight
    return Applying(forward, (), embed=embed, head=head, block=block, again=block, mask=mask, mask_too=mask)


def lists():
    def forward(m, x):
        assert (len(m.weights), list(m.gains)) == (2, ["a", "b"])
        for weight in m.weights:
            x = torch.tanh(x @ weight)
        return x * m.gains["a"] + x * m.gains["b"]

    gains = nn.ParameterDict({"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    return Applying(forward, (), weights=nn.ParameterList([torch.randn(3, 3), torch.randn(3, 2)]), gains=gains)


def listing():
    """Keeps a layer in a plain list, too, and a method of another."""

    def forward(m, x):
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return m.last(x)

    one, two = nn.Linear(3, 3), nn.Linear(3, 2)
    return Applying(forward, one=one, two=two, layers=[one], last=two.forward)


def mixed():
    """Parameters of three dtypes, and buffers of an integer and of no elements."""
    forward = lambda m, x: (m.b(m.linear(x).double()).float() * m.z).abs() * m.steps  # noqa: E731
    b, z = nn.Linear(3, 2, dtype=torch.float64), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return Applying(forward, (3, 3), b=b, z=z, steps=torch.tensor(3), empty=torch.empty(0))


def asking():
    """Asks for its parameters in forward, as many models do for their dtype and device."""

    def forward(m, x):
        parameter = next(m.parameters())
        assert len(m.state_dict()) == 2
        assert parameter.device == x.device
        return m.linear(x.to(parameter.dtype)) * sum(p.square().sum() for p in m.parameters())

    return Applying(forward)


def masking():
    """Makes a mask at its first forward, and keeps it, as PyTorch's example of a language model."""

    def forward(m, x):
        if m.mask is None or len(m.mask) != 2:
            m.mask = torch.ones(2, device=x.device)
        return m.linear(x) * m.mask

    return Applying(forward, mask=None)


def running_backward():
    """In forward, for a term that is a sum over rows."""

    def forward(m, x):
        m.other(x.detach()).square().sum().backward()
        return m.linear(x)

    return Applying(forward, other=nn.Linear(3, 2))


def scaling(computed=False):
    """A buffer that needs a gradient, or is no leaf, beside one that does not."""
    scale = torch.full((2,), 2.0, requires_grad=not computed)
    network = Applying(lambda m, x: m.linear(x) * m.scale + m.shift, scale=scale, shift=torch.ones(2))
    if computed:
        network.scale = -network.linear.bias
    return network


def parametrized():
    network = mlp(3, 3, 2)
    parametrize.register_parametrization(network[0], "weight", Positive())
    return network


def frozen_in_part():
    """And a layer that nobody uses."""
    network = Applying(unused=nn.Linear(3, 2))
    network.linear.bias.requires_grad_(False)
    return network


def with_none():
    network = Applying(lambda m, x: m.norm(m.linear(x)), norm=nn.BatchNorm1d(2, track_running_stats=False))
    network.linear = nn.Linear(3, 2, bias=False)
    network.register_parameter("absent", None)
    network.register_buffer("nothing", None)
    network.register_module("nobody", None)
    return network


def normed(norm, training=True):
    return lambda: nn.Sequential(norm(nn.Linear(3, 3)), nn.Linear(3, 2)).train(training)


def channels_last():
    convolution = nn.Conv2d(3, 2, 2, padding=1).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (3, 1, 1)), convolution, nn.Flatten(), nn.Linear(8, 2))


def attention():
    layer = nn.TransformerEncoderLayer(3, 1, 4, 0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), layer, nn.Flatten(), nn.Linear(3, 2))


def scripted(*modules):
    return torch.jit.script(nn.Sequential(*modules))


STRUCTURES = {
    "mlp": mlp,
    "frozen in part": frozen_in_part,
    "nothing in some slots": with_none,
    "a buffer that needs a gradient": scaling,
    "a buffer computed from parameters": lambda: scaling(computed=True),
    "tied": tied,
    "asks for its parameters": asking,
    "ParameterList and ParameterDict": lists,
    "a list of layers, and a method": listing,
    "several dtypes": mixed,
    "slots of Python": Slotted,
    "keeps a mask": masking,
    "runs a backward of its own": running_backward,
    "a branch for few rows": lambda: Applying(lambda m, x: (m.linear if len(x) > 2 else m.few)(x), few=nn.Linear(3, 2)),
    "checkpointed": lambda: Applying(lambda m, x: checkpoint(m.top, m.linear(x), use_reentrant=False), top=mlp(2, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
    "channels last": channels_last,
    "attention": attention,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "LSTM that flattens": lambda: Recurrent(nn.LSTM, flattens=True),
    "parametrization": parametrized,
    "weight_norm": normed(parametrizations.weight_norm),
    "legacy weight_norm": normed(nn.utils.weight_norm),
    "spectral_norm": normed(parametrizations.spectral_norm, training=False),
    "legacy spectral_norm": normed(nn.utils.spectral_norm, training=False),
    "orthogonal": normed(parametrizations.orthogonal),
    "scripted": lambda: scripted(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
    "scripted inside": lambda: nn.Sequential(nn.Linear(3, 3), scripted(nn.Linear(3, 2), nn.Tanh())),
}
