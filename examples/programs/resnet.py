"""A small residual network on images that the program draws, which goes on where it was stopped.

    python examples/programs/resnet.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/programs/resnet.py  # each rank has a part of the images

docs/programs.md shows the lines that differ from a program for one process.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Block(nn.Module):
    """Two convolutions, and what goes past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (rows, inputs, height, width) to outputs, and sides divided by the stride."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.past(x))


def draw(count: int) -> TensorDataset:
    """Noise with a bright bar, which lies in one of eight places."""
    labels = torch.arange(count) % 8
    images = torch.randn(count, 3, 16, 16)
    for image, label in zip(images, labels.tolist(), strict=True):
        bar = image if label < 4 else image.transpose(1, 2)
        bar[:, 4 * (label % 4) : 4 * (label % 4) + 2] += 1.5
    return TensorDataset(images, labels)


def train(run: lockstep.Session, path: str, epochs: int = 4) -> None:
    torch.manual_seed(0)
    data, device = draw(640), run.device
    model = nn.Sequential(Block(3, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 8))
    model = lockstep.local.SyncBatchNorm.convert_sync_batchnorm(model)
    model = lockstep.replicate(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    found = run.resume(path, model=model, optimizer=optimizer, schedule=schedule)
    begin = found.values["epoch"] if found else 0
    loader = DataLoader(run.shard(data), batch_size=32, shuffle=True)
    for epoch in range(begin, epochs):
        torch.manual_seed(epoch)
        right = 0.0
        for images, labels in run.batches(loader):
            optimizer.zero_grad()
            logits = model(images.to(device))
            cross_entropy(logits, labels.to(device)).backward()
            optimizer.step()
            right += (logits.argmax(1).cpu() == labels).float().mean().item()
        schedule.step()
        run.save(path, model=model, optimizer=optimizer, schedule=schedule, epoch=epoch + 1)
        accuracy = lockstep.mean(right / len(loader))
        if run.is_main:
            print(f"epoch {epoch}: accuracy {accuracy:.4%}")


if __name__ == "__main__":
    with lockstep.session() as run:
        train(run, sys.argv[1] if len(sys.argv) > 1 else "runs/resnet")
