"""Lightning: a mixin that mixes training batches after they reach the device.

>>> class Classifier(MixupMixin, LightningModule):
...     def __init__(self):
...         super().__init__()
...         self.mixer = icm.Mixer("ic-mixup", num_classes=10)
...         self.criterion = self.mixer.criterion()
...
...     def training_step(self, batch, batch_idx):
...         inputs, targets = batch    # mixed
...         return self.criterion(self(inputs), targets)

Works with `lightning` and with `pytorch_lightning`; neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from icmixup import Mixer, cached_backward
from icmixup.integrations._mixins import check_in_front
from icmixup.integrations._versions import require

require("lightning", "pytorch-lightning")

__all__ = ["MixupMixin"]


class MixupMixin:
    """Goes in front of LightningModule. Set `mixer`; `training_step` then receives (inputs, targets).

    Batches of validation, test and prediction are not changed. A batch is a pair of inputs and labels;
    override `mix_batch` for other structures.
    """

    mixer: Mixer
    is_mixed: bool = False  # the batch whose training step comes next

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_in_front(cls, MixupMixin, "LightningModule")

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
        self.is_mixed = self.trainer.training  # type: ignore[attr-defined]
        return self.mix_batch(batch) if self.is_mixed else batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        # A hook of the user in place of the mixin's would train on integer labels, with cross-entropy.
        if not self.is_mixed:
            raise RuntimeError(
                "the training batch was not mixed: on_after_batch_transfer of MixupMixin did not run; if "
                f"{type(self).__name__} overrides it, call super() there, and if the LightningDataModule "
                f"defines it, move it to {type(self).__name__}"
            )
        self.is_mixed = False
        return super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def cached_backward(
        self, inputs: Tensor | tuple[Tensor, ...], loss: Callable[[Tensor], Tensor], part_size: int
    ) -> Tensor:
        """icmixup.cached_backward in training_step: the gradient of the whole batch, in the memory of a part.

        Takes the place of self.manual_backward, and like it needs `automatic_optimization = False`. Precision
        and DDP are those of the Trainer.

        >>> loss = self.cached_backward(inputs, lambda scores: self.criterion(scores, targets), part_size=32)

        Args:
            inputs: (B, ...), or a tuple of those, passed as self(*inputs).
            loss: from (B, C) scores to a scalar.
            part_size: number of inputs in one forward and backward pass, at most.

        Returns:
            Scalar, the loss, without a graph.
        """
        if self.automatic_optimization:  # type: ignore[attr-defined]
            raise ValueError(
                "cached_backward computes gradients itself; set self.automatic_optimization = False and call "
                "zero_grad() and step() of self.optimizers() around it"
            )
        strategy = self.trainer.strategy  # type: ignore[attr-defined]
        check_strategy(strategy)
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        value = cached_backward(self, inputs, loss, part_size, scaler=scaler)  # type: ignore[arg-type]
        if strategy.world_size > 1:
            average_gradients(self)  # type: ignore[arg-type]
        return value


def check_strategy(strategy: Any) -> None:
    if strategy.world_size > 1 and not isinstance(strategy.model, DistributedDataParallel):
        raise ValueError(
            f"cached_backward works on one device or with DDP, but the strategy is {type(strategy).__name__}"
        )


def average_gradients(module: torch.nn.Module) -> None:
    """What DDP does after a backward pass; here the passes run inside its forward, where it does nothing."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    used = [int(parameter.grad is not None) for parameter in parameters]
    ranks_using = torch.tensor(used, device=parameters[0].device)
    dist.all_reduce(ranks_using)
    for parameter, ranks in zip(parameters, ranks_using.tolist(), strict=True):
        if ranks == 0:  # it keeps no gradient, as in a single process: with one, weight decay would change it
            continue
        # A rank on which a parameter was not used must still take part.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
