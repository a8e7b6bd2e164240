"""A recipe is the paper's paragraph by default, complete, and known by its key."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from icmixup import METHODS
from icmixup.lab.training.recipe import (
    CHOICES,
    FINETUNE,
    FIRST_FIELDS,
    RANGES,
    RECIPES,
    Recipe,
    fit_batch_size,
    learning_rate,
    lengthen,
    read_recipe,
)

# A value for every field that is not its default.
OTHERS: dict[str, Any] = {
    "dataset": "digits",
    "model": "small-cnn",
    "method": "mixup",
    "seed": 1,
    "fraction": 0.5,
    "per_class": 10,
    "imbalance": 0.01,
    "data_seed": 1,
    "split": 0,
    "image_size": 32,
    "held_out": 0.2,
    "tail_draw": "ldam",
    "after": "adjust",
    "after_tau": 0.5,
    "after_epochs": 3,
    "weights": "lite0.safetensors",
    "weights_digest": "2d3c884243",
    "train": "head",
    "epochs": 100,
    "min_steps": 1000,
    "batch_size": 64,
    "drop_last": True,
    "sampler": "class-balanced",
    "optimizer": "adamw",
    "lr": 0.2,
    "lr_batch": 128,
    "layer_decay": 0.75,
    "schedule": "cosine",
    "lr_drops": (30, 60),
    "lr_factor": 0.1,
    "warmup_epochs": 5,
    "warmup_fraction": 0.1,
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 1e-4,
    "decay_norms": False,
    "clip_norm": 1.0,
    "ema": 0.999,
    "cosine_classifier": True,
    "padding": 2,
    "padding_mode": "reflect",
    "flip": False,
    "rotation": 0.0,
    "trivial": True,
    "autoaugment": True,
    "cutout": 16,
    "random_resized_crop": 0.2,
    "colour_jitter": 0.4,
    "erasing": 0.25,
    "alpha": 1.0,
    "mode": "pair",
    "negatives": ("pairs", "classes"),
    "duplicates": "ignore",
    "temperature": 0.5,
    "label_smoothing": 0.1,
    "kappa": 2.0,
    "tau": 1.0,
    "adjust_tau": 2.0,
    "joint": True,
    "mix_prob": 0.5,
    "mix_off_epoch": 150,
    "precision": "float32",
    "compile": True,
    "graph": False,
    "eval_every": 1,
}
TOGETHER = OTHERS | {"trivial": False}  # one policy at a time


def test_the_defaults_are_the_papers_implementation_details() -> None:
    recipe = Recipe()
    assert (recipe.model, recipe.method) == ("resnet34", "ic-mixup")
    assert (recipe.epochs, recipe.batch_size) == (200, 128)
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (0.1, 0.9, 5e-4)  # SGD
    assert (recipe.schedule, recipe.drops, recipe.lr_factor) == ("step", (50, 100, 150), 0.2)
    assert (recipe.padding, recipe.padding_mode, recipe.flip, recipe.rotation) == (4, "zeros", True, 15.0)
    assert (recipe.nesterov, recipe.warmup_epochs, recipe.ema, recipe.clip_norm) == (False, 0, None, None)
    assert recipe.method_at(0).alpha == 0.2
    assert recipe.method_at(0).mode == "batch"  # one lam for the batch
    assert Recipe(method="regmixup").method_at(0).alpha == 20.0
    assert RECIPES["paper"] == recipe


def test_the_table_of_other_values_names_every_field() -> None:
    # Folds exclude a split, and a fold needs folds: tests/lab/comparison/test_cross_validation.py has them.
    assert {*OTHERS, "folds", "fold"} == {field.name for field in dataclasses.fields(Recipe)}


def test_no_setting_counts_more_epochs_than_a_run_can_have() -> None:
    most = RANGES["epochs"].high
    assert {name: RANGES[name].high for name in ("warmup_epochs", "mix_off_epoch", "eval_every")} == {
        "warmup_epochs": most,
        "mix_off_epoch": most,
        "eval_every": most,
    }


@pytest.mark.parametrize("field", OTHERS)
def test_the_key_changes_with_every_field(field: str) -> None:
    changed = Recipe(**{field: OTHERS[field]})
    assert getattr(changed, field) != getattr(Recipe(), field)
    assert changed.key != Recipe().key
    assert changed.name != Recipe().name


def test_all_keys_differ_and_equal_recipes_share_theirs() -> None:
    recipes = [Recipe(), Recipe(**TOGETHER), *(Recipe(**{name: value}) for name, value in OTHERS.items())]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
    assert Recipe(**TOGETHER).key == Recipe(**dict(reversed(TOGETHER.items()))).key


@pytest.mark.parametrize("recipe", [Recipe(**TOGETHER), *RECIPES.values()])
def test_a_recipe_survives_json(recipe: Recipe) -> None:
    again = read_recipe(json.loads(json.dumps(recipe.fields())))
    assert again == recipe
    assert again.key == recipe.key


def test_a_name_says_what_a_person_looks_for_and_ends_in_the_key() -> None:
    recipe = Recipe(dataset="digits", model="small-cnn", per_class=30, imbalance=100, seed=4, method="erm")
    assert recipe.name == f"digits-30each-lt0.01.small-cnn.erm.s4.{recipe.key}"
    assert Recipe(fraction=0.1).name.startswith("cifar100-10pct.resnet34.ic-mixup.s0.")


@pytest.mark.parametrize(
    ("dataset", "start"), [("some/where/birds", "birds."), ("some/where/birds/", "birds."), ("hf:a/b", "b.")]
)
def test_a_name_is_one_folder_whatever_the_dataset_and_model(dataset: str, start: str) -> None:
    name = Recipe(dataset=dataset, model="hub/model").name
    assert name.startswith(start)
    assert "/" not in name


@pytest.mark.parametrize("method", METHODS)
def test_the_method_is_the_tables_own_unless_the_recipe_says_otherwise(method: str) -> None:
    assert Recipe(method=method).method_at(199) == METHODS[method].at(1)
    mine = {"alpha": 0.7, "mode": "elem", "duplicates": "ignore", "temperature": 2.0, "label_smoothing": 0.1}
    mine |= {"kappa": 2.0, "tau": 1.0}
    changed = Recipe(method=method, joint=True, mix_prob=0.5, **mine).method_at(0)
    given = {"joint": True, "prob": 0.5, **mine}
    for entry in dataclasses.fields(changed):
        used = entry.name in given and METHODS[method].uses(entry.name)
        wanted = given[entry.name] if used else getattr(METHODS[method].at(0), entry.name)
        assert getattr(changed, entry.name) == wanted, entry.name


def test_mixing_stops_after_its_last_epoch() -> None:
    recipe = Recipe(mix_off_epoch=150, mix_prob=0.8)
    assert [recipe.method_at(epoch).prob for epoch in (0, 149, 150, 199)] == [0.8, 0.8, 0.0, 0.0]


@pytest.mark.parametrize(
    ("epochs", "drops", "wanted"),
    [(200, None, (50, 100, 150)), (2, None, (0.5, 1, 1.5)), (30, (10, 20), (10, 20)), (30, (), ())],
)
def test_drops_are_at_the_quarters_unless_given(
    epochs: int, drops: tuple[int, ...] | None, wanted: tuple[float, ...]
) -> None:
    assert Recipe(epochs=epochs, lr_drops=drops).drops == wanted


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "ic-mixupp"}, "did you mean ic-mixup"),
        ({"fraction": 0.0}, "fraction .* got 0"),
        ({"fraction": 1.5}, "fraction .* got 1.5"),
        ({"fraction": float("nan")}, "fraction .* got nan"),
        ({"mix_prob": -0.1}, "mix_prob .* got -0.1"),
        ({"mix_prob": 1.1}, "mix_prob .* got 1.1"),
        ({"epochs": 0}, "epochs .* got 0"),
        ({"batch_size": 0}, "batch_size .* got 0"),
        ({"eval_every": 0}, "eval_every .* got 0"),
        ({"lr": -1.0}, "lr .* got -1"),
        ({"imbalance": 0.0}, "imbalance .* got 0"),
        ({"lr_drops": (50, 200)}, r"lr_drops must be below epochs \(200\), got \(50, 200\)"),
        ({"ema": 1.1}, "ema .* got 1.1"),
        ({"tau": 1.5}, "tau .* from 0 to 1, got 1.5"),
        ({"kappa": 0.0}, "kappa .* got 0"),
        ({"mode": "group"}, "mode must be one of 'batch'.* got 'group'"),
        ({"duplicates": "keep"}, "duplicates must be .* 'ignore'.* got 'keep'"),
        ({"schedule": "linear"}, "schedule must be .* 'cosine', got 'linear'"),
        ({"precision": "float16"}, "precision must be .* 'bfloat16', got 'float16'"),
        ({"padding_mode": "edge"}, "padding_mode must be .* 'reflect', got 'edge'"),
    ],
)
def test_a_wrong_value_is_named_with_a_way_out(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe(**fields)


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().lr = 1.0  # type: ignore[misc]


# Computed with version 0.1.0.
FIRST_KEYS = {
    "b53201ccfc": Recipe(),
    "532976cb5f": RECIPES["strong"],
    "9c1e8f9781": RECIPES["quick"],
    "c0f645c580": Recipe(
        dataset="digits",
        model="small-cnn",
        lr_drops=(3, 5),
        epochs=9,
        negatives=("pairs", "classes"),
        ema=0.9,
        seed=4,
    ),
}


@pytest.mark.parametrize("key", FIRST_KEYS)
def test_recipes_of_0_1_0_keep_their_keys_although_fields_were_added(key: str) -> None:
    assert FIRST_KEYS[key].key == key
    assert set(FIRST_FIELDS) < {field.name for field in dataclasses.fields(Recipe)}


def test_a_recipe_that_was_written_before_fields_were_added_is_read_with_their_defaults() -> None:
    old = {name: value for name, value in Recipe(seed=3).fields().items() if name in FIRST_FIELDS}
    assert read_recipe(old) == Recipe(seed=3)


@pytest.mark.parametrize(("batch_size", "factor"), [(128, 1.0), (32, 0.5), (512, 2.0)])
def test_the_learning_rate_is_scaled_by_the_square_root_of_the_batch(batch_size: int, factor: float) -> None:
    recipe = dataclasses.replace(FINETUNE, batch_size=batch_size, epochs=20)
    assert learning_rate(recipe, 2.0) == pytest.approx(2e-4 * factor)  # the end of 10 % warm-up
    assert learning_rate(recipe, 1.0) == pytest.approx(1e-4 * factor)
    assert learning_rate(recipe, 11.0) == pytest.approx(1e-4 * factor)  # the middle of the cosine


@pytest.mark.parametrize(("images", "batch_size"), [(128, 128), (127, 16), (60, 8), (9, 2), (2, 2)])
def test_a_batch_has_no_more_images_than_there_are(images: int, batch_size: int) -> None:
    assert fit_batch_size(FINETUNE, images) == dataclasses.replace(FINETUNE, batch_size=batch_size)


@pytest.mark.parametrize(("images", "epochs"), [(1500, 91), (20_000, 20), (128, 1000)])
def test_finetune_trains_twenty_epochs_or_a_thousand_steps(images: int, epochs: int) -> None:
    longer = lengthen(FINETUNE, images)
    assert longer.epochs == epochs
    assert longer.min_steps == 0
    assert longer.epochs * (images // 128) >= 1000  # the last, smaller batch is dropped
    assert lengthen(longer, images) == longer


def test_a_longer_recipe_keeps_the_shape_of_its_schedule() -> None:
    recipe = dataclasses.replace(FINETUNE, lr_drops=(10,), warmup_epochs=2, mix_off_epoch=15)
    longer = lengthen(recipe, 1280)  # ten steps an epoch
    assert (longer.epochs, longer.lr_drops, longer.warmup_epochs, longer.mix_off_epoch) == (
        100,
        (50,),
        10,
        75,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adam"}, "optimizer .*'adam'"),
        ({"train": "body"}, "train .*'body'"),
        ({"layer_decay": 0.0}, "layer_decay must be"),
        ({"warmup_fraction": 1.5}, "warmup_fraction must be"),
        ({"lr_batch": 0}, "lr_batch must be"),
    ],
)
def test_a_wrong_value_of_fine_tuning_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


def test_every_field_declares_what_it_may_be() -> None:
    declared = {*RANGES, *CHOICES}
    for field in dataclasses.fields(Recipe):
        kinds = str(field.type).replace("None", "").replace("|", " ").split()
        if "int" in kinds or "float" in kinds:
            assert field.name in RANGES, f"{field.name} is a number without a range"
        elif kinds not in (["bool"], ["str"]) and not kinds[0].startswith("tuple"):
            assert field.name in declared, f"{field.name} ({field.type}) has no list of allowed values"
