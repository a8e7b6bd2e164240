"""Lightning: the mixin mixes training batches; training_step and validation_step use one criterion."""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import icmixup as icm
from icmixup.integrations.lightning import MixupMixin


class Classifier(MixupMixin, L.LightningModule):
    def __init__(self, method: str = "ic-mixup") -> None:
        super().__init__()
        self.mixer = icm.Mixer(method, num_classes=10)
        self.criterion = self.mixer.criterion()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch  # mixed
        loss = self.criterion(self(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch  # not mixed
        scores = self(images)
        self.log("validation_loss", self.criterion(scores, labels))
        self.log("accuracy", (scores.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def load_loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_set, test_set = (
        TensorDataset(images[:1400], labels[:1400]),
        TensorDataset(images[1400:], labels[1400:]),
    )
    return DataLoader(train_set, batch_size=64, shuffle=True), DataLoader(test_set, batch_size=256)


def main() -> None:
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), *load_loaders())
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}  chance 0.100")


if __name__ == "__main__":
    main()
