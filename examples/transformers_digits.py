"""Transformers: a Trainer that mixes training batches and evaluates a small ViT with integer labels."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from icmixup.integrations.transformers import MixupTrainerMixin


class MixupTrainer(MixupTrainerMixin, Trainer):
    pass


class Digits(Dataset):
    """scikit-learn's digits: the first 1,400 to train, the others to test."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        part = slice(None, 1400) if train else slice(1400, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=1) == prediction.label_ids))}


def main() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, num_labels=10,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir="runs/transformers", num_train_epochs=8, per_device_train_batch_size=32,
        gradient_accumulation_steps=2, learning_rate=3e-3, use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = MixupTrainer(
        ViTForImageClassification(config), args, train_dataset=Digits(train=True),
        eval_dataset=Digits(train=False), compute_metrics=accuracy, method="ic-mixup",
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    print(f"accuracy {metrics['eval_accuracy']:.3f}  chance 0.100")


if __name__ == "__main__":
    main()
