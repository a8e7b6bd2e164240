"""With the real fastai: a callback that trains with the method's loss and leaves validation as it was."""

from __future__ import annotations

import pytest
import torch
from frameworks import UNMIXED, C, digits, mean_gradients, one_batch_gradients, small_network
from torch.nn import functional as F
from torch.utils.data import TensorDataset

pytest.importorskip("fastai")
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy

from icmixup.integrations.fastai import MixBatches


def make_learner(*callbacks: Callback, number: int = 16, batch_size: int = 16) -> Learner:
    images, labels = digits(number)
    data = TensorDataset(images, labels)
    loaders = DataLoaders(DataLoader(data, bs=batch_size), DataLoader(data, bs=number), device="cpu")
    loaders.c = C
    learner = Learner(
        loaders, small_network(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=list(callbacks)
    )
    learner.logger = lambda *_: None
    return learner


class KeepGradients(Callback):
    """Copies gradients before each step, after GradientAccumulation has decided to take it."""

    order = GradientAccumulation.order + 1

    def before_step(self) -> None:
        self.gradients = [parameter.grad.clone() for parameter in self.model.parameters()]


def test_loss_falls_and_accuracy_is_above_chance():
    torch.manual_seed(0)
    learner = make_learner(MixBatches("ic-mixup"), number=500, batch_size=50)
    learner.fit(6, 5e-3)
    first, last = learner.recorder.losses[0], learner.recorder.losses[-1]
    assert last < first
    assert learner.validate()[1] > 0.6


def test_validation_and_prediction_keep_the_learners_own_loss_on_integer_labels():
    learner = make_learner(MixBatches("ic-mixup"))
    own = learner.loss_func
    learner.fit(1)
    assert learner.loss_func is own
    images, labels = digits(16)
    expected = F.cross_entropy(learner.model(images), labels)
    assert learner.recorder.values[-1][1] == pytest.approx(expected.item(), rel=1e-4)
    probabilities, targets = learner.get_preds()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(16))
    assert torch.equal(targets, labels)


def test_a_batch_has_the_gradient_of_the_method():
    keep = KeepGradients()
    make_learner(MixBatches(UNMIXED), keep).fit(1)
    torch.testing.assert_close(keep.gradients, one_batch_gradients(*digits(16)))


def test_metrics_of_training_batches_see_integer_labels_as_with_fastais_mixup():
    learner = make_learner(MixBatches("ic-mixup"))
    learner.recorder.train_metrics = True
    learner.fit(1)
    _, train_accuracy, _, accuracy_ = learner.recorder.values[-1]
    assert 0 <= train_accuracy <= 1
    assert 0 <= accuracy_ <= 1


class KeepInputs(Callback):
    def after_pred(self) -> None:
        self.inputs = self.xb[0]


def test_cutmix_of_a_signal_takes_a_size():
    data = TensorDataset(torch.eye(2)[torch.arange(16) % 2].repeat_interleave(8, dim=1), torch.arange(16) % 2)
    loaders = DataLoaders(DataLoader(data, bs=16), DataLoader(data, bs=16), device="cpu")
    keep = KeepInputs()
    mix = MixBatches("ic-cutmix", 2, size=(16,))
    learner = Learner(loaders, torch.nn.Linear(16, 2), loss_func=CrossEntropyLossFlat(), cbs=[mix, keep])
    learner.logger = lambda *_: None
    torch.manual_seed(0)
    learner.fit(1)
    assert ((keep.inputs == 0) | (keep.inputs == 1)).all(), "values are blended"


def test_accumulation_is_the_mean_of_its_batches():
    keep = KeepGradients()
    make_learner(MixBatches(UNMIXED), GradientAccumulation(n_acc=16), keep, batch_size=8).fit(1)
    torch.testing.assert_close(keep.gradients, mean_gradients(*digits(16), parts=2))


class Stop(Callback):
    """Stops the first batch at an event: as fastai's callbacks do, or as Ctrl-C does."""

    order = 100  # after the other callbacks

    def __init__(self, event: str, error: type[BaseException]) -> None:
        setattr(self, event, self.stop)
        self.error: type[BaseException] | None = error

    def stop(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("error", [CancelBatchException, CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["before_batch", "after_pred", "after_loss"])
def test_an_interrupted_fit_leaves_the_learner_its_loss_and_its_probabilities(event, error):
    learner = make_learner(MixBatches("ic-mixup"), Stop(event, error))
    own = learner.loss_func
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            learner.fit(1)
    else:
        learner.fit(1)
    probabilities, _ = learner.get_preds()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(16))
    assert learner.loss_func is own
    learner.fit(1)
    assert learner.loss_func is own


def test_a_missing_number_of_classes_is_named():
    learner = make_learner(MixBatches("ic-mixup"))
    del learner.dls.c
    with pytest.raises(ValueError, match="pass num_classes"):
        learner.fit(1)


@pytest.mark.parametrize("other", [CutMix, MixUp, MixBatches])
def test_a_second_callback_that_mixes_is_refused_since_labels_would_be_wrong(other):
    learner = make_learner(MixBatches("ic-mixup"))
    own = learner.loss_func
    with pytest.raises(ValueError, match=rf"batches that .* mixes too; .*remove_cb\({other.__name__}\)"):
        learner.fit(1, cbs=other())
    probabilities, _ = learner.get_preds()
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(16))
    assert learner.loss_func is own
    learner.fit(1)
