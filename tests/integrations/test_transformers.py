"""With the real Trainer: the loss scale of accumulation, labels that the model does not see, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frameworks import UNMIXED, C, digits, run_ranks
from torch.nn import functional as F
from torch.utils.data import Dataset

import icmixup as icm

pytest.importorskip("transformers")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from icmixup.integrations.transformers import MixupTrainerMixin

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class MixupTrainer(MixupTrainerMixin, Trainer):
    pass


class Images(Dataset):
    def __init__(self, number: int) -> None:
        self.images, self.labels = digits(number)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def make_model() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=C, **SMALL, **NO_DROPOUT)
    return ViTForImageClassification(config)


def make_trainer(
    folder: object,
    method: icm.Method | str = UNMIXED,
    model: torch.nn.Module | None = None,
    data: Dataset | None = None,
    **settings: Any,
) -> MixupTrainer:
    """By default one step of SGD with a learning rate of 1 on 16 images, in their order."""
    defaults = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    own = {key: settings.pop(key) for key in ("hidden", "size", "generator") if key in settings}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_grad_norm=0.0,
        disable_tqdm=True,
        **{**defaults, **settings},
    )
    data = Images(16) if data is None else data

    class InOrder(MixupTrainer):
        def _get_train_sampler(self, *_: object) -> torch.utils.data.SequentialSampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(
        make_model() if model is None else model,
        args,
        train_dataset=data,
        eval_dataset=data,
        method=method,
        **own,
    )


def step_by_hand(parts: int, method: icm.Method | str = UNMIXED, seed: int | None = None) -> dict[str, Any]:
    """Weights after one step of SGD on the mean loss of the parts of 16 images."""
    model = make_model().train()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    images, labels = digits(16)
    for part, of_part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        batch = {"pixel_values": part}
        (icm.training_loss(model, batch, of_part, method, generator=generator) / parts).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [UNMIXED, "ic-mixup"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulation_is_the_mean_of_its_batches(parts, method, tmp_path):
    trainer = make_trainer(
        tmp_path,
        method,
        per_device_train_batch_size=16 // parts,
        gradient_accumulation_steps=parts,
        generator=torch.Generator().manual_seed(3),
    )
    trainer.train()
    assert_same_weights(trainer.model.state_dict(), step_by_hand(parts, method, seed=3))


def test_the_logged_loss_does_not_grow_with_accumulation(tmp_path):
    def logged(parts: int) -> float:
        batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": parts}
        return make_trainer(tmp_path, "mixup", data=Images(16), **batches).train().training_loss

    assert logged(2) < 1.5 * logged(1)


def test_two_ranks_take_the_step_of_one_batch_and_one_may_evaluate_alone(tmp_path):
    output = run_ranks("transformers_step.py", str(tmp_path / "weights.pt"), str(tmp_path))
    assert output.count("validation loss") == 1
    assert_same_weights(torch.load(tmp_path / "weights.pt"), step_by_hand(parts=1))


@pytest.mark.parametrize("method", ["ic-mixup", "ic-regmixup", "ic-mixup-cutmix"])
def test_loss_falls_and_accuracy_is_above_chance(method, tmp_path):
    settings = {"optim": "adamw_torch", "learning_rate": 5e-3, "logging_steps": 5, "max_steps": 100}
    trainer = make_trainer(
        tmp_path, method, data=Images(500), per_device_train_batch_size=50, num_train_epochs=10, **settings
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    prediction = trainer.predict(Images(500))
    assert (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean() > 0.3


def test_evaluation_is_cross_entropy_of_integer_labels(tmp_path):
    trainer = make_trainer(tmp_path, "ic-mixup", per_device_eval_batch_size=16)
    trainer.train()
    metrics = trainer.evaluate()
    images, labels = digits(16)
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model(pixel_values=images).logits, labels)
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert trainer.model.config.problem_type in (None, "single_label_classification")


class Renamed(torch.nn.Module):
    """A model whose labels have another name."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = make_model()

    def forward(self, pixel_values: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        assert target is None or not self.training, "labels of a training batch reach the model"
        return self.vit(pixel_values, labels=target)


def test_labels_of_another_name_train_and_evaluate_as_labels_do(tmp_path):
    data = [{"pixel_values": i["pixel_values"], "target": i["labels"]} for i in Images(16)]
    losses = []
    for model, of_model, names in ((None, None, None), (Renamed(), data, ["target"])):
        generator = torch.Generator().manual_seed(0)
        settings = {"label_names": names, "per_device_train_batch_size": 16}
        trainer = make_trainer(tmp_path, "ic-mixup", model, of_model, generator=generator, **settings)
        losses += [(trainer.train().training_loss, trainer.evaluate()["eval_loss"])]
    assert losses[0] == pytest.approx(losses[1])


def test_soft_targets_in_evaluation_are_refused_with_what_to_pass(tmp_path):
    soft = Images(8)
    soft.labels = F.one_hot(soft.labels, C).float()
    trainer = make_trainer(tmp_path, "ic-mixup")
    with pytest.raises(ValueError, match=r"expected \(B,\) integers"):
        trainer.evaluate(soft)


class WithOutputs(MixupTrainer):
    """An override that asks for outputs, for example to log a training accuracy."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (loss, outputs) if return_outputs else loss


def test_outputs_of_a_training_batch_are_refused_since_nothing_would_be_mixed(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    trainer = WithOutputs(make_model(), args, train_dataset=Images(16), eval_dataset=Images(16))
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="compute_loss returns no outputs in training"):
        trainer.train()


def test_another_loss_beside_the_method_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 has no effect"):
        make_trainer(tmp_path, label_smoothing_factor=0.1)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_model_of_another_problem_is_refused_since_its_loss_would_not_be_used(problem, tmp_path):
    model = make_model()
    model.config.problem_type = problem
    with pytest.raises(ValueError, match=f"problem_type='{problem}'"):
        make_trainer(tmp_path, model=model)


class OfSignals(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(8, C), []

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        self.seen.append(input_values)
        return {"logits": self.linear(input_values)}


def test_cutmix_of_signals_takes_a_size(tmp_path):
    data = [{"input_values": torch.full((8,), float(i)), "labels": i} for i in range(8)]
    model = OfSignals()
    make_trainer(tmp_path, "ic-cutmix", model, data, size=(8,), per_device_train_batch_size=8).train()
    (signals,) = model.seen
    assert torch.equal(signals, signals.round()), "values are blended"
    with pytest.raises(ValueError, match=r"pass size=\(T,\)"):
        make_trainer(tmp_path, "ic-cutmix", OfSignals(), data).train()


class Words(Dataset):
    """Texts of 6 tokens, two of which tell the class."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (number,), generator=generator)
        self.tokens = torch.randint(20, 40, (number, 6), generator=generator)
        self.tokens[:, 2:4] = self.labels[:, None] + 5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_text_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=4, **SMALL, **NO_DROPOUT))


def test_token_ids_are_refused_at_the_input(tmp_path):
    with pytest.raises(ValueError, match="ic-manifold"):
        make_trainer(tmp_path, "ic-mixup", make_text_model(), Words(16)).train()


@pytest.mark.parametrize(("method", "accuracy"), [("manifold", 0.9), ("ic-manifold", 0.4)])
def test_text_is_mixed_at_a_hidden_layer_and_classified_above_chance(method, accuracy, tmp_path):
    model = make_text_model()
    trainer = make_trainer(
        tmp_path,
        method,
        model,
        Words(400),
        hidden=(model.classifier,),
        optim="adamw_torch",
        learning_rate=3e-3,
        max_steps=100,
        per_device_train_batch_size=40,
        generator=torch.Generator().manual_seed(0),
    )
    trainer.train()
    prediction = trainer.predict(Words(200))
    assert (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean() > accuracy  # chance is 0.25


def test_a_mixin_behind_the_trainer_is_refused_since_nothing_would_be_mixed():
    with pytest.raises(TypeError, match=r"class Wrong\(MixupTrainerMixin, Trainer\)"):
        type("Wrong", (Trainer, MixupTrainerMixin), {})
    own = type("Trainer", (MixupTrainerMixin, Trainer), {})
    assert issubclass(type("Right", (own,), {}), MixupTrainerMixin)


def test_a_trainer_with_a_loss_of_its_own_is_refused_since_training_would_not_use_it():
    class Weighted(Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    for bases in ((MixupTrainerMixin, Weighted), (MixupTrainer, Weighted)):
        with pytest.raises(TypeError, match=r"compute_loss of Weighted has no effect .* in Wrong and call"):
            type("Wrong", bases, {})
    assert type("InFront", (MixupTrainer,), {"compute_loss": Weighted.compute_loss})
