"""One step of a Trainer under torchrun; rank 0 writes the weights to the file it is passed."""

from __future__ import annotations

import sys

import torch
from test_transformers import make_trainer


def main(path: str, folder: str) -> None:
    trainer = make_trainer(folder, per_device_train_batch_size=8)
    trainer.train()
    if trainer.is_world_process_zero():
        # One rank evaluates a batch, the other does not wait for it.
        batch = trainer.data_collator([trainer.eval_dataset[n] for n in range(8)])
        loss, _ = trainer.compute_loss(trainer.model.eval(), batch, return_outputs=True)
        print("validation loss", loss.item())
        torch.save(trainer.model.state_dict(), path)
    torch.distributed.destroy_process_group()  # a rank that ended with its threads running was aborted once


if __name__ == "__main__":
    main(*sys.argv[1:])
