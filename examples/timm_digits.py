"""timm: train a timm network on scikit-learn's digits. The mixing and the loss are the two marked lines."""

from __future__ import annotations

import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from icmixup.integrations.timm import Mixup


def load_sets() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = torch.nn.functional.interpolate(images, size=16)
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


@torch.no_grad()
def accuracy(model: torch.nn.Module, test_set: TensorDataset) -> float:
    model.eval()
    images, labels = test_set.tensors
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    train_set, test_set = load_sets()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    mixup_fn = Mixup(mixup_alpha=0.2, num_classes=10)  # instead of timm.data.Mixup
    criterion = mixup_fn.criterion()  # instead of SoftTargetCrossEntropy

    for epoch in range(3):
        model.train()
        total = 0.0
        for images, labels in loader:
            inputs, targets = mixup_fn(images, labels)
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(loader):.3f}")
    print(f"accuracy {accuracy(model, test_set):.3f}  chance 0.100")


if __name__ == "__main__":
    main()
