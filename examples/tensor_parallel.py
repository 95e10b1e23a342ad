"""Train a network whose layers are split between processes, in several replicas: tensor parallel, below replication.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py           # two replicas of two processes each
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --split 1 # two replicas of one process each

A mesh of devices has two dimensions. Along `split`, PyTorch's `parallelize_module` gives each process a part of every
matrix, as `DTensor`s. Along `replicas`, `lockstep.replicate` makes gradients the mean over what are copies of each
other: each process communicates its own parts with the same parts of the other replicas.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import lockstep
from handwriting import load_handwriting


class Block(nn.Module):
    """Two layers, of which the first one's columns and the second one's rows are split: one sum for both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (rows, width) to the same."""
        return x + self.down(self.up(self.norm(x)).relu())


def make_model(mesh: DeviceMesh, width: int = 64, blocks: int = 2) -> nn.Module:
    """A replica of this process's part of the network."""
    torch.manual_seed(0)  # what is not split has to be the same on the processes that share a network
    model = nn.Sequential(nn.Flatten(), *(Block(width) for _ in range(blocks)), nn.Linear(width, 10))
    model.to(mesh.device_type)
    for block in model[1:-1]:
        parallelize_module(block, mesh["split"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return lockstep.replicate(model, device_mesh=mesh["replicas"])


def train(run: lockstep.Session, split: int, epochs: int) -> None:
    mesh = init_device_mesh(run.device.type, (run.world_size // split, split), mesh_dim_names=("replicas", "split"))
    replicas = mesh["replicas"].get_group()  # the processes that have the same part as this one
    model = make_model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)  # some parameters are DTensors
    if run.is_main:
        whole, part = tuple(model[1].up.weight.shape), tuple(model[1].up.weight.to_local().shape)
        print(f"{mesh.shape[0]} replicas of {split} ranks; a matrix of {whole} is {part} on each")

    training, validation = load_handwriting()
    order = torch.Generator().manual_seed(0)  # of each process: those that share a network go through the same batches
    loader = DataLoader(lockstep.loop.shard(training, replicas), batch_size=32, shuffle=True, generator=order)
    for epoch in range(1, epochs + 1):
        for images, labels in lockstep.batches(loader, model):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(run.device)), labels.to(run.device))
            loss.backward()
            optimizer.step()
        accuracy = evaluate(run, model, DataLoader(lockstep.loop.shard(validation, replicas), batch_size=64))
        if run.is_main:
            print(f"epoch {epoch}: accuracy {accuracy:.1%}")
    lockstep.check_in_sync(model)  # each part with its copies


@torch.no_grad()
def evaluate(run: lockstep.Session, model: nn.Module, loader: DataLoader) -> float:
    """The part of the images that the model gets right."""
    right = count = 0
    for images, labels in loader:
        right += (model(images.to(run.device)).argmax(1).cpu() == labels).sum().item()
        count += len(labels)
    return lockstep.mean(right / count, weight=count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train a network that is split between processes, in several replicas."
    )
    parser.add_argument("--split", type=int, default=2, help="processes that share one network")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", help="such as cpu; default: an accelerator for each process, or the CPU")
    options = parser.parse_args()
    with lockstep.session(device=options.device) as run:
        if run.world_size % options.split:
            parser.error(f"--split divides {run.world_size}, the number of processes")
        train(run, options.split, options.epochs)
