"""Fine-tune a network with small adapters beside frozen weights, and unfreeze a part of it later.

    python examples/lora.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/lora.py  # each process has a part of the images

A network that has learnt the digits 0 to 4 is to learn the others, too. First only the adapters are trained (LoRA: to a
frozen matrix, a product of two thin ones is added), then the last layer as well. Freezing and unfreezing are plain
`requires_grad_()`: what is trained is looked at in each backward, so there is nothing to wrap anew and no flag to set.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import lockstep
from handwriting import load_handwriting


class Adapted(nn.Module):
    """A frozen linear layer, and beside it two thin ones that are trained; together they begin as what it was."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """From (rows, in_features) to (rows, out_features)."""
        return self.layer(x) + self.up(self.down(x))


def make_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def with_adapters(network: nn.Sequential) -> nn.Sequential:
    """The same network, frozen, with adapters beside its linear layers."""
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in network))


def only(data: TensorDataset, *digits: int) -> Subset:
    """The images of these digits."""
    labels = data.tensors[1]
    return Subset(data, torch.isin(labels, torch.tensor(digits)).nonzero().flatten().tolist())


def train(run: lockstep.Session, model: nn.Module, optimizer: torch.optim.Optimizer, data: Subset, epochs: int) -> None:
    loader = DataLoader(run.shard(data), batch_size=32, shuffle=True)
    for _ in range(epochs):
        for images, labels in run.batches(loader):
            optimizer.zero_grad()
            cross_entropy(model(images.to(run.device)), labels.to(run.device)).backward()
            optimizer.step()


@torch.no_grad()
def tell(run: lockstep.Session, model: nn.Module, validation: TensorDataset, what: str) -> None:
    """One line: how much is trained, and how well all ranks' images are told apart."""
    right = count = 0
    for images, labels in DataLoader(run.shard(validation), batch_size=64):
        right += (model(images.to(run.device)).argmax(1).cpu() == labels).sum().item()
        count += len(labels)
    accuracy = lockstep.mean(right / count, weight=count)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    if run.is_main:
        print(f"{what:<24}  {trained:6,} of {total:,} weights trained  accuracy on all digits {accuracy:.1%}")


def main(run: lockstep.Session, epochs: int) -> None:
    training, validation = load_handwriting()

    network = lockstep.replicate(make_network().to(run.device))
    train(run, network, torch.optim.Adam(network.parameters()), only(training, 0, 1, 2, 3, 4), epochs)
    tell(run, network, validation, "digits 0 to 4")
    weights = network.state_dict()  # keys of the plain network: as well from a file

    network = make_network()
    network.load_state_dict(weights)
    model = lockstep.replicate(with_adapters(network).to(run.device))
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    train(run, model, optimizer, training, epochs)
    tell(run, model, validation, "adapters")

    last = model[-1].layer.requires_grad_(True)  # the same on all ranks
    optimizer.add_param_group({"params": last.parameters(), "lr": 1e-3})
    train(run, model, optimizer, training, epochs)
    tell(run, model, validation, "and the last layer")
    lockstep.check_in_sync(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a network for handwritten digits by adapters.")
    parser.add_argument("--epochs", type=int, default=5, help="of each of the three parts")
    parser.add_argument("--device", help="such as cpu; default: an accelerator for each process, or the CPU")
    options = parser.parse_args()
    with lockstep.session(device=options.device) as run:
        main(run, options.epochs)
