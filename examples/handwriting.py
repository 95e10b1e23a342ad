"""The data of most examples: 1,797 handwritten digits that come with scikit-learn, so that nothing is downloaded."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

TRAINING_IMAGES, VALIDATION_IMAGES = 1437, 360


def load_handwriting() -> tuple[TensorDataset, TensorDataset]:
    """Images of (1, 8, 8) from 0 to 1 with their labels: to train on, and to validate on; always the same ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:VALIDATION_IMAGES], order[VALIDATION_IMAGES:]
    return TensorDataset(images[rest], labels[rest]), TensorDataset(images[held_out], labels[held_out])
