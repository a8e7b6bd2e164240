"""torchvision: mix in the DataLoader's collate function, after v2 transforms of each image."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import Conv2dNormActivation
from torchvision.transforms import v2

from icmixup.integrations.torchvision import Collate, MixBatch


class Digits(Dataset):
    """scikit-learn's digits: the first 1,400 to train, the others to test."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        part = slice(None, 1400) if train else slice(1400, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(digits.target[part])
        self.transform = v2.RandomCrop(8, padding=1) if train else v2.Identity()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def main() -> None:
    torch.manual_seed(0)
    mix = MixBatch(method="ic-mixup", num_classes=10)
    train_loader = DataLoader(Digits(train=True), 64, shuffle=True, collate_fn=Collate(mix))
    test_loader = DataLoader(Digits(train=False), 256)
    criterion = mix.criterion()  # on integer labels it is cross-entropy
    blocks = [Conv2dNormActivation(1, 32), Conv2dNormActivation(32, 64, stride=2)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(5):
        model.train()
        for inputs, targets in train_loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = torch.cat([model(images) for images, _ in test_loader])
            labels = torch.cat([labels for _, labels in test_loader])
            validation = criterion(scores, labels)
        print(f"epoch {epoch}  loss {loss:.3f}  validation loss {validation:.3f}")
    print(f"accuracy {(scores.argmax(dim=1) == labels).float().mean():.3f}  chance 0.100")


if __name__ == "__main__":
    main()
