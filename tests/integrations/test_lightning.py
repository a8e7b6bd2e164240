"""With the real Lightning: batches are mixed in training alone, and gradients are those of one batch."""

from __future__ import annotations

import pytest
import torch
from frameworks import (
    UNMIXED,
    C,
    digits,
    gradients,
    mean_gradients,
    one_batch_gradients,
    run_ranks,
    small_network,
)
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import icmixup as icm

L = pytest.importorskip("lightning")
from icmixup.integrations.lightning import MixupMixin  # noqa: E402


class Classifier(MixupMixin, L.LightningModule):
    """Automatic optimisation, or manual with a part_size."""

    def __init__(self, method: icm.Method | str = UNMIXED, part_size: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization, self.part_size = part_size is None, part_size
        self.mixer = icm.Mixer(method, num_classes=C)
        self.criterion = self.mixer.criterion()
        self.model = small_network()
        self.losses: list[float] = []
        self.seen: dict[str, tuple[int, ...]] = {}

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.seen["train"] = tuple(targets.shape)
        if self.part_size is None:
            loss = self.criterion(self(inputs), targets)
        else:
            self.optimizers().zero_grad()
            loss = self.cached_backward(inputs, lambda s: self.criterion(s, targets), self.part_size)
            self.optimizers().step()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.seen["validation"] = tuple(labels.shape)
        scores = self(images)
        torch.testing.assert_close(self.criterion(scores, labels), F.cross_entropy(scores, labels))
        self.log("accuracy", (scores.argmax(dim=1) == labels).float().mean())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = gradients(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def trainer(**settings: object) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **settings)


@pytest.mark.parametrize("part_size", [None, 16])
def test_loss_falls_and_accuracy_is_above_chance(part_size):
    torch.manual_seed(0)
    images, labels = digits(600)
    train_set, test_set = TensorDataset(images[:500], labels[:500]), TensorDataset(images[500:], labels[500:])
    model, fit = Classifier("ic-mixup", part_size), trainer(max_epochs=6)
    fit.fit(model, DataLoader(train_set, 50, shuffle=True), DataLoader(test_set, 100))
    assert sum(model.losses[-10:]) < 0.8 * sum(model.losses[:10])
    assert fit.callback_metrics["accuracy"] > 0.6
    assert model.seen == {"train": (50, C), "validation": (100,)}


def test_accumulation_is_the_mean_of_its_batches_and_differs_from_one_batch():
    images, labels = digits(16)
    model = Classifier()
    trainer(max_epochs=1, accumulate_grad_batches=2).fit(model, DataLoader(TensorDataset(images, labels), 8))
    torch.testing.assert_close(model.gradients, mean_gradients(images, labels, parts=2))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.gradients, one_batch_gradients(images, labels))


def test_cached_backward_is_one_batch_in_parts():
    images, labels = digits(16)
    model = Classifier(part_size=5)
    trainer(max_epochs=1).fit(model, DataLoader(TensorDataset(images, labels), 16))
    torch.testing.assert_close(model.gradients, one_batch_gradients(images, labels))
    expected = icm.training_loss(small_network(), images, labels, UNMIXED)
    assert model.losses == [pytest.approx(expected.item())]


def test_cached_backward_runs_in_the_precision_of_the_trainer():
    """Close to the float32 gradient, and not equal to it: the network runs in bfloat16."""
    images, labels = digits(16)
    model = Classifier(part_size=5)
    trainer(max_epochs=1, precision="bf16-mixed").fit(model, DataLoader(TensorDataset(images, labels), 16))
    expected = one_batch_gradients(images, labels)
    torch.testing.assert_close(model.gradients, expected, rtol=0.1, atol=0.02)
    assert not all(torch.equal(a, b) for a, b in zip(model.gradients, expected, strict=True))


def brighten(self: object, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
    """Augmentation on the device, in the hook that the mixin uses too."""
    return batch[0] + 0.1, batch[1]


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in both")
@pytest.mark.parametrize("place", ["module", "data module"])
def test_a_hook_in_place_of_the_mixins_is_an_error_since_nothing_would_be_mixed(place):
    hook = {"on_after_batch_transfer": brighten}
    loader = DataLoader(TensorDataset(*digits(16)), 8)
    if place == "module":
        model, data = type("Own", (Classifier,), hook)(), loader
    else:
        loaders = {"train_dataloader": lambda _: loader}
        model, data = Classifier(), type("Data", (L.LightningDataModule,), {**loaders, **hook})()
    with pytest.raises(RuntimeError, match=r"the training batch was not mixed: .*call super\(\) there"):
        trainer(max_epochs=1).fit(model, data)


@pytest.mark.parametrize("mode", ["automatic", "manual", "cached"])
def test_two_ranks_have_the_gradient_of_one_batch_and_one_may_validate_alone(mode, tmp_path):
    output = run_ranks("lightning_step.py", mode, str(tmp_path / "gradients.pt"))
    assert output.count("validation loss") == 1
    found = torch.load(tmp_path / "gradients.pt")
    torch.testing.assert_close(found, one_batch_gradients(*digits(16)))
    if (
        mode == "cached"
    ):  # a weight that one rank uses has a gradient on both, and one that none uses on neither
        assert "without gradient: unused\n" in output


def test_cached_backward_under_automatic_optimisation_is_refused():
    class Wrong(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return self.cached_backward(batch[0], lambda s: self.criterion(s, batch[1]), part_size=4)

    with pytest.raises(ValueError, match="automatic_optimization = False"):
        trainer(max_epochs=1).fit(Wrong(), DataLoader(TensorDataset(*digits(8)), 8))


def test_a_batch_of_another_structure_is_named():
    loader = DataLoader([{"image": torch.zeros(1, 8, 8), "label": 0}] * 4, 4)
    with pytest.raises(ValueError, match=r"\(inputs, labels\), got dict; override mix_batch"):
        trainer(max_epochs=1).fit(Classifier(), loader)


def test_a_mixin_behind_the_module_is_refused_since_nothing_would_be_mixed():
    with pytest.raises(TypeError, match=r"class Wrong\(MixupMixin, LightningModule\)"):
        type("Wrong", (L.LightningModule, MixupMixin), {})
    own = type("LightningModule", (MixupMixin, L.LightningModule), {})
    assert issubclass(type("Right", (own,), {}), MixupMixin)
