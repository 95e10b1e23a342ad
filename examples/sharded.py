"""Share the optimizer's state out over the processes: AdamW for most weights, Muon for matrices in the middle.

    python examples/sharded.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/sharded.py  # each process has half of the state

Each process keeps its part of the state, steps on its part of the weights, and gets the others' new ones. Nothing else
in the loop changes. The state of AdamW is cut at any element; Muon needs whole matrices, so each goes to one process.
A checkpoint made by any number of processes goes on with any other: here with a plain AdamW and a plain Muon.
"""

import argparse
import io

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from handwriting import load_handwriting
from lockstep.sharding import full_state_dict, shard_optimizer


def make_network(width: int) -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def optimizers_of(network: nn.Sequential) -> list[torch.optim.Optimizer]:
    """Muon for the matrices in the middle, AdamW for all else."""
    square = [p for p in network.parameters() if p.dim() == 2 and p.shape[0] == p.shape[1]]
    others = [p for p in network.parameters() if all(p is not each for each in square)]
    return [torch.optim.AdamW(others, lr=2e-3), torch.optim.Muon(square, lr=2e-2)]


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that this process keeps."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(getattr(tensor, "local", tensor).nbytes for tensor in tensors)


def train(run: lockstep.Session, model: nn.Module, optimizers: list, data: TensorDataset, epochs: int) -> None:
    loader = DataLoader(run.shard(data), batch_size=32, shuffle=True)
    for _ in range(epochs):
        for images, labels in run.batches(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(model(images.to(run.device)), labels.to(run.device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients are whole on every rank
            for optimizer in optimizers:
                optimizer.step()


@torch.no_grad()
def accuracy(run: lockstep.Session, model: nn.Module, validation: TensorDataset) -> float:
    """Of all ranks' images."""
    right = count = 0
    for images, labels in DataLoader(run.shard(validation), batch_size=64):
        right += (model(images.to(run.device)).argmax(1).cpu() == labels).sum().item()
        count += len(labels)
    return lockstep.mean(right / count, weight=count)


def main(run: lockstep.Session, epochs: int, width: int) -> None:
    training, validation = load_handwriting()
    network = make_network(width)
    model = lockstep.replicate(network.to(run.device))
    optimizers = [shard_optimizer(each) for each in optimizers_of(model)]
    train(run, model, optimizers, training, epochs)
    kept = sum(map(bytes_of_state, optimizers))
    reached = accuracy(run, model, validation)

    checkpoint = io.BytesIO()  # as well a file
    states = [full_state_dict(each) for each in optimizers]  # on every rank; the first one has the state
    whole = sum(t.nbytes for state in states if state for s in state["state"].values() for t in s.values())
    if run.is_main:
        torch.save({"model": model.state_dict(), "optimizers": states}, checkpoint)
        print(f"state on this rank {kept / 2**20:.2f} MiB of {whole / 2**20:.2f} MiB  accuracy {reached:.1%}")

        found = torch.load(io.BytesIO(checkpoint.getvalue()), weights_only=True)
        plain = make_network(width).to(run.device)
        plain.load_state_dict(found["model"])
        for optimizer, state in zip(optimizers_of(plain), found["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        print("a plain AdamW and a plain Muon have loaded it")
    lockstep.check_in_sync(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with an optimizer whose state is shared out.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", help="such as cpu; default: an accelerator for each process, or the CPU")
    options = parser.parse_args()
    with lockstep.session(device=options.device) as run:
        main(run, options.epochs, options.width)
