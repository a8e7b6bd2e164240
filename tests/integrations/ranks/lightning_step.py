"""One step of a LightningModule under torchrun; rank 0 writes the gradients to the file it is passed."""

from __future__ import annotations

import sys

import lightning as L
import torch
from frameworks import UNMIXED, C, digits, gradients, small_network
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import icmixup as icm
from icmixup.integrations.lightning import MixupMixin


class Step(MixupMixin, L.LightningModule):
    def __init__(self, mode: str, path: str) -> None:
        super().__init__()
        self.automatic_optimization = mode == "automatic"
        self.mode, self.path = mode, path
        self.mixer = icm.Mixer(UNMIXED, num_classes=C)
        self.criterion = self.mixer.criterion()
        self.model = small_network()
        if mode == "cached":
            self.unused, self.of_rank_1 = (torch.nn.Parameter(torch.ones(C)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        scores = self.model(images)
        return scores + 0 * self.of_rank_1 if self.mode == "cached" and self.global_rank == 1 else scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        assert targets.shape == (len(inputs), C)
        if self.mode == "automatic":
            return self.criterion(self(inputs), targets)
        self.optimizers().zero_grad()
        if self.mode == "cached":
            loss = self.cached_backward(inputs, lambda scores: self.criterion(scores, targets), part_size=3)
        else:
            loss = self.criterion(self(inputs), targets)
            self.manual_backward(loss)
        self.optimizers().step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == 0:
            torch.save(gradients(self.model), self.path)
            if self.mode == "cached":
                print("without gradient:", *(n for n, p in self.named_parameters() if p.grad is None))

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:  # one rank validates, the other does not wait for it
            images, labels = digits(8)
            print("validation loss", self.criterion(self(images), labels).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(mode: str, path: str) -> None:
    # The sampler of DDP gives even samples to rank 0 and odd ones to rank 1.
    loader = DataLoader(TensorDataset(*digits(16)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Step(mode, path), loader)
    torch.distributed.destroy_process_group()  # a rank that ended with its threads running was aborted once


if __name__ == "__main__":
    main(*sys.argv[1:])
