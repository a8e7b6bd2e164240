"""Lightning: a mixin that mixes training batches after they reach the device.

>>> class Classifier(MixupMixin, LightningModule):
...     mixer = icm.Mixer("ic-mixup", num_classes=10)
...     criterion = icm.InfiniteClassLoss()
...
...     def training_step(self, batch, batch_idx):
...         inputs, targets = batch                      # mixed
...         return self.criterion(self(inputs), targets)

Works with `lightning` and with `pytorch_lightning`; neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from icmixup import Mixer, cached_backward
from icmixup.integrations._versions import require

require("lightning", "pytorch-lightning")

__all__ = ["MixupMixin"]


class MixupMixin:
    """Goes in front of LightningModule. Set `mixer`; `training_step` then receives (inputs, targets).

    Batches of validation, test and prediction are not changed. A batch is a pair of inputs and labels; override
    `mix_batch` for other structures.
    """

    mixer: Mixer

    def mix_batch(self, batch: Any) -> Any:
        """(inputs, labels) to (mixed inputs, (B, C) targets)."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"expected a batch of (inputs, labels), got {type(batch).__name__}; override mix_batch "
                "to mix other structures"
            )
        return self.mixer(*batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = super().on_after_batch_transfer(batch, dataloader_idx)  # type: ignore[misc]
        return self.mix_batch(batch) if self.trainer.training else batch  # type: ignore[attr-defined]
