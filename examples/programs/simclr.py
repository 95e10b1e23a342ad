"""SimCLR: a network learns from pairs of views of the same image, among the views of all ranks.

    python examples/programs/simclr.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/programs/simclr.py  # each rank has a part of the images

docs/programs.md shows the lines that differ from a program for one process.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def draw(count: int) -> TensorDataset:
    """Images of ten kinds, with noise, and their kinds, which only the test at the end reads."""
    kinds = torch.arange(count) % 10
    return TensorDataset(torch.randn(10, 1, 8, 8)[kinds] + 0.7 * torch.randn(count, 1, 8, 8), kinds)


def view(images: Tensor) -> Tensor:
    """Return the images with other noise, and with parts of them left out."""
    return (images + 0.3 * torch.randn_like(images)) * (torch.rand_like(images) > 0.2)


def contrast(first: Tensor, second: Tensor, temperature: float = 0.2) -> Tensor:
    """Two views of the same rows; each is to be found among all other views."""
    views = normalize(torch.cat([first, second]))
    logits = (views @ views.T / temperature).fill_diagonal_(float("-inf"))
    return cross_entropy(logits, torch.arange(len(views), device=views.device).roll(len(first)))


def train(run: lockstep.Session, epochs: int = 6) -> None:
    torch.manual_seed(0)
    data, device = draw(640), run.device
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    encoder = lockstep.local.SyncBatchNorm.convert_sync_batchnorm(encoder)
    encoder = lockstep.replicate(encoder.to(device))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    loader = DataLoader(run.shard(data), batch_size=64, shuffle=True)
    torch.manual_seed(1 + run.rank)
    for epoch in range(epochs):
        for images, _ in run.batches(loader):
            first, second = encoder(view(images.to(device))), encoder(view(images.to(device)))
            (first, second), _ = lockstep.loop.gather_rows((first, second), encoder)
            optimizer.zero_grad()
            loss = contrast(first, second)
            loss.backward()
            optimizer.step()
        if run.is_main:
            print(f"epoch {epoch}: loss {loss:.5f}")
    images, kinds = data.tensors
    with torch.no_grad():
        features = normalize(encoder.eval()(images.to(device)))
    nearest = (features @ features.T).fill_diagonal_(-1).argmax(1).cpu()
    if run.is_main:
        print(f"the nearest image is of the same kind: {(kinds[nearest] == kinds).float().mean():.2%}")


if __name__ == "__main__":
    with lockstep.session() as run:
        train(run)
