"""fastai: one callback mixes training batches and trains with the loss of the method."""

from __future__ import annotations

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from icmixup.integrations.fastai import MixBatches


def load_loaders() -> DataLoaders:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_set, test_set = (
        TensorDataset(images[:1400], labels[:1400]),
        TensorDataset(images[1400:], labels[1400:]),
    )
    loaders = DataLoaders(
        DataLoader(train_set, bs=64, shuffle=True), DataLoader(test_set, bs=256), device="cpu"
    )
    loaders.c = 10
    return loaders


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    # CrossEntropyLossFlat validates and predicts; the callback trains.
    learn = Learner(
        load_loaders(), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=MixBatches("ic-mixup")
    )
    learn.fit(5, 5e-3)
    _, score = learn.validate()
    print(f"accuracy {score:.3f}  chance 0.100")


if __name__ == "__main__":
    main()
