"""Networks of every structure: by each use they train as they do alone, and replicas have what the network has."""

from __future__ import annotations

import pytest
import torch

from lockstep.local import ReplicaSet
from programs.networks import STRUCTURES
from programs.one_device import USES, on, trains_as_alone

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")  # scripted modules, and norms of other days


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", STRUCTURES)
def test_it_trains_as_alone(devices, first, name, use):
    network = on(first, STRUCTURES[name])
    trains_as_alone(network, USES[use](network, devices(3)), devices(3))


def contents(network):
    """What is in each slot of each module, and what of it is the same under another name."""
    seen = []

    def shown(value):
        if value is None:
            return None
        number = next((i for i, each in enumerate(seen) if each is value), len(seen))
        seen.append(value)
        if not isinstance(value, torch.Tensor):
            return type(value), number, value.training
        return type(value), number, value.requires_grad, value.dtype, value.shape, value.stride()

    return [
        (name, kind, key, shown(value))
        for name, module in network.named_modules(remove_duplicate=False)
        for kind in ("_modules", "_parameters", "_buffers")
        for key, value in getattr(module, kind).items()
    ]


@pytest.mark.parametrize("name", STRUCTURES)
def test_replicas_have_what_the_network_has(devices, first, name):
    network = on(first, STRUCTURES[name])
    replicas = ReplicaSet(network, devices(2))
    found = replicas.refresh()
    modules = [list(replica.modules()) for replica in found]
    parameters = [list(replica.parameters()) for replica in found]
    for step in range(3):
        for device, replica in zip(devices(2), found, strict=True):
            assert contents(replica) == contents(network)
            assert device != first or repr(replica) == repr(network)  # which may show devices
            state = replica.state_dict()
            for key, value in network.state_dict().items():
                assert state[key].device == device
                assert torch.equal(state[key].cpu(), value.cpu())
            assert state.keys() == network.state_dict().keys()
            assert not {id(m) for m in replica.modules()} & {id(m) for m in network.modules()}
        network.train(step == 1)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.5)
        assert replicas.refresh() == found
        for replica, own, tensors in zip(found, modules, parameters, strict=True):
            assert all(a is b for a, b in zip(replica.modules(), own, strict=True))
            assert all(a is b for a, b in zip(replica.parameters(), tensors, strict=True))
    assert replicas.builds == 1
