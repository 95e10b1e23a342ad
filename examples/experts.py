"""Train a mixture of experts: in each step a process uses those experts that its own images choose.

    python examples/experts.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/experts.py  # each process has a part of the images

A router gives each image to one of eight small networks. So in one step an expert has a gradient on some processes and
none on others, and which ones those are changes from step to step. Nothing has to be said about it: a process that has
not used an expert counts as zero in the mean, and an expert that no process has used keeps `grad=None`.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader

import lockstep
from handwriting import load_handwriting

BALANCE = 0.2  # how much it counts that the router uses all experts alike


class Experts(nn.Module):
    """Small networks, and a router that chooses one of them for each row."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From (rows, width) to the same; how unevenly experts are used, 1 at best; how many rows each has had."""
        probabilities = self.router(x).softmax(dim=1)
        weight, choice = probabilities.max(dim=1)
        result = x
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):  # where no row has chosen it, the expert is not called: it is not in this rank's graph
                result = result.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        chosen = one_hot(choice, len(self.experts)).float()
        unevenness = len(self.experts) * (chosen.mean(0) * probabilities.mean(0)).sum()
        return result, unevenness, chosen.sum(0)


class Network(nn.Module):
    """Tells digits apart."""

    def __init__(self, width: int = 64, experts: int = 8) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.experts = Experts(width, experts)
        self.outputs = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From (rows, 1, 8, 8) to logits of (rows, 10), and what the experts tell."""
        features, unevenness, rows = self.experts(self.inputs(images))
        return self.outputs(features), unevenness, rows


def train(run: lockstep.Session, epochs: int) -> None:
    training, validation = load_handwriting()
    model = lockstep.replicate(Network().to(run.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(run.shard(training), batch_size=16, shuffle=True)
    for epoch in range(1, epochs + 1):
        unused = torch.zeros(2)  # experts that had no image: on this rank, on any rank
        for images, labels in run.batches(loader):
            optimizer.zero_grad()
            logits, unevenness, rows = model(images.to(run.device))
            loss = cross_entropy(logits, labels.to(run.device)) + BALANCE * unevenness
            loss.backward()
            optimizer.step()
            on_no_rank = sum(expert[0].weight.grad is None for expert in model.experts.experts)
            unused += torch.tensor([(rows == 0).sum().item(), on_no_rank])
        accuracy = evaluate(run, model, DataLoader(run.shard(validation), batch_size=64))
        here, everywhere = lockstep.mean(unused / len(loader)).tolist()
        if run.is_main:
            print(
                f"epoch {epoch}: accuracy {accuracy:.1%}; of {len(rows)} experts {here:.1f} had no image on a rank "
                f"in a step, and {everywhere:.1f} on any rank"
            )
    lockstep.check_in_sync(model)  # raises if any expert is not the same on all ranks


@torch.no_grad()
def evaluate(run: lockstep.Session, model: nn.Module, loader: DataLoader) -> float:
    """The part of all ranks' images that the model gets right."""
    model.eval()
    right = count = 0
    for images, labels in loader:
        logits, *_ = model(images.to(run.device))
        right += (logits.argmax(1).cpu() == labels).sum().item()
        count += len(labels)
    model.train()
    return lockstep.mean(right / count, weight=count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a mixture of experts on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", help="such as cpu; default: an accelerator for each process, or the CPU")
    options = parser.parse_args()
    with lockstep.session(device=options.device) as run:
        train(run, options.epochs)
