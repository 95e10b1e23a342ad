"""Optimizers that people install: sharded by whole parameters they have the same bits, or an error by name."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import nn

import lockstep
from client_programs import need, quiet
from lockstep.sharding import full_state_dict, shard_optimizer
from sharded_runs import equal
from threaded import run_ranks


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 80), nn.LayerNorm(80), nn.Tanh()),
        *(nn.Linear(80, 80), nn.Linear(80, 5)),
    )


def trained(rank, make, sharded, steps=8):
    model = lockstep.replicate(rank.make(network), process_group=rank.group)
    optimizer = make(model)
    has_modes = callable(getattr(optimizer, "train", None))
    if has_modes:
        optimizer.train()
    if sharded:
        optimizer = shard_optimizer(optimizer, granularity="tensor")
    for step in range(steps):
        optimizer.zero_grad()
        generator = rank.generator(step)
        images, labels = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for switch in (optimizer.eval, optimizer.train) if has_modes else ():
        switch()
        weights += [parameter.detach().clone() for parameter in model.parameters()]
    if sharded:
        full_state_dict(optimizer)
    return weights


def outcome(make):
    """Return what comes of an optimizer: the same bits, an error by name, or other bits."""
    quiet()
    torch.manual_seed(0)
    try:
        sharded = run_ranks(2, trained, make, True)
    except lockstep.errors.LockstepError as error:
        return f"{type(error).__name__}: {error}"
    torch.manual_seed(0)
    return "the same bits" if equal(sharded, run_ranks(2, trained, make, False)) else "other bits"


def of_package(name):
    """Return the optimizers of a package, by name; none if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return {}
    quiet()
    package = importlib.import_module(name)
    if name == "pytorch_optimizer":
        return {each.__name__: each for each in package.optimizer.OPTIMIZERS.values()}
    return {
        key: value
        for key, value in vars(package).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value.__module__.startswith(name)
    }


# -------------------------------------------------------------------------------------- pytorch_optimizer

MUONS = {"AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"}
NEED_MORE = {
    *("AdaHessian", "SophiaH"),  # backward(create_graph=True)
    *("AliG", "BSAM", "LBFGS"),  # a closure
    *("AdaLOMO", "LOMO"),  # step in backward
    *("DeMo", "DistributedMuon"),  # another package; a default process group
}
SEVERAL_PARAMETERS = {"AdaGC", "Adai", "AdamS", "LoRARite"}
"""Which make a number of several parameters, so that the word of the program would be wrong."""
REFUSED = {
    **dict.fromkeys(("Alice", "DASH", "Gravity", "Kron"), "draws random numbers"),
    **dict.fromkeys(("AdaShift", "Conda", "ScalableShampoo"), "cannot be saved whole"),
    **dict.fromkeys(("ASGD", "AvaGrad", "Prodigy"), "cannot be sharded"),
    **dict.fromkeys((f"DAdapt{each}" for each in ("AdaGrad", "Adam", "Adan", "Lion", "SGD")), "cannot be sharded"),
    "Magma": "wraps another optimizer",
}


def make_of(name, kind, model):
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.dim() == 2]
    if name in MUONS:
        others = [each for each in parameters if each.dim() != 2]
        return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=0.01)
    more = {"Adai": {"eps": 1e-12}, "Ranger21": {"num_iterations": 20}}.get(name, {})
    given = {"AdamMini": model, "SpectralSphere": matrices}.get(name, parameters)
    return kind(given, lr=0.01, **more)


PYTORCH_OPTIMIZERS = of_package("pytorch_optimizer")


@pytest.mark.skipif(not PYTORCH_OPTIMIZERS, reason="pytorch_optimizer is not installed; make test-clients has it")
@pytest.mark.parametrize("name", sorted(PYTORCH_OPTIMIZERS.keys() - NEED_MORE - SEVERAL_PARAMETERS))
def test_an_optimizer_of_pytorch_optimizer(name):
    found = outcome(lambda model: make_of(name, PYTORCH_OPTIMIZERS[name], model))
    assert REFUSED[name] in found if name in REFUSED else found == "the same bits"


@pytest.mark.skipif(not PYTORCH_OPTIMIZERS, reason="pytorch_optimizer is not installed; make test-clients has it")
@pytest.mark.parametrize("name", sorted(SEVERAL_PARAMETERS))
def test_a_number_of_several_parameters_is_another_one_where_they_are_shared_out(name):
    """docs/memory.md names them: with these, ``granularity="tensor"`` is a false word."""
    assert outcome(lambda model: make_of(name, PYTORCH_OPTIMIZERS[name], model)) == "other bits"


# ------------------------------------------------------------------------------------------------ timm

OF_TIMM = {
    **dict.fromkeys(("adabelief", "adafactor", "adafactorbv", "adamp", "adamuon", "adan", "adopt"), "the same bits"),
    **dict.fromkeys(("cadamw", "laprop", "lars", "lion", "madgrad", "mars", "muon", "nadamuon"), "the same bits"),
    **dict.fromkeys(("novograd", "rmsproptf", "sgdp", "lookahead_radam"), "the same bits"),
    "kron": "draws random numbers",
    "lamb": "other bits",  # it clips by the norm of all gradients, which docs/memory.md says: here, too, a false word
}


@pytest.mark.parametrize("name", OF_TIMM)
def test_an_optimizer_of_timm(name):
    need("timm")
    quiet()
    from timm.optim import create_optimizer_v2

    with torch.compiler.set_stance("force_eager"):  # as for those of torchao
        found = outcome(lambda model: create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.01, momentum=0.9))
    assert OF_TIMM[name] in found


# --------------------------------------------------------------------------------------------- others


OTHERS = {
    "adamp": {"AdamP": {"weight_decay": 0.01}, "SGDP": {"momentum": 0.9}},
    "geoopt.optim": {"RiemannianAdam": {}, "RiemannianSGD": {"momentum": 0.9}},
    "lion_pytorch": {"Lion": {}},
    "schedulefree": {"AdamWScheduleFree": {"warmup_steps": 3}, "RAdamScheduleFree": {}, "SGDScheduleFree": {}},
}


@pytest.mark.parametrize(
    ("package", "name", "options"), [(package, *each) for package, found in OTHERS.items() for each in found.items()]
)
def test_an_optimizer_of_another_package(package, name, options):
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed; make test-clients has it")
    quiet()
    kind = getattr(importlib.import_module(package), name)
    assert outcome(lambda model: kind(list(model.parameters()), lr=0.01, **options)) == "the same bits"


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_an_optimizer_of_torchao(name):
    """Not compiled, as its step would be: PyTorch tells all threads that one compiles."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; make test-clients has it")
    quiet()
    kind = getattr(importlib.import_module("torchao.optim"), name)
    with torch.compiler.set_stance("force_eager"):
        assert outcome(lambda model: kind(list(model.parameters()), lr=0.01)) == "the same bits"


def test_adafactor_of_transformers():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; make test-clients has it")
    quiet()
    from transformers import Adafactor

    assert outcome(lambda model: Adafactor(list(model.parameters()))) == "the same bits"


def test_parameters_on_a_manifold_stay_on_it():
    if importlib.util.find_spec("geoopt") is None:
        pytest.skip("geoopt is not installed; make test-clients has it")
    quiet()
    import geoopt

    class OnSphere(nn.Module):
        def __init__(self):
            super().__init__()
            sphere = geoopt.Sphere()
            self.rows = geoopt.ManifoldParameter(sphere.random(6, 33), manifold=sphere)
            self.linear = nn.Linear(4, 33)

        def forward(self, x):
            return self.linear(x) @ self.rows.T

    def stepped(rank, sharded):
        model = lockstep.replicate(rank.make(OnSphere), process_group=rank.group)
        optimizer = geoopt.optim.RiemannianAdam(model.parameters(), lr=0.1)
        optimizer = shard_optimizer(optimizer, granularity="tensor") if sharded else optimizer
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 4, generator=rank.generator(step))).square().mean().backward()
            optimizer.step()
        assert torch.allclose(model.rows.norm(dim=-1), torch.ones(6))
        return [parameter.detach().as_subclass(torch.Tensor).clone() for parameter in model.parameters()]

    assert equal(run_ranks(2, stepped, False), run_ranks(2, stepped, True))
