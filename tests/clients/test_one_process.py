"""Client libraries in one process: their modules in DataParallel on two CPU replicas, beside one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from client_programs import need, quiet
from lockstep import DataParallel
from lockstep.local import gather, scatter

CPUS = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    quiet()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trains_as_on_one_device(make: Any, inputs: Any) -> None:
    """Three steps of SGD: outputs, gradients and weights agree to rounding."""
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module)
    parallel = DataParallel(module, CPUS)
    for _ in range(3):
        args = inputs()
        for model, network in ((parallel, module), (twin, twin)):
            network.zero_grad()
            outputs = model(*args)
            sum(output.square().mean() for output in outputs).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.grad is None or parameter.sub_(1e-3 * parameter.grad)
        for one, other in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parallel(*args), twin(*args), rtol=1e-9, atol=1e-12)


def edges(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The edges between all atoms of each structure, and the number of the structure of each atom."""
    count, atoms, _ = positions.shape
    pairs = torch.cartesian_prod(torch.arange(atoms), torch.arange(atoms)).T
    pairs = pairs[:, pairs[0] != pairs[1]]
    index = torch.cat([pairs + atoms * structure for structure in range(count)], 1)
    return index, torch.arange(count).repeat_interleave(atoms)


def test_equivariant_layers_of_e3nn():
    """Its ``Irreps`` are tuples whose length cannot be asked for, and attributes of every layer."""
    need("e3nn")
    from e3nn import nn as enn
    from e3nn import o3

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.irreps, self.harmonics = o3.Irreps("4x0e+2x1o"), o3.Irreps.spherical_harmonics(2)
            self.gate = enn.Gate("6x0e", [torch.tanh], "4x0e", [torch.sigmoid], "2x1o+2x1o")
            self.product = o3.FullyConnectedTensorProduct(
                self.irreps, self.harmonics, self.gate.irreps_in, shared_weights=False
            )
            self.weights = enn.FullyConnectedNet([3, 8, self.product.weight_numel], nn.functional.silu)
            self.linear, self.out = o3.Linear(self.irreps, self.irreps), o3.Linear(self.gate.irreps_out, "1x0e")
            self.norm = o3.Norm(self.gate.irreps_out)

        def forward(self, x: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            harmonics = o3.spherical_harmonics(self.harmonics, vectors, True, normalization="component")
            x = self.gate(self.product(self.linear(x), harmonics, self.weights(vectors)).mean(1))
            return self.out(x), self.norm(x)

    trains_as_on_one_device(Convolution, lambda: (torch.randn(7, 5, 10), torch.randn(7, 5, 3)))


def test_nequip():
    need("nequip")
    from nequip.data import AtomicDataDict as Keys
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    set_global_state()

    class Structures(nn.Module):
        """Energies and forces of a batch of structures with the same number of atoms."""

        def __init__(self) -> None:
            super().__init__()
            self.model = NequIPGNNModel(
                seed=0,
                model_dtype="float64",
                r_max=3.0,
                type_names=["H", "O"],
                num_layers=2,
                l_max=1,
                num_features=4,
                radial_mlp_depth=1,
                radial_mlp_width=4,
                avg_num_neighbors=4.0,
            )

        def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            index, of_structure = edges(positions)
            data = {
                Keys.POSITIONS_KEY: positions.flatten(0, 1),
                Keys.EDGE_INDEX_KEY: index,
                Keys.ATOM_TYPE_KEY: torch.arange(len(of_structure)) % 2,
                Keys.BATCH_KEY: of_structure,
                Keys.NUM_NODES_KEY: torch.full((len(positions),), positions.shape[1]),
            }
            out = self.model(data)
            return out[Keys.TOTAL_ENERGY_KEY], out[Keys.FORCE_KEY].unflatten(0, positions.shape[:2])

    trains_as_on_one_device(Structures, lambda: (torch.randn(5, 4, 3),))


def containers() -> dict[str, Any]:
    """Containers of other libraries: how one is made of a tensor, and how its tensor is read."""

    def made(library: str, kind: str) -> Any:
        need(library)
        module = __import__(library, fromlist=[kind])
        return getattr(module, kind)

    return {
        "easydict": (lambda x: made("easydict", "EasyDict")(n={"x": x}, rows=[x]), lambda value: value.n.x),
        "addict": (lambda x: made("addict", "Dict")(n={"x": x}), lambda value: value.n.x),
        "munch": (lambda x: made("munch", "munchify")({"n": {"x": x}}), lambda value: value.n.x),
        "box": (lambda x: made("box", "Box")(n={"x": x}), lambda value: value.n.x),
        "frozendict": (lambda x: made("frozendict", "frozendict")(x=x), lambda value: value["x"]),
        "tensordict": (
            lambda x: made("tensordict", "TensorDict")({"x": x}, batch_size=[len(x)]),
            lambda value: value[: value.batch_size[0]]["x"],
        ),
        "transformers": (
            lambda x: made("transformers.modeling_outputs", "BaseModelOutput")(last_hidden_state=x, attentions=(x, x)),
            lambda value: value.attentions[1] + 0 * value.last_hidden_state,
        ),
    }


@pytest.mark.parametrize("library", containers())
def test_containers_of_libraries_are_split_and_gathered(library):
    make, read = containers()[library]
    x = torch.arange(12.0).reshape(6, 2)
    value = make(x)
    shares = scatter((value, x), CPUS)
    for share, rows in zip(shares, x.split(3), strict=True):
        assert type(share[0]) is type(value)
        assert torch.equal(read(share[0]), rows)
    assert torch.equal(read(gather([share[0] for share in shares], "cpu")), x)
    assert torch.equal(read(value), x)
